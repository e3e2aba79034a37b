"""Project one run on a cluster: its memory, its step time, and the advice of the rules.

A run is composed of pieces that ran on the meta device (`penstock.plan.composer`), as a search composes its layouts, so
both give the same figures. Runs whose layers depend on their neighbours (`is_composable`) run whole.
"""

from collections.abc import Iterable
from dataclasses import replace

from penstock.config.fit import grid_of
from penstock.config.fit import shard as shard_of
from penstock.config.run import Run
from penstock.config.sync_free import SyncFreeFacts, settled_sync_free
from penstock.models.kernels import most_sync_free
from penstock.plan.assumptions import DEFAULT_ASSUMPTIONS, Assumptions, device_of, overheads_of, target_of
from penstock.plan.composed_run import ComposedRun, ComposedTimes
from penstock.plan.composer import Composer, is_composable
from penstock.plan.hardware import Cluster
from penstock.plan.memory import MOMENT_BYTES, RankMemory, memory_of_meta_run
from penstock.plan.meta_rank import conventional
from penstock.plan.meta_run import meta_runs_of
from penstock.plan.projection import Advice, Projection, StepTime, layout_of
from penstock.plan.rules import advice, settled_dispatcher, sizes_of
from penstock.plan.software import Software, as_run_by, dispatcher_of
from penstock.plan.step_time import StageTimer, time_of_meta_runs


def project(run: Run, cluster: Cluster, assumptions: Assumptions = DEFAULT_ASSUMPTIONS) -> Projection:
    """Project one run.

    Raises a ConfigError, KernelError or HardwareError if the layout does not fit the devices or the model, the devices
    cannot run the kernels, or the hardware file lacks a figure.
    """
    run = as_run_by(assumptions.software, conventional(run) if assumptions.saving == "conventional" else run)
    settled = settled_on(run, cluster)
    if not is_composable(settled):
        return replace(project_whole(settled, cluster, assumptions), run=run)
    grid = grid_of(settled, cluster.devices)
    composer = Composer(settled, target_of(settled, cluster, assumptions), overheads_of(cluster.hardware))
    projection = composed_projection(composer.composed(settled, grid), ComposedTimes(cluster, assumptions))
    return replace(projection, run=run)


def settled_on(run: Run, cluster: Cluster) -> Run:
    """The run as it runs on a cluster, with what `dispatch.sync_free` auto takes there."""
    if run.dispatch.sync_free != "auto":
        return run
    hardware = cluster.hardware
    facts = SyncFreeFacts(
        dispatcher=settled_dispatcher(run, cluster),
        vendor=hardware.vendor,
        limit=most_sync_free(run, device_of(hardware, run)),
        device_bytes=hardware.memory.capacity_bytes,
    )
    return settled_sync_free(run, facts)[0]


def composed_projection(composed: ComposedRun, times: ComposedTimes) -> Projection:
    """The projection of a run that was composed closely (`Composer.composed`)."""
    memories = map(composed.memory, range(composed.grid.pipeline))
    software, dispatcher = times.assumptions.software, composed.proxy.dispatcher
    return _projection(composed.run, times.cluster, software, dispatcher, memories, times.exact(composed))


def project_whole(run: Run, cluster: Cluster, assumptions: Assumptions = DEFAULT_ASSUMPTIONS) -> Projection:
    """Project one run from a meta run of each of its ranks with different parts; arguments and errors as `project`."""
    software, overheads = assumptions.software, overheads_of(cluster.hardware)
    meta_runs = meta_runs_of(run, cluster.devices, target_of(run, cluster, assumptions))
    memories = (memory_of_meta_run(meta_run, position, overheads) for position, meta_run in enumerate(meta_runs))
    works = (piece.forward_ops for meta_run in meta_runs for stage in meta_run.stages for piece in stage.pieces)
    timer = StageTimer(run, cluster, assumptions.in_time, works, software=software, in_turn=assumptions.in_turn)
    time = time_of_meta_runs(meta_runs, cluster, timer, software)
    return _projection(run, cluster, software, meta_runs[0].rank.dispatcher, memories, time)


def _projection(
    run: Run, cluster: Cluster, software: Software, dispatcher: str, memories: Iterable[RankMemory], time: StepTime
) -> Projection:
    """`dispatcher` is that of our run, `memories` are those of its ranks."""
    sender, grid = dispatcher_of(software, dispatcher), grid_of(run, cluster.devices)
    return Projection(
        run=run,
        cluster=cluster,
        layout=layout_of(run, grid, sender, shard_of(run)),
        memories=tuple(_state_of(software, run, memory) for memory in memories),
        time=time,
    )


def _state_of(software: Software, run: Run, memory: RankMemory) -> RankMemory:
    """The memory of a rank with the software's formats of gradients and moments.

    Moments that the run holds in fewer bytes stay, and so do the buffers through which those of the host pass.
    """
    held = MOMENT_BYTES[run.optimizer.moment_dtype]
    wanted = held if run.offload.optimizer else min(held, software.moment_bytes)
    return replace(
        memory, gradients=memory.gradients * software.gradient_bytes // 4, moments=memory.moments * wanted // held
    )


def advice_for(run: Run, cluster: Cluster) -> tuple[Advice, ...]:
    """Advice of the rules about a run that can start on the cluster, in their order (`penstock plan --layout`)."""
    rules = advice(sizes_of(settled_on(run, cluster), cluster))
    return tuple(Advice(rule=rule.name, reason=reason, source=rule.source, changes=rule.fix) for rule, reason in rules)
