"""The layouts that a search considers, as products of choices.

    dense     tensor and context ranks; sharding, and rows of a micro-batch
    experts   expert and expert_tensor ranks, with a dispatcher and its sync-free stage
    shape     pipeline ranks, schedule, stages of a rank
    saving    recomputation, from nothing to everything, and the optimizer in host memory

A `LayoutSet` has all legal layouts with one number of pipeline ranks. Rules (`penstock.plan.rules.illegal`) judge
each choice beside neutral ones, because no rule reads sizes of the dense ranks and of the experts together, save that
both divide the devices. `run_of` makes a run of a layout. `fixed` has parts with one value; `fixed_by` reads them from
a command line.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from penstock.base.errors import ConfigError
from penstock.config.dispatcher import DispatchFacts, choose_dispatcher, plain_row_bytes, ranks_on_a_node
from penstock.config.fit import NO_PIPELINE
from penstock.config.model import GroupedQueryAttention, Model
from penstock.config.parallel import DISPATCHERS, Graphs, Offload, Overlap, Pipeline, Recompute
from penstock.config.run import Run
from penstock.config.tree import parse_overrides
from penstock.layout.schedules import SCHEDULES
from penstock.plan.asked_layout import layout_fields
from penstock.plan.composed_run import ComposedRun, StageContents
from penstock.plan.layout_names import FIELDS, check_fixed
from penstock.plan.projection import Refusal, layout_of
from penstock.plan.rules import Sizes, illegal

MOST_MICRO_BATCH = 8

ROW_UNIT = 8  # the width of a part of an expert is a multiple of it

SEARCHED_SCHEDULES = ("1f1b", "interleaved", "zb-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v")
"""GPipe is left out: it holds more than 1F1B and is no faster."""

_NEVER_SEARCHED = (
    "pipeline.layout",
    "recompute.layers",
    "recompute.stages",
    "offload.activations",
    "offload.gradients",
    "dispatch.overlap",
)
"""Fields that `run_of` sets: a search considers one value of them."""


def fixed_by(run: Run, overrides: Sequence[str], only: Mapping[str, str]) -> dict[str, str]:
    """The parts of a layout that a command line fixes by its overrides and `--only`, as texts by name.

    `run` has the overrides. The search chooses the parts that its preset or file sets, and those that are `auto`.
    Raises a ConfigError if both fix a part differently, or ask for what no layout of a search has.
    """
    check_fixed(only)
    said = parse_overrides(Run, overrides)
    _check_searched(run, said)
    fixed = {
        name: f"{value}"
        for name, value in layout_fields(run).items()
        if _has_field(said, FIELDS[name]) and value != "auto"
    }
    for name, value in fixed.items():
        if only.get(name, value) != value:
            got = f"{name}={only[name]} and {FIELDS[name]}={value}"
            raise ConfigError("--only and an override fix the same part differently", got=got, fix="leave one out")
    return {**fixed, **only}


def _check_searched(run: Run, said: Mapping[str, Any]) -> None:
    """Refuse an override that a search would drop."""
    for path in _NEVER_SEARCHED:
        section, _, name = path.partition(".")
        value = dict(dict(run)[section])[name]
        is_kept = searched_overlap(run) == value if path == "dispatch.overlap" else not value
        if _has_field(said, path) and not is_kept:
            raise ConfigError(
                f"a search looks at no layout with {path}", got=value, fix="leave it out, or add --layout own"
            )


def _has_field(tree: Mapping[str, Any], path: str) -> bool:
    section, _, name = path.partition(".")
    return name in tree.get(section, {})


@dataclass(frozen=True, slots=True)
class Saving:
    """What saves memory and costs time: recomputed modules, and the optimizer in host memory."""

    recompute: tuple[str, ...]
    offload: bool


class Experts(NamedTuple):
    """Ranks of the experts, their dispatcher, and its sync-free stages."""

    ep: int
    etp: int
    dispatcher: str
    stages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LayoutSet:
    """The legal layouts with `pp` pipeline ranks: a product of choices, less those that `legal` leaves out."""

    pp: int
    dense: tuple[tuple[int, int], ...]  # tensor and context ranks
    experts: tuple[Experts, ...]
    shards: tuple[str, ...]
    rows: tuple[int, ...]  # of a micro-batch
    shapes: tuple[tuple[str, int], ...]  # schedules, each with its stages per rank
    legal: np.ndarray  # whether dense x shard x rows x shape go together; nothing depends on the experts


class SearchSpace:
    """The layouts that are considered; `neutral` are sizes of the request with one rank for everything.

    `count` and `illegal` (refusals by rule) are complete after `families`.
    """

    def __init__(self, neutral: Sizes, run: Run, fixed: Mapping[str, str]) -> None:
        self._neutral = neutral
        self._run = run
        self._fixed = dict(fixed)
        recompute = fixed.get("recompute", "none")
        modules = () if recompute == "none" else tuple(recompute.split("+"))
        ladder = ladder_of(run.model) if "recompute" not in fixed else (modules,)
        stays = "offload" in fixed or neutral.vendor == "cpu" or run.optimizer.method == "muon"
        offloads = [run.offload.optimizer] if stays else [False, True]
        self.offloads = len(offloads)
        # From nothing to whole layers, each without and with the optimizer in host memory.
        self.savings = tuple(Saving(modules, offload) for offload in offloads for modules in ladder)
        self.count = 0
        self.illegal: dict[str, Refusal] = {}

    def families(self) -> Iterator[LayoutSet]:
        """The legal layouts, for each number of pipeline ranks."""
        for pp in self._values("pp"):
            base = replace(
                self._neutral,
                pp=pp,
                schedule="1f1b" if pp > 1 else NO_PIPELINE,
                capture=self._capture(pp),
            )
            shapes, shards, rows = self._schedules(pp), self._shards(), self._rows()
            every = [replace(base, ep=ep, etp=etp) for ep, etp in self._pairs(base, "ep", "etp", "edp")]
            variants = sum(len(dispatch.stages) for sizes in every for dispatch in self._dispatches(sizes))
            each = len(shapes) * len(shards) * len(rows) * len(self.savings)
            dense = [
                (sizes.tp, sizes.cp)
                for sizes in (replace(base, tp=tp, cp=cp) for tp, cp in self._pairs(base, "tp", "cp", "dp"))
                if not self._refuses(sizes, each * variants)
            ]
            experts = tuple(
                legal_experts
                for sizes in every
                for dispatch in self._dispatches(sizes)
                if (legal_experts := self._legal_experts(sizes, dispatch, each * len(dense))) is not None
            )
            if not dense or not experts:
                continue
            left = sum(len(expert.stages) for expert in experts) * len(self.savings)
            legal = np.zeros((len(dense), len(shards), len(rows), len(shapes)), bool)
            # Schedules and micro-batches read the data-parallel ranks, not how tensor and context ranks share the rest.
            data = Counter(base.world // (pp * tp * cp) for tp, cp in dense)
            ranks = np.array([base.world // (pp * tp * cp) for tp, cp in dense])
            for dp, (s, shard), (r, micro_batch) in product(data, enumerate(shards), enumerate(rows)):
                tp, cp = dense[int(np.flatnonzero(ranks == dp)[0])]
                choice = replace(base, tp=tp, cp=cp, shard=shard, micro_batch=micro_batch)
                for shape, (schedule, vpp) in enumerate(shapes):
                    asked = replace(choice, schedule=schedule, vpp=vpp)
                    legal[ranks == dp, s, r, shape] = not self._refuses(asked, left * data[dp])
            if "full" in shards:
                # One rank has nothing to shard with others.
                alone = ranks * np.array([cp for _, cp in dense]) == 1
                legal[alone, shards.index("full")] = False
            self.count += int(legal.sum()) * left
            yield LayoutSet(pp, tuple(dense), experts, shards, rows, shapes, legal)

    def _capture(self, pp: int) -> str:
        """A pipeline cannot do what is asked for of one rank; auto does what it can."""
        return "none" if pp > 1 and self._neutral.capture != "auto" else self._neutral.capture

    def sizes(self, family: LayoutSet, indices: Sequence[int], shape: int, saving: Saving, sync_free: int) -> Sizes:
        """Sizes of a layout; `indices` are its places in `dense`, `experts`, `shards` and `rows` of the family."""
        dense, number, shard, rows = indices
        (tp, cp), experts, (schedule, vpp) = family.dense[dense], family.experts[number], family.shapes[shape]
        sizes = replace(
            self._neutral, pp=family.pp, tp=tp, cp=cp, ep=experts.ep, etp=experts.etp, dispatcher=experts.dispatcher,
            sync_free=sync_free, shard=family.shards[shard], micro_batch=family.rows[rows],
            schedule=schedule, vpp=vpp, capture=self._capture(family.pp),
        )  # fmt: skip
        return with_saving(sizes, saving)

    def layouts(self, family: LayoutSet) -> Iterator[Sizes]:
        for dense, shard, rows, shape in np.argwhere(family.legal).tolist():
            for number, experts in enumerate(family.experts):
                for stage, saving in product(experts.stages, self.savings):
                    yield self.sizes(family, (dense, number, shard, rows), shape, saving, stage)

    def _pairs(self, base: Sizes, first: str, second: str, rest: str) -> list[tuple[int, int]]:
        """Two sizes of a grid that divide the devices; `rest` are the data-parallel ranks that they leave."""
        world = base.world // base.pp
        pairs = [
            (size, other)
            for size, other in product(self._values(first), self._values(second))
            if world % (size * other) == 0
        ]
        wanted = self._fixed.get(rest)
        return [pair for pair in pairs if wanted in (None, f"{world // (pair[0] * pair[1])}")]

    def _refuses(self, sizes: Sizes, count: int) -> bool:
        """Whether a rule refuses `count` layouts like this one, which are counted by rule."""
        if (refusal := illegal(sizes)) is None:
            return False
        rule, reason = refusal
        entry = self.illegal.get(rule.name) or Refusal(
            layout=layout_words(sizes), rule=rule.name, reason=reason, count=0
        )
        self.illegal[rule.name] = replace(entry, count=entry.count + count)
        return True

    def _legal_experts(self, sizes: Sizes, experts: Experts, each: int) -> Experts | None:
        chosen = replace(sizes, dispatcher=experts.dispatcher)
        stages = tuple(stage for stage in experts.stages if not self._refuses(replace(chosen, sync_free=stage), each))
        return experts._replace(stages=stages) if stages else None

    def _schedules(self, pp: int) -> tuple[tuple[str, int], ...]:
        """Schedules with their stages per rank, as many as the layers can fill."""
        if pp == 1:
            return ((NO_PIPELINE, 1),)
        names = (self._fixed["schedule"],) if "schedule" in self._fixed else SEARCHED_SCHEDULES
        limit = max(1, (self._neutral.model.layers + 2) // pp)
        schedules = []
        for name in names:
            shape = SCHEDULES[name]
            stages = range(shape.fewest, (shape.most or max(limit, shape.fewest)) + 1)
            schedules += [(name, count) for count in stages if self._fixed.get("vpp", f"{count}") == f"{count}"]
        return tuple(schedules) or ((names[0], int(self._fixed["vpp"])),)

    def _rows(self) -> tuple[int, ...]:
        if "micro_batch" in self._fixed:
            return (int(self._fixed["micro_batch"]),)
        return tuple(1 << power for power in range(MOST_MICRO_BATCH.bit_length()))

    def _shards(self) -> tuple[str, ...]:
        """What data-parallel ranks divide; to divide nothing takes more memory and no less time."""
        return (self._neutral.shard,) if "shard" in self._fixed else ("optimizer", "full")

    def _dispatches(self, sizes: Sizes) -> Sequence[Experts]:
        """Dispatchers of a grid.

        Sync-free stage 1 is stage 0 with our kernels, and stage 3 takes the time of stage 2 and more memory.
        """
        ep, etp = sizes.ep, sizes.etp
        names = ("local",) if sizes.expert_ranks == 1 or not sizes.model.experts else self._methods(sizes)
        stage, wanted = self._fixed.get("sync_free_stage"), self._fixed.get("dispatcher")
        stages = (0, 2) if stage is None else (int(stage),)
        dispatches = []
        for name in names if wanted is None else (wanted,) if wanted in names else ():
            # Over nodes a stage decides what is sent; elsewhere it decides the size of buffers and the waits only.
            groups = [(stage,) for stage in stages] if name == "hierarchical" else [stages]
            dispatches += (
                [Experts(ep, etp, name, (0,))]
                if name == "local" and stage is None
                else [Experts(ep, etp, name, group) for group in groups]
            )
        # What cannot be had is left to the rules.
        return dispatches or [Experts(ep, etp, wanted or names[0], stages)]

    def _methods(self, sizes: Sizes) -> tuple[str, ...]:
        """Dispatchers that can be had, the one of `auto` first."""
        if sizes.model.pads:
            return ("all-to-all",)
        facts = DispatchFacts(
            method="auto",
            ranks=sizes.expert_ranks,
            node_ranks=ranks_on_a_node(sizes.expert_ranks, sizes.node_devices),
            expert_tensor=sizes.etp,
            row_bytes=plain_row_bytes(self._run),
            obstacle="no GPUs" if sizes.vendor == "cpu" else "",
        )
        chosen = [choose_dispatcher(replace(facts, method=name)) for name in ("auto", *DISPATCHERS)]
        names = dict.fromkeys(choice.name for choice in chosen if choice.refusal is None)
        # An expert that lies on several nodes needs its rows on all of these: nothing is saved by sending to nodes. Nor
        # where each node has one rank.
        crosses = facts.node_ranks % sizes.etp != 0 or facts.node_ranks == 1
        return tuple(name for name in names if not (crosses and name == "hierarchical")) or ("all-to-all",)

    def _values(self, name: str) -> Sequence[int]:
        """Sizes of an axis that divide the devices, without those that divide nothing of the model."""
        world = self._neutral.world
        if name == "pp" and self._fixed.get("schedule") == NO_PIPELINE:
            return (1,) if self._fixed.get("pp", "1") == "1" else ()
        if name in self._fixed:
            size = int(self._fixed[name])
            return (size,) if world % size == 0 else ()
        return [size for size in range(1, world + 1) if world % size == 0 and self._is_divided(name, size)]

    def _is_divided(self, name: str, ranks: int) -> bool:
        """Whether so many ranks of an axis all have a part of the model."""
        model = self._neutral.model
        match name:
            case "tp":
                return min(model.head_counts) % ranks == 0
            case "cp":
                return self._neutral.sequence_length % ranks == 0
            case "pp":
                return ranks <= model.layers + 2
        # Kernels copy rows in blocks of 16 bytes.
        width, unit = (model.experts, 1) if name == "ep" else (model.expert_width, ROW_UNIT)
        return ranks == 1 or (model.experts > 0 and width % (ranks * unit) == 0)


def ladder_of(model: Model) -> tuple[tuple[str, ...], ...]:
    """Modules to recompute, cheapest first, whole layers last."""
    parts = ("norm",) if isinstance(model.attention, GroupedQueryAttention) else ("norm", "latent-up")
    if model.moe is None:
        return (), parts, ("layer",)
    return (), ("expert-activation",), ("expert-activation", *parts), ("moe", *parts), ("layer",)


def run_of(run: Run, sizes: Sizes) -> Run:
    """A run with a layout, without settings of single layers or stages and offloaded activations."""
    is_local = sizes.dispatcher == "local" or sizes.model.pads
    changes = {
        "parallel": {
            "tensor": sizes.tp,
            "context": sizes.cp,
            "pipeline": sizes.pp,
            "expert": sizes.ep,
            "expert_tensor": sizes.etp,
            "shard": sizes.shard,
        },
        "dispatch": {
            "method": "auto" if is_local else sizes.dispatcher,
            "sync_free": sizes.sync_free,
            "overlap": sizes.overlap,
        },
        "training": {"micro_batch": sizes.micro_batch, "global_batch": sizes.global_batch},
    }
    update = {name: dict(run)[name].model_copy(update=values) for name, values in changes.items()}
    schedule = {"schedule": sizes.schedule, "stages_per_rank": sizes.vpp} if sizes.pp > 1 else {}
    return run.model_copy(
        update={
            **update,
            "pipeline": Pipeline().model_copy(update=schedule),
            "recompute": Recompute(modules=sizes.recompute),
            "offload": Offload(optimizer=sizes.offloads_optimizer),
            "graphs": Graphs().model_copy(update={"capture": sizes.capture}),
        }
    )


def layout_text(run: Run, sizes: Sizes) -> str:
    return f"{layout_of(run_of(run, sizes), sizes.grid, sizes.dispatcher, sizes.shard)}"


def layout_words(sizes: Sizes) -> dict[str, Any]:
    """The settled parts of an illegal layout by their names in the JSON contract."""
    names = ("tp", "cp", "pp", "ep", "etp", "schedule", "vpp", "micro_batch", "dispatcher")
    return {name: getattr(sizes, name) for name in names}


def with_saving(sizes: Sizes, saving: Saving) -> Sizes:
    """A layout that saves memory; tokens that are sent twice are not overlapped."""
    is_whole = "moe" in saving.recompute or "layer" in saving.recompute
    overlap = "none" if is_whole else sizes.overlap
    return replace(sizes, recompute=saving.recompute, offloads_optimizer=saving.offload, overlap=overlap)


def searched_overlap(run: Run) -> Overlap:
    """The overlap of a search: the run's, unless it interleaves passes."""
    return "none" if run.dispatch.overlap == "passes" else run.dispatch.overlap


