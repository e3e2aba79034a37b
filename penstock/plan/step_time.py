"""Step time of a run, from the meta runs of every place on the pipeline and the costs of their operators.

    passes      forward and backward of each stage as a host and a device play them (penstock/plan/streams.py), in the
                order of the schedule (penstock/layout/actions.py), which gives the bubbles
    update      gradients become zero; sums over ranks beside the copies into and out of their messages; norm;
                optimizer; new weights for the other ranks

With FSDP2, gathers of weights and reductions of gradients run beside the passes, and the longer one counts. Messages
between stages travel while both sides compute; a stage that waits for one waits for its latency and bytes. An optimizer
in host memory passes through the host link beside its kernels.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from penstock.config.fit import grid_of, micro_batches
from penstock.config.rules import capture_on
from penstock.config.run import Run
from penstock.config.size import size_of
from penstock.layout.actions import ActionCosts, Kind, Schedule, play
from penstock.models.rank_model import message_of
from penstock.parallel.axes import Axes
from penstock.plan.costs import HOST_LINK, HardwareTimes, OpCosts, buffer_rows, routed_rows
from penstock.plan.hardware import Cluster, RankGroup
from penstock.plan.liveness import StageActivations
from penstock.plan.loads import Imbalance
from penstock.plan.meta_rank import META
from penstock.plan.meta_run import MetaRun, UpdateOps
from penstock.plan.op_recorder import RecordedOp, RecordedOps
from penstock.plan.param_state import shards_of
from penstock.plan.projection import RankTime, StepTime
from penstock.plan.rates import TransferTimes
from penstock.plan.software import OWN, Software, passes_keys
from penstock.plan.streams import OVERLAP_GAIN, Streams, Timing, add_timing, steady_state

NOTHING = Timing()

LAUNCHED: Mapping[str, float] = MappingProxyType({"none": 1.0, "partial": 0.43, "full": 0.0})
"""Share of the operators of passes that the host launches itself, by what is captured (benchmarks/graphs.py)."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Passes of one stage over one micro-batch; `weight` are the weight gradients that `backward` puts off."""

    forward: Timing
    backward: Timing
    weight: Timing = NOTHING

    @property
    def all(self) -> Timing:
        """All passes, one after the other."""
        return add_timing(add_timing(self.forward, self.backward), self.weight)


