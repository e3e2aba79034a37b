"""Lower bounds of the layouts of a search, as arrays.

An array has an entry for each division of a family's work (`LayoutSet`): dense ranks x experts x shard x rows. A stage
is a sum of parts: layers by kind, and the head. With the seconds f and b of a part's passes, m micro-batches, and the
parts at a place p of the pipeline,

    step >= most over p of  m x (f + b) of p  +  f of the stages before p  (+ b of these, if backward is not split)

because a place starts after the first micro-batch has passed the stages before it, and these still have to pass the
last gradient on. Memory is at least the state of a place, and what its layers keep for the micro-batches in flight.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product

import numpy as np

from penstock.base.errors import KernelError
from penstock.config.fit import NO_PIPELINE, SPLITTING_SCHEDULES
from penstock.config.run import Run
from penstock.kernels.grouped_gemm import GATHER_LIMIT
from penstock.layout.actions import Kind
from penstock.plan.bounds import WAITING_SCHEDULES, TimeBounds, kept_numbers, path_counts
from penstock.plan.candidates import (
    MOST_MICRO_BATCH,
    Divisions,
    Experts,
    LayoutSet,
    Places,
    Reference,
    Saving,
    Scaled,
    run_of,
    with_saving,
)
from penstock.plan.composed_run import StageContents, parts_of
from penstock.plan.composer import Composer
from penstock.plan.costs import HardwareTimes, OpCosts, buffer_rows, routed_rows
from penstock.plan.hardware import Cluster, RankGroup
from penstock.plan.liveness import PipelineShape, enough, first_of_kinds, has_experts, held_counts, layer_kind
from penstock.plan.memory import MOMENT_BYTES
from penstock.plan.meta_run import gathered_bytes
from penstock.plan.op_recorder import ARRIVE, COPIES, END, FORK, JOIN, PUT_OFF, WAIT, RecordedOps
from penstock.plan.param_state import SUM_BYTES, ParamFacts
from penstock.plan.rates import BYTES, CollectiveName
from penstock.plan.rules import Sizes
from penstock.plan.step_time import LAUNCHED, fsdp_copies
from penstock.plan.streams import OVERLAP_GAIN

EMBED, HEAD = "embed", "head"
"""Parts beside layers: the embedding, also where a head shares it, and the output projection with the loss."""

SCALED = 0.985
"""What a layer holds of a token is at least this share of what two other layouts tell (`SpaceBounds.closer`)."""

SCALED_TIME = 0.95  # the same of the seconds that `TimeBounds` leaves out, and of the operators that the host launches

SCALED_PEAKS = np.array([0.5, 0.7])
"""The same of what a layer holds besides at the peaks of forward and backward, where tensor or context ranks share it.