# Work, state and places of many layouts as arrays: what `penstock.plan.space_bounds` computes with.
#
# Parts of a stage are its layers by kind, the embedding and the head, in the order of `SpaceBounds.parts`.


@dataclass(frozen=True)
class Divisions:
    """Work and state of divisions of a family; the first axis of every array has an entry for each."""

    family: LayoutSet
    places: np.ndarray  # index in `dense`, `experts`, `shards`, `rows` of the family
    forward: np.ndarray  # seconds of a micro-batch by part, as is `backward`
    backward: np.ndarray
    weight: np.ndarray  # of these, products for weight gradients
    products: np.ndarray  # of these, what `TimeBounds` counts
    again: np.ndarray  # forward seconds that recomputation of each of `_CONTAIN` repeats, by part
    micro_batches: np.ndarray  # of a step
    tokens: np.ndarray  # of a micro-batch on a rank
    state: np.ndarray  # bytes of parameters that stay on the device, by part
    movable: np.ndarray  # bytes that the optimizer can have on the host, by part
    whole: np.ndarray  # bytes of weights that FSDP2 gathers, by part; 0 without it
    launching: np.ndarray  # seconds of the host in a step, by part
    update: np.ndarray  # seconds of the update, by part

    def __len__(self) -> int:
        return len(self.tokens)

    def where(self, keep: np.ndarray) -> "Divisions":
        return replace(self, **{name: vars(self)[name][keep] for name in _ARRAYS})

    def legal(self, shape: int) -> np.ndarray:
        return self._legal[shape]

    @cached_property
    def _legal(self) -> np.ndarray:
        dense, _, shard, rows = self.places.T
        return np.ascontiguousarray(self.family.legal[dense, shard, rows].T)