class StageTimer:
    """Times of one run on one cluster.

    `imbalance` is rows of the fullest rank's experts over the even share. `works` are operators of forward passes,
    which tell the size of the experts' buffers. `software` is the trainer, `in_turn` how its benchmark forces balance,
    `times` as of `OpCosts`.
    """

    def __init__(
        self,
        run: Run,
        cluster: Cluster,
        imbalance: Imbalance,
        works: Iterable[RecordedOps],
        *,
        software: Software = OWN,
        in_turn: bool = False,
        times: HardwareTimes | None = None,
    ) -> None:
        hardware, times = cluster.hardware, times or HardwareTimes.of(cluster.hardware)
        self._cluster = cluster
        rows = routed_rows(run, imbalance, in_turn=in_turn)
        rounds = run.parallel.context if passes_keys(software, run) else 1
        self._costs = OpCosts(hardware, rows, buffer_rows(tuple(works)), software, rounds, times)
        # A part of the state may have as many rows as a buffer of the experts.
        self._update_costs = OpCosts(hardware, None, frozenset(), software, times=times)
        self._transfers = times.transfers
        passes = micro_batches(run, grid_of(run, cluster.devices))
        self._software = software
        self._gathers = min(1.0, software.gathers / passes) if software.gathers else 1.0
        self._prepared = software.stage_seconds * (1 - software.captured) if run.parallel.pipeline > 1 else 0.0
        # Graphs are ours: how much of its own operators another trainer captures is in its launch share.
        launched = LAUNCHED[capture_on(hardware.vendor, run)] if software.name == OWN.name else 1.0
        self._launch = hardware.host.launch_seconds * launched * software.launch_share

    def stage(self, stage: StageActivations, gathers: Sequence[int], shards: RankGroup) -> StageTime:
        """Passes of a stage; FSDP2 gathers `gathers` bytes for each piece from the ranks `shards`."""
        pieces, back = stage.pieces, stage.pieces[::-1]
        forward, backward, weight = steady_state(
            (
                [piece.forward_ops for piece in pieces],
                [piece.backward_ops for piece in back],
                [piece.weight_ops for piece in back],
            ),
            self._streams(self._costs, self._launch),
            self._prepared,
        )
        if gathers:
            fetch, reduce = self._fsdp(sum(gathers) * self._gathers, shards)
            gain = OVERLAP_GAIN if self._software.weights_hidden is None else self._software.weights_hidden
            forward, backward = _beside(forward, fetch, gain), _beside(_beside(backward, fetch, gain), reduce, gain)
        return StageTime(forward=forward, backward=backward, weight=weight)

    def _fsdp(self, whole_bytes: float, shards: RankGroup) -> tuple[Timing, Timing]:
        """Gather whole weights, and reduce their gradients: communication, and copies on the device."""
        sent = self._transfers.collective("all-gather", whole_bytes, shards).seconds
        of_gradients = whole_bytes * self._software.gradient_bytes / 2
        back = self._transfers.collective("reduce-scatter", of_gradients, shards).seconds
        fetched, reduced = (
            whole_bytes * copied / self._cluster.hardware.bandwidth for copied in fsdp_copies(shards.ranks)
        )
        return (
            Timing(seconds=sent + fetched, compute=fetched, communication=sent),
            Timing(seconds=back + reduced, compute=reduced, communication=back),
        )

    def _streams(self, costs: OpCosts, launch_seconds: float) -> Streams:
        host = self._cluster.hardware.host
        return Streams(costs.of, launch_seconds, host.gap_seconds, host.put_off_seconds)

    def update(self, update: UpdateOps) -> tuple[Timing, Timing]:
        """Gradient sums and new weights; and the compute of the optimizer."""
        reduce = self._bucketed(update.reduce)
        gather = self._bucketed(tuple(operator for operator in update.step if _is_message(operator)))
        rest = tuple(operator for operator in update.step if not _is_message(operator))
        streams = self._streams(self._update_costs, 0.0)
        # Launch times of the update are left out.
        for work in (update.zero, update.norm, rest):
            streams.play(work)
        still = self._cluster.hardware.host.step_seconds
        computed = add_timing(streams.timing, Timing(seconds=still, idle=still, terms={"host": still} if still else {}))
        return add_timing(reduce, gather), add_timing(computed, self._through_host_link(update.host_bytes, rest))

    def _through_host_link(self, host_bytes: int, step: RecordedOps) -> Timing:
        """Time that the optimizer's kernels wait for masters and moments that come from the host and go back.

        Both directions run at once through two buffers (penstock/parallel/offload.py). A chunk comes, is updated and
        leaves in each buffer, so the link is idle during the kernels of every second chunk: the update takes the link's
        time and half of the kernels' time, or the kernels' time.
        """
        costs = [self._update_costs.of(operator) for operator in step]
        kernels = sum(cost.seconds for cost in costs if cost.term == "optimizer")
        waited = max(0.0, host_bytes / self._cluster.hardware.host_link.bytes_per_second - kernels / 2)
        return Timing(seconds=waited, host_link=waited, terms={HOST_LINK: waited}) if waited else Timing()

    def _bucketed(self, work: RecordedOps) -> Timing:
        """Messages, and the copies into and out of them, at the same time."""
        costs = [self._update_costs.of(operator) for operator in work]
        sent = sum(cost.seconds for cost in costs if cost.is_communication)
        copied = sum(cost.seconds for cost in costs if not cost.is_communication)
        exposed = max(0.0, sent - copied)
        return Timing(
            seconds=max(sent, copied),
            compute=copied,
            communication=sent,
            exposed=exposed,
            terms={"gradients": max(sent, copied)} if work else {},
        )