Of 4,400 drawn pieces of DeepSeek-V3 and Mixtral the least shares were 0.54 and 0.76.
"""

SMALL, LARGE = 1 << 20, (1e8, 1e9, 1e10)  # bytes of a message that is all latency, and of some without

FSDP_COLLECTIVES: tuple[CollectiveName, ...] = ("all-gather", "reduce-scatter")

HOST_SHARE = 0.9
"""Of the time of the host link, the part that kernels beside it cannot hide: device memory is many times as fast."""

PATH_TIMES = 4  # a path is the longest for times of backward passes in so many parts of a forward pass

INPUT_SHARE = 0.5  # of what is not products in a backward pass, at least this is in the input gradient

_CONTAIN = ("layer", "moe", "expert-activation")
"""Modules of a layer that contain each other: what is computed again counts once."""


_UNTIMED = (JOIN, WAIT, PUT_OFF, *COPIES, ARRIVE, "clone")
"""What a reference has and no bound counts: a copy that makes rows contiguous is not needed where there is one row."""

_GATHER = "gather_rows_kernel"  # counts in no bound where a reference has so many rows that products cannot gather them
_BESIDE_LAYERS = (0, 0), (0, 2)  # widths that `numpy.pad` adds to what there is of layers, for the other parts
ALONE = Experts(1, 1, "local", (0,))  # all experts on each rank


class SpaceBounds:
    """Bounds of all layouts of a run on a cluster; `neutral` are sizes of the run with one rank for everything."""

    def __init__(
        self, run: Run, cluster: Cluster, imbalance: float, composer: Composer, neutral: Sizes, times: HardwareTimes
    ) -> None:
        self._run = run
        self._cluster = cluster
        self._imbalance = imbalance
        self._composer = composer
        self._neutral = neutral
        self._times = TimeBounds(run, cluster, imbalance, times)
        self._hardware_times = times
        self._kinds = tuple(first_of_kinds(run, range(run.model.layers)))
        self.parts = (*self._kinds, EMBED, HEAD)
        self._launch_seconds = cluster.hardware.host.launch_seconds
        # Of layouts without a pipeline; auto captures all of some, and nothing on other chips.
        auto = "full" if cluster.hardware.vendor == "nvidia" else "none"
        self._launched = LAUNCHED[auto if run.graphs.capture == "auto" else run.graphs.capture]
        self._facts = composer.facts(run_of(run, neutral))
        depths = range(run.model.layers, run.model.layers + run.model.mtp_layers)
        self._mtp = tuple((kind, 1) for kind in (layer_kind(run, layer) for layer in depths) if kind in self._kinds)
        """Layers of the prediction depths, which are behind those of the last stage."""
        whole = composer.contents(run_of(run, neutral))
        self._state_of_all, self._work_of_all = self._counts(whole), self._work(whole)
        self._places = cache(self._make_places)
        self._in_flight = cache(self._make_in_flight)
        self._reference = cache(self._make_reference)
        self._prefetched = set[tuple[tuple[int, int], tuple[str, ...], bool]]()
        """Ranks, recomputation and splitting of the references with all experts on each rank."""
        self._least = cache(self._make_least)

    def divisions(self, family: LayoutSet) -> Divisions:
        run, parts = self._run, len(self.parts)
        shape = (len(family.dense), len(family.experts), len(family.shards), len(family.rows))
        work = np.zeros((*shape, parts, 6))
        of_ffn = cache(partial(self._ffn, family.experts))
        choices = product(enumerate(family.dense), enumerate(family.shards), enumerate(family.rows))
        for (d, (tp, cp)), (s, shard), (r, micro_batch) in choices:
            accumulates, tokens = shard != "full", micro_batch * run.training.sequence_length // (tp * cp)
            for k, part in enumerate(self._kinds):
                timing = self._times.attention(part.startswith("local"), tp, cp, micro_batch, accumulates)
                ffn = of_ffn(has_experts(part), tokens, tp, accumulates)
                work[d, :, s, r, k] = ffn + np.array(
                    [timing.forward, timing.backward, timing.weight, timing.forward, 0.0, 0.0]
                )
            head = self._times.head(tp, cp, micro_batch)
            work[d, :, s, r, -1, :2] = head.forward, head.backward
        places = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, 4)
        seconds = work.reshape(len(places), parts, 6)
        ranks = np.array([tp * cp for tp, cp in family.dense])[places[:, 0]]
        rows = np.array(family.rows)[places[:, 3]]
        # Nothing of the state depends on the rows, the innermost choice.
        once, each = places[:: len(family.rows)], partial(np.repeat, repeats=len(family.rows), axis=0)
        state, movable, whole = map(each, self._state(family, once))
        gather, reduce = self._fsdp_seconds(family, places, whole)
        tokens = rows * run.training.sequence_length // ranks
        micro_batches = run.training.global_batch // (rows * (self._cluster.devices // family.pp // ranks))
        least = self._least(family.experts)
        more = np.zeros((len(places), parts, 2))
        more[:, : len(self._kinds)] = SCALED_TIME * (least.fixed + tokens[:, None, None] * least.linear)
        return Divisions(
            family=family,
            places=places,
            forward=seconds[..., 0] + gather + more[..., 0],
            backward=seconds[..., 1] + gather + reduce + more[..., 1],
            products=seconds[..., 1],
            weight=seconds[..., 2],
            again=np.moveaxis(seconds[..., 3:], -1, 1),
            micro_batches=micro_batches,
            tokens=tokens,
            state=state,
            movable=movable,
            whole=whole,
            launching=self._launching(family.pp, micro_batches, least.launches),
            update=each(self._update_seconds(family, once)),
        )

    def _launching(self, pp: int, micro_batches: np.ndarray, launches: np.ndarray) -> np.ndarray:
        """Seconds of the host in a step by part, from the launches of a layer of each kind."""
        seconds = self._launch_seconds * (1.0 if pp > 1 else self._launched)
        of_layers = SCALED_TIME * seconds * micro_batches[:, None] * launches.sum(-1)
        return np.pad(of_layers, _BESIDE_LAYERS)

    def ideal_seconds(self, divisions: Divisions) -> np.ndarray:
        """Seconds of a step if all places of the pipeline had the same work and none waited."""
        whole = (divisions.forward + divisions.backward) @ self._work_of_all
        return (divisions.micro_batches * whole + divisions.update @ self._state_of_all) / divisions.family.pp

    def fastest(self, divisions: Divisions, count: int, limit: int, among: np.ndarray | None = None) -> Divisions:
        """The divisions with the least ideal time, of those `among` whose state fits if the host has the optimizer."""
        fits = divisions.state @ self._state_of_all / divisions.family.pp <= limit
        at = np.flatnonzero(fits if among is None else fits & among)
        return divisions.where(at[np.argsort(self.ideal_seconds(divisions)[at])[:count]])

    def smallest(
        self, divisions: Divisions, shape: int, saving: Saving, limit: int
    ) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Divisions with the fewest rows each that may have less memory than a limit: bytes, and place."""
        some = divisions.where(divisions.legal(shape))
        if not len(some):
            return
        memory = self.bytes(some, shape, saving)
        some, memory = some.where(memory <= limit), memory[memory <= limit]
        order = np.argsort(some.places[:, 3], kind="stable")
        _, fewest = np.unique(some.places[order, :3], axis=0, return_index=True)
        for at in order[fewest].tolist():
            yield float(memory[at]), tuple(some.places[at].tolist())

    def seconds(self, divisions: Divisions, shape: int, saving: Saving) -> np.ndarray:
        """Seconds of a step; infinite where shape and division do not go together."""
        schedule, vpp = divisions.family.shapes[shape]
        places = self._places(divisions.family.pp, schedule, vpp)
        both = divisions.forward + divisions.backward
        again = [number for number, name in enumerate(_CONTAIN) if name in saving.recompute]
        if again:
            both = both + divisions.again[:, again[0]]
        ramp = divisions.forward if schedule in SPLITTING_SCHEDULES else divisions.forward + divisions.backward
        seconds = (both @ places.work.T) * divisions.micro_batches[:, None] + ramp @ places.before.T
        # A host that does not launch as fast as the device computes.
        seconds = np.maximum(seconds, divisions.launching @ places.work.T)
        if saving.offload:
            link = self._cluster.hardware.host_link.bytes_per_second
            seconds += HOST_SHARE / link * (divisions.movable @ places.held.T)
        update = (divisions.update @ places.held.T).max(1)
        return np.where(divisions.legal(shape), seconds.max(1) + update, np.inf)

    def bytes(self, divisions: Divisions, shape: int, saving: Saving, kept_times: float = 1.0) -> np.ndarray:
        """Bytes of tensors on the fullest rank; activations count `kept_times`.

        What its host lacks for the optimizer is lacking here.
        """
        width, kept = BYTES[self._run.training.precision], kept_numbers(self._run.model, saving.recompute)
        layers = np.array([width * kept[has_experts(kind)] for kind in self._kinds])
        of_tokens = np.zeros((len(divisions), len(self._kinds), 2))
        of_tokens[..., 0] = kept_times * divisions.tokens[:, None] * layers
        return self._bytes(divisions, shape, saving, of_tokens)

    def _bytes(self, divisions: Divisions, shape: int, saving: Saving, held: np.ndarray) -> np.ndarray:
        """`bytes`, with the memory of a layer of each kind: all ways of `Reference.kept`, or the first two."""
        family, layers = divisions.family, len(self._kinds)
        name, vpp = family.shapes[shape]
        places = self._places(family.pp, name, vpp)
        state = divisions.state if saving.offload else divisions.state + divisions.movable
        sizes = state @ places.held.T
        # FSDP2 has the weights of the largest layer of a place at least once for each of its buffers.
        sizes += gathered_bytes(
            self._run, 0, (divisions.whole[:, None, :layers] * (places.held[:, :layers] > 0)).max(2)
        )
        # Illegal combinations may have too few micro-batches for their schedule.
        counts = np.where(divisions.legal(shape), divisions.micro_batches, 0)
        alike = {number: enough(name, family.pp, number) for number in np.unique(counts[counts > 0]).tolist()}
        ways = held.reshape(len(held), -1)
        for number in set(alike.values()):
            some = np.isin(counts, [count for count, other in alike.items() if other == number])
            moments = self._in_flight(family.pp, name, vpp, number, closely=held.shape[-1] > 2)
            # The most of all moments at which a place may be fullest.
            sizes[some] += np.stack([(ways[some] @ moment.T).max(1) for moment in moments], 1)
        if not saving.offload:
            return sizes.max(1)
        hardware = self._cluster.hardware
        lacking = (divisions.movable @ places.held.T).max(1) - hardware.host_link.memory_bytes
        largest = sizes.max(1)
        # Of layouts whose hosts lack as much, those with less on the device come first.
        over = hardware.memory.capacity_bytes + lacking + largest / 1000
        return np.where(lacking > 0, np.maximum(largest, over), largest)

    def _make_in_flight(
        self, pp: int, schedule: str, vpp: int, micro_batches: int, *, closely: bool
    ) -> tuple[np.ndarray, ...]:
        """For each of `Places` a row for each moment: layers by kind with each way of `Reference.kept`.

        The first two ways are of the micro-batches in flight; `closely`, all are, of these and the pass itself.
        """
        places = self._places(pp, schedule, vpp)
        shape = PipelineShape(schedule, pp, vpp, micro_batches)
        highest = []
        for numbers, stages in zip(places.numbers, places.stages, strict=True):
            layers = np.stack([self._work([stage])[: len(self._kinds)] for stage in stages])
            # By stage and kind of an action, the micro-batches that are held at its starts.
            starts = [(((0, Kind.FORWARD),), ((0, 0),)), (((0, Kind.BACKWARD),), ((1, 0),))]
            if schedule != NO_PIPELINE:
                starts = [start for position in numbers for start in held_counts(shape, position).items()]
            if not closely:  # The actions add nothing.
                starts = [((), tuple(counts for _, points in starts for counts in points))]
            rows = []
            for work, points in starts:
                counts = np.array(points, np.float64).reshape(len(points), 2, len(stages))
                every = np.moveaxis(counts @ layers, 1, -1)
                if closely:
                    every = np.pad(every, ((0, 0), *_BESIDE_LAYERS))
                    for number, kind in work:
                        every = (every[:, None] + self._of_pass(stages[number], kind)).reshape(-1, *every.shape[1:])
                rows.append(every.reshape(len(every), -1))
            highest.append(_highest(np.unique(np.concatenate(rows), axis=0)))
        return tuple(highest)

    def _of_pass(self, stage: StageContents, kind: Kind) -> np.ndarray:
        """What a pass adds to the memory before it, at the last layer of each run of equal layers."""
        kinds, layers = self._kinds, self._layers_of(stage)
        if kind is Kind.WEIGHT or not layers:
            return np.zeros((1, len(kinds), 4))
        changes = np.zeros((len(layers), len(kinds), 4))
        runs = np.stack([count * (np.array(kinds) == name) for name, count in layers])
        for number, (name, _) in enumerate(layers):
            if kind is Kind.FORWARD:
                changes[number, :, 0] = runs[: number + 1].sum(0)
            else:
                # The layers behind it have left their kept memory, but for what waits for weight gradients.
                behind = runs[number + 1 :].sum(0)
                changes[number, :, 0], changes[number, :, 1] = -behind, behind
            changes[number, kinds.index(name), 2 if kind is Kind.FORWARD else 3] = 1
        return changes

    def scaled(self, divisions: Divisions, recompute: tuple[str, ...], splits: bool) -> Scaled:
        """Divisions with the same experts, and bytes of their layers, by other layouts that are run once.

        One has their experts on one tensor and one context rank; the others have all experts on each rank, and the
        tensor and context ranks of each division. More rows only add to what they hold of a token, but for the rounding
        of buffers.
        """
        family, tokens = divisions.family, divisions.tokens[:, None, None]
        base = self._reference(family.experts[divisions.places[0, 1]], (1, 1), recompute, splits)
        # Recomputed activations of experts do not depend on tensor and context ranks.
        dense = tuple(name for name in recompute if name not in ("expert-activation", "layer"))
        places = set(divisions.places[:, 0].tolist())
        wanted = {(pair, dense, splits) for pair in ((1, 1), *(family.dense[index] for index in places))}
        self._composer.prefetch((self.reference_run(ALONE, *key), "mixed") for key in wanted - self._prefetched)
        self._prefetched |= wanted
        whole = self._reference(ALONE, (1, 1), dense, splits)
        ranks = {index: self._reference(ALONE, family.dense[index], dense, splits) for index in places}
        # Leading layers without experts are only in references of the dense ranks; divisions have one reference's part.
        shared, counted = base.launches > 0, self._least(family.experts)
        of_places = [ranks[index] for index in divisions.places[:, 0].tolist()]
        sums = {
            name: vars(base)[name] + np.stack([vars(bounds)[name] for bounds in of_places]) - shared * vars(whole)[name]
            for name in ("fixed", "linear", "launches")
        }
        has_own = base.launches[:, :1] > 0
        kept = base.kept + np.stack([bounds.kept for bounds in of_places]) - has_own * whole.kept
        if "layer" in recompute:
            kept[..., :2] = base.kept[:, :2]
        is_alone = np.array([bounds is whole for bounds in of_places])[:, None]
        kept[..., :2] *= SCALED
        kept[..., 2:] = np.maximum(0.0, kept[..., 2:]) * np.where(is_alone, SCALED, SCALED_PEAKS)[:, None]
        more = sums["fixed"] - counted.fixed + tokens * (sums["linear"] - counted.linear)
        forward, backward = np.moveaxis(np.maximum(0.0, SCALED_TIME * more), -1, 0)
        closer = replace(
            divisions,
            forward=divisions.forward + np.pad(forward, _BESIDE_LAYERS),
            backward=divisions.backward + np.pad(backward, _BESIDE_LAYERS),
            launching=self._launching(family.pp, divisions.micro_batches, sums["launches"]),
        )
        rows = np.array(family.rows)[divisions.places[:, 3]]
        beside = SCALED * base.symmetric * divisions.tokens
        beside += divisions.micro_batches * rows * np.array([bounds.batch for bounds in of_places])
        return Scaled(closer, tokens * kept, beside)

    def closer(self, scaled: Scaled, shape: int, saving: Saving) -> tuple[np.ndarray, np.ndarray]:
        """`seconds` and `bytes` of scaled divisions."""
        divisions, held, beside = scaled
        seconds = self.seconds(divisions, shape, saving)
        if divisions.family.shapes[shape][0] in WAITING_SCHEDULES:
            seconds = np.maximum(seconds, self._path_seconds(divisions, shape, saving))
        return seconds, self._bytes(divisions, shape, saving, held) + beside

    def _path_seconds(self, divisions: Divisions, shape: int, saving: Saving) -> np.ndarray:
        """Seconds of the longest path through a schedule."""
        (schedule, vpp), pp = divisions.family.shapes[shape], divisions.family.pp
        again = next((divisions.again[:, n] for n, name in enumerate(_CONTAIN) if name in saving.recompute), 0.0)
        # What is not a product is mostly part of the input gradient.
        known = divisions.products - divisions.weight
        before = known + INPUT_SHARE * (divisions.backward - divisions.products) + again
        passes = np.stack([divisions.forward, before, divisions.weight], -1)  # division, part, pass
        stages = self._composer.contents(run_of(self._run, replace(self._neutral, pp=pp, schedule=schedule, vpp=vpp)))
        parts = np.stack([self._work([stage]) for stage in stages])
        forward, *others = np.moveaxis(parts.sum(0) @ passes, -1, 0)
        ratios = np.round(PATH_TIMES * np.stack(others, -1) / forward[:, None])
        seconds, legal = np.zeros(len(divisions)), divisions.legal(shape)
        keys = np.column_stack([divisions.micro_batches, ratios])
        for key in np.unique(keys[legal], axis=0):
            number, *times = key.tolist()
            path = path_counts(schedule, pp, vpp, int(number), (PATH_TIMES, *times))
            some = legal & (keys == key).all(1)
            seconds[some] = np.tensordot(passes[some], parts.T @ path, 2)
        return seconds + (divisions.update @ self._places(pp, schedule, vpp).held.T).max(1)

    def reference_run(self, experts: Experts, ranks: tuple[int, int], recompute: tuple[str, ...], splits: bool) -> Run:
        """A run with these experts, on so many tensor and context ranks."""
        tp, cp = ranks
        sizes = replace(
            self._neutral,
            pp=2,
            schedule="zb-1f1b" if splits else "1f1b",
            tp=tp,
            cp=cp,
            ep=experts.ep,
            etp=experts.etp,
            dispatcher=experts.dispatcher,
            sync_free=experts.stages[0],
            # As many tokens on each rank as the most rows of a micro-batch have with one rank: operators take less time
            # for a token if there are many.
            micro_batch=MOST_MICRO_BATCH * tp * cp,
        )
        return run_of(self._run, with_saving(sizes, Saving(recompute, offload=False)))

    def _make_reference(
        self, experts: Experts, ranks: tuple[int, int], recompute: tuple[str, ...], splits: bool
    ) -> Reference:
        run = self.reference_run(experts, ranks, recompute, splits)
        tp, cp = ranks
        # Leading dense layers do not depend on the experts.
        proxy = self._composer.proxy(run, "mixed" if experts == ALONE else "middle")
        pieces = proxy.stage.pieces
        rows, tokens = run.training.micro_batch, MOST_MICRO_BATCH * run.training.sequence_length
        works = tuple(piece.forward_ops for piece in pieces)
        routed = routed_rows(run, self._imbalance)
        costs = OpCosts(self._cluster.hardware, routed, buffer_rows(works), times=self._hardware_times)
        by_kind = {piece.name: piece for piece in pieces}
        received = experts.ep * experts.etp * tokens if experts.dispatcher == "all-gather" else tokens
        gathers_all = received * run.model.hidden_size >= GATHER_LIMIT
        kept = np.zeros((len(self._kinds), 4))
        fixed, linear, launches = np.zeros((3, len(self._kinds), 2))
        for k, kind in enumerate(self._kinds):
            if kind not in by_kind:
                continue
            piece = by_kind[kind]
            over = piece.forward - piece.kept_bytes, piece.backward - piece.kept_bytes
            kept[k] = np.array([piece.kept_bytes, piece.left, *over]) / tokens
            attention = self._times.attention(kind.startswith("local"), tp, cp, rows, True)
            forward, backward, _, *repeated = self._ffn((experts,), has_experts(kind), tokens, tp, True)[0].tolist()
            repeated[0] += attention.forward
            again = next((seconds for name, seconds in zip(_CONTAIN, repeated, strict=True) if name in recompute), 0.0)
            bounds = attention.forward + forward, attention.backward + backward + again
            for way, ops in enumerate((piece.forward_ops, piece.backward_ops + piece.weight_ops)):
                ops = tuple(operator for operator in ops if not (operator.name == _GATHER and gathers_all))
                seconds, fixed[k, way], launches[k, way] = _main_stream(
                    ops, costs, self._cluster.hardware.host.kernel_seconds
                )
                linear[k, way] = max(0.0, seconds - fixed[k, way] - bounds[way]) / tokens
        return Reference(kept, fixed, linear, launches, proxy.symmetric_bytes / tokens, proxy.batch_bytes / rows)

    def _layers_of(self, stage: StageContents) -> tuple[tuple[str, int], ...]:
        """Layers of a stage in order, those of prediction depths too."""
        return (*stage.layers, *(self._mtp if stage.head else ()))

    def _work(self, contents: Sequence[StageContents]) -> np.ndarray:
        """Parts that some stages compute."""
        counts = np.zeros(len(self.parts))
        for content in contents:
            for kind, count in self._layers_of(content):
                counts[self.parts.index(kind)] += count
            counts[-2:] += content.embed, content.head
        return counts

    def _make_least(self, experts: tuple[Experts, ...]) -> Reference:
        """What every division takes besides at least, without memory.

        One rank with all experts sends nothing. Where each expert has operators of its own, the most ranks have fewest.
        """
        bound, largest = self._reference(ALONE, (1, 1), (), False), max(expert.ep for expert in experts)
        for divided in (experts_of for experts_of in experts if (experts_of.ep, experts_of.etp) == (largest, 1)):
            try:
                other = self._reference(divided, (1, 1), (), False)
            except KernelError:  # no layout with these experts will run, so none has this as its least
                continue
            least = {
                name: np.where(other.launches > 0, np.minimum(vars(bound)[name], vars(other)[name]), vars(bound)[name])
                for name in ("fixed", "linear", "launches")
            }
            bound = replace(bound, **least)
        return bound

    def _counts(self, contents: Sequence[StageContents]) -> np.ndarray:
        """Parts that a rank with some stages holds: the embedding once, and prediction depths with the head."""
        counts = parts_of(self._run.model, contents)
        return np.array([float(counts[name]) for name in self.parts])

    def _make_places(self, pp: int, schedule: str, vpp: int) -> Places:
        contents = self._composer.contents(run_of(self._run, replace(self._neutral, pp=pp, schedule=schedule, vpp=vpp)))
        shape = PipelineShape(schedule, pp, vpp, micro_batches=1)
        alike: dict[bytes, list[int]] = {}
        parts: dict[int, tuple[np.ndarray, np.ndarray, tuple[StageContents, ...]]] = {}
        for position in range(pp):
            numbers = shape.stages_of(position) if pp > 1 else (0,)
            held = tuple(contents[number] for number in numbers)
            parts[position] = self._counts(held), self._work(contents[: min(numbers)]), held
            alike.setdefault(parts[position][0].tobytes(), []).append(position)
        groups = list(alike.values())
        splits = schedule in SPLITTING_SCHEDULES
        return Places(
            held=np.stack([parts[first][0] for first, *_ in groups]),
            work=np.stack([self._work(parts[first][2]) for first, *_ in groups]),
            # Of places with the same parts the last one waits longest.
            before=np.stack([parts[group[-1]][1] for group in groups]),
            numbers=tuple(tuple(dict.fromkeys((group[0], group[-1]))) if splits else (group[0],) for group in groups),
            stages=tuple(parts[first][2] for first, *_ in groups),
        )

    def _ffn(self, experts: tuple[Experts, ...], is_moe: bool, tokens: int, tp: int, accumulates: bool) -> np.ndarray:
        """Of each division of the experts: forward, backward, weight gradients, forward of what `_CONTAIN` names."""
        forward, backward, again, activation, weight = self._times.ffn(experts, is_moe, tokens, tp, accumulates).T
        return np.stack([forward, backward, weight, again, again * is_moe, activation], 1)

    def _fsdp_seconds(self, family: LayoutSet, places: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds to gather the weights of each part, and to reduce its gradients, that overlap cannot hide."""
        limit, world = self._run.parallel.shard_size or self._cluster.devices, self._cluster.devices // family.pp
        sent, copied = np.zeros((2, len(family.dense), 2))
        for d, (tp, _) in enumerate(family.dense):
            ranks = min(limit, world // tp)
            sent[d] = self._byte_seconds(self._cluster.group(ranks))
            copied[d] = np.array(fsdp_copies(ranks)) / self._cluster.hardware.bandwidth
        times = (1 - OVERLAP_GAIN) * sent * np.array([1, 2]) + copied
        gather, reduce = times[places[:, 0]].T
        return gather[:, None] * whole, reduce[:, None] * whole

    def _update_seconds(self, family: LayoutSet, places: np.ndarray) -> np.ndarray:
        """Seconds of the update by part: the optimizer's bytes, and messages of gradients and new weights."""
        parallel, world = self._run.parallel, self._cluster.devices // family.pp
        limit, reduce_bytes = parallel.shard_size or world, SUM_BYTES if parallel.reduce == "fp32" else 2
        shards = np.array(family.shards)[places[:, 2]]
        seconds = np.zeros((len(places), len(self.parts)))
        of_dense = self._message_seconds(tuple(tp for tp, _ in family.dense), world, limit)[places[:, 0]]
        sizes = tuple(expert.ep * expert.etp for expert in family.experts)
        of_experts = self._message_seconds(sizes, world, limit)[places[:, 1]]
        for k, part in enumerate(self.parts):
            moved, sent = np.zeros((2, len(places)))
            for fact in (*self._facts[part], *(self._facts.get("mtp", ()) if part == HEAD else ())):
                ranks, gather, reduce = (of_experts if fact.is_expert else of_dense).T
                values = fact.values / ranks
                shard = values / np.where(shards == "none", 1, np.minimum(world // ranks, limit))
                moments, master = self._state_bytes(fact)
                moved += (
                    SUM_BYTES * (np.where(shards == "full", 0, values - shard) + 2 * shard) + (moments + master) * shard
                )
                is_divided = shards == "optimizer"
                sent += np.where(is_divided, values * (reduce * reduce_bytes + gather * fact.itemsize), 0.0)
            seconds[:, k] = moved / self._cluster.hardware.bandwidth + sent
        return seconds

    def _state_bytes(self, fact: ParamFacts) -> tuple[int, int]:
        """Bytes of moments and master of a value, without scales."""
        optimizer = self._run.optimizer
        master = 2 if optimizer.store_param_remainders else SUM_BYTES
        moments = MOMENT_BYTES[optimizer.moment_dtype] * (2 if fact.matrices is None else 1)
        return moments, master if fact.itemsize < SUM_BYTES else 0

    def _message_seconds(self, sizes: tuple[int, ...], world: int, limit: int) -> np.ndarray:
        """For ranks that cut a matrix: these, and seconds to gather and to reduce a byte over ranks that hold it."""
        groups = {ranks: self._cluster.group(min(limit, world // ranks), ranks) for ranks in sizes}
        return np.array([(ranks, *self._byte_seconds(groups[ranks])) for ranks in sizes])

    def _byte_seconds(self, group: RankGroup) -> list[float]:
        """Seconds to gather and to reduce a byte: the least of messages so large that latency does not count."""
        collective = self._hardware_times.transfers.collective
        return [min(collective(name, size, group).seconds / size for size in LARGE) for name in FSDP_COLLECTIVES]

    def _state(self, family: LayoutSet, places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes of parameters by part that stay on the device, that can go to the host, and that FSDP2 gathers."""
        world = self._cluster.devices // family.pp
        tp = np.array([size for size, _ in family.dense])[places[:, 0]]
        expert_ranks = np.array([expert.ep * expert.etp for expert in family.experts])[places[:, 1]]
        shards = np.array(family.shards)[places[:, 2]]
        limit = self._run.parallel.shard_size or world
        state, movable, whole = np.zeros((3, len(places), len(self.parts)))
        for k, part in enumerate(self.parts):
            mtp = self._facts.get("mtp", ()) if part == HEAD else ()
            for fact, is_mtp in (*((fact, False) for fact in self._facts[part]), *((fact, True) for fact in mtp)):
                ranks = expert_ranks if fact.is_expert else tp
                holders = np.where(shards == "none", 1, np.minimum(world // ranks, limit))
                # FSDP2 leaves alone what one rank holds.
                values, is_full = fact.values / ranks, (shards == "full") & (world // ranks > 1)
                moments, master = self._state_bytes(fact)
                # FSDP2's shards are their own float32 masters.
                state[:, k] += values * np.where(is_full, 2 * SUM_BYTES / holders, fact.itemsize + SUM_BYTES)
                movable[:, k] += values * np.where(is_full, moments, moments + master) / holders
                # Those of prediction depths are counted as layers.
                whole[:, k] += np.where(is_full & (not is_mtp), values * fact.itemsize, 0.0)
        return state, movable, whole


def _highest(rows: np.ndarray) -> np.ndarray:
    """The rows that no other row reaches in every column: one of the others has the largest product with any bytes."""
    rows = rows[np.argsort(-rows.sum(1), kind="stable")]
    kept: list[int] = []
    for number, row in enumerate(rows):
        # A row that covers another one has a larger sum, so it comes before.
        if not (rows[kept] >= row).all(1).any():
            kept.append(number)
    return rows[kept]


def _main_stream(ops: RecordedOps, costs: OpCosts, kernel_seconds: float) -> tuple[float, float, int]:
    """Operators that do not run beside others: their seconds, the part that does not depend on sizes, and launches."""
    seconds, fixed, launches, is_beside = 0.0, 0.0, 0, False
    for operator in ops:
        if operator.name in (FORK, END):
            is_beside = operator.name == FORK
        elif not is_beside and operator.name not in _UNTIMED:
            cost = costs.of(operator)
            seconds, launches = seconds + cost.seconds, launches + 1 + cost.is_communication
            if not cost.is_communication:
                fixed += kernel_seconds
            elif max(operator.sizes, default=0) < SMALL:
                fixed += cost.seconds
    return seconds, fixed, launches