_ARRAYS = tuple(field.name for field in fields(Divisions) if field.name != "family")


@dataclass(frozen=True)
class Reference:
    """What one row on one layout holds of a token, and the seconds that `TimeBounds` leaves out, by kind of layer.

    `kept` are bytes from forward to backward, that wait for weight gradients, and besides the kept ones at the peaks of
    forward and of backward.
    """

    kept: np.ndarray
    fixed: np.ndarray  # seconds of a forward and a backward pass that do not depend on the tokens
    linear: np.ndarray  # seconds of a token
    launches: np.ndarray  # operators that the host launches, a collective counted twice
    symmetric: float  # bytes of a token in memory that GPUs of a node write into
    batch: float  # bytes of a row of the step's batch


@dataclass(frozen=True)
class Places:
    """Places of a pipeline that may decide, each a row."""

    held: np.ndarray  # parts that a place has in memory
    work: np.ndarray  # parts that it computes, layers of prediction depths too
    before: np.ndarray  # parts of all stages before its first
    numbers: tuple[tuple[int, ...], ...]  # places that may be the fullest: the first, and the last if backward is split
    stages: tuple[tuple[StageContents, ...], ...]  # contents of the stages of such a place


class Scaled(NamedTuple):
    """Divisions with the same experts and closer bounds (`SpaceBounds.scaled`)."""

    divisions: Divisions
    held: np.ndarray  # bytes of a layer by kind, in the ways of `Reference.kept`
    beside: np.ndarray  # bytes of buffers that GPUs of a node write into, and of the step's batch


@dataclass(frozen=True)
class Fitting:
    """A layout that was composed: bytes of its fullest rank, and seconds that it cannot go below."""

    sizes: Sizes
    composed: ComposedRun
    bytes: int
    seconds: float