def fsdp_copies(ranks: int) -> tuple[float, float]:
    """Bytes that a device moves for a whole byte that FSDP2 gathers: for the weight, and for its gradient.

    Weights are rounded from their float32 shards into the message and copied out of it; gradients are copied into a
    float32 message and added to the shards' sums.
    """
    return 2 + 3 / ranks, 3 + 4 / ranks


def send_seconds(run: Run, cluster: Cluster, axes: Axes, transfers: TransferTimes) -> float:
    """Seconds of a message between two stages."""
    stages = axes.pipeline.size
    message = message_of(run, axes, META)
    pair = cluster.group(2 if stages > 1 else 1, cluster.devices // stages)
    return transfers.collective("point-to-point", prod(message.shape) * message.dtype.itemsize, pair).seconds


def step_time(
    run: Run,
    cluster: Cluster,
    stages: Mapping[int, StageTime],
    updates: Sequence[tuple[Timing, Timing]],
    *,
    kept: tuple[int, ...],
    schedule: Schedule | None,
    send: float,
    software: Software = OWN,
) -> StepTime:
    """Time of a step, from that of each stage, the updates of each position, and the seconds of a message.

    `kept` are bytes of each stage from forward to backward.
    """
    passes_of_step = micro_batches(run, grid_of(run, cluster.devices))
    gain = OVERLAP_GAIN if software.hidden is None else software.hidden
    playback = None if schedule is None else play(schedule, clock_costs(stages, send, kept, gain))
    ranks = []
    for position, (sums, rest) in enumerate(updates):
        passes = _passes(position, stages, schedule, passes_of_step, gain)
        span = passes.seconds if playback is None else playback.span
        if software.sums_overlap:
            numbers = (0,) if schedule is None else schedule.stages_of(position)
            sums = _behind(sums, [stages[number] for number in numbers])
        ranks.append(_rank_time(position * cluster.devices // len(updates), passes, span, (sums, rest)))
    seconds = max(rank.passes + rank.waiting + rank.update for rank in ranks)
    rate = run.training.global_batch * run.training.sequence_length / seconds / cluster.devices
    flops = size_of(run.model, run.training.sequence_length).flops_per_token
    return StepTime(
        step_seconds=seconds,
        tokens_per_second_per_device=rate,
        model_flops_utilization=rate * flops / cluster.hardware.peaks.bf16,
        bubble=0.0 if playback is None else playback.bubble,
        exposed_communication_seconds=max(rank.exposed_communication for rank in ranks),
        ranks=tuple(ranks),
        schedule=schedule,
        playback=playback,
        kept_bytes=() if schedule is None else kept,
    )


def time_of_meta_runs(
    meta_runs: Sequence[MetaRun], cluster: Cluster, timer: StageTimer, software: Software
) -> StepTime:
    """Time of a step, from the meta run of each position on the pipeline, of which several may be the same."""
    rank = meta_runs[0].rank
    run, axes, schedule = rank.run, rank.axes, rank.schedule
    shards = cluster.group(shards_of(run, axes.grid).dense)
    times: dict[int, list[StageTime]] = {}
    stages, kept = {}, {}
    for position, meta_run in enumerate(meta_runs):
        works = zip(meta_run.stages, meta_run.gathers, strict=True)
        if id(meta_run) not in times:
            times[id(meta_run)] = [timer.stage(stage, gathers, shards) for stage, gathers in works]
        numbers = (0,) if schedule is None else schedule.stages_of(position)
        stages.update(zip(numbers, times[id(meta_run)], strict=True))
        kept.update(zip(numbers, (stage.kept_bytes for stage in meta_run.stages), strict=True))
    return step_time(
        run,
        cluster,
        stages,
        [timer.update(meta_run.update) for meta_run in meta_runs],
        kept=tuple(kept[number] for number in sorted(kept)),
        schedule=schedule,
        send=send_seconds(run, cluster, axes, TransferTimes(cluster.hardware)),
        software=software,
    )


def _passes(
    position: int, stages: Mapping[int, StageTime], schedule: Schedule | None, micro_batches: int, gain: float
) -> Timing:
    if schedule is None:
        return add_timing(Timing(), stages[0].all, times=micro_batches)
    total = Timing()
    for (stage, kind), times in Counter((stage, kind) for stage, kind, _ in schedule.actions[position]).items():
        total = add_timing(total, _timing_of(kind, stages[stage]), times=times)
    units = schedule.units(position) if schedule.pairs else ()
    paired = [action for unit in units if len(unit) > 1 for action in unit]
    # The compute of one action hides transfers of the other action of its pair.
    hidden = gain * sum(_timing_of(action.kind, stages[action.stage]).exposed for action in paired)
    return add_timing(total, Timing(seconds=-hidden, exposed=-hidden, terms={"dispatch": -hidden} if hidden else {}))


def _timing_of(kind: Kind, stage: StageTime) -> Timing:
    if kind is Kind.BACKWARD:
        return add_timing(stage.backward, stage.weight)
    return {Kind.FORWARD: stage.forward, Kind.INPUT: stage.backward, Kind.WEIGHT: stage.weight}[kind]


def clock_costs(stages: Mapping[int, StageTime], send: float, kept: tuple[int, ...], gain: float) -> ActionCosts:
    """Costs of a schedule's actions; `gain` is the share of a pair's transfers that its compute hides."""
    ordered = [stages[number] for number in sorted(stages)]
    return ActionCosts(
        forward=tuple(stage.forward.seconds for stage in ordered),
        backward=tuple(stage.backward.seconds + stage.weight.seconds for stage in ordered),
        input=tuple(stage.backward.seconds for stage in ordered),
        weight=tuple(stage.weight.seconds for stage in ordered),
        send=send,
        activation=tuple(map(float, kept)),
        hidden=tuple((gain * stage.forward.exposed, gain * stage.backward.exposed) for stage in ordered),
    )


def _behind(sums: Timing, stages: Sequence[StageTime]) -> Timing:
    """Sums of gradients and new weights that run behind the last backward and the first forward pass of a rank."""
    passes = sum(stage.all.compute for stage in stages)
    left = max(0.0, sums.seconds - passes)
    return replace(sums, seconds=left, exposed=left, terms={"gradients": left} if left else {})


def _rank_time(rank: int, passes: Timing, span: float, update: tuple[Timing, Timing]) -> RankTime:
    whole = add_timing(passes, add_timing(*update))
    waiting = max(0.0, span - passes.seconds)
    terms = {**whole.terms, "bubble": waiting}
    return RankTime(
        rank=rank,
        passes=passes.seconds,
        waiting=waiting,
        update=update[0].seconds + update[1].seconds,
        compute=whole.compute,
        communication=whole.communication,
        exposed_communication=whole.exposed,
        host=whole.idle,
        host_link=whole.host_link,
        terms={name: seconds for name, seconds in terms.items() if seconds},
    )


def _beside(passes: Timing, moved: Timing, gain: float) -> Timing:
    """Passes beside a transfer; its copies run on the device that computes.

    Both streams slow each other down, as in penstock/plan/streams.py, so only `gain` of what is hidden is gained.
    """
    exposed = moved.communication - gain * min(moved.communication, passes.compute)
    seconds = exposed + moved.compute
    return add_timing(passes, replace(moved, seconds=seconds, exposed=exposed, terms={"weights": seconds}))


def _is_message(operator: RecordedOp) -> bool:
    """Whether an operator is a collective of the update, or a copy into or out of its message."""
    return operator.group is not None or operator.name == "copy_"
