"""Project one run on a cluster: its memory, its step time, and the advice of the rules."""

from dataclasses import dataclass, replace

from penstock.config.fit import grid_of
from penstock.config.fit import shard as shard_of
from penstock.config.run import Run
from penstock.kernels.device_facts import PACKAGES, DeviceFacts
from penstock.models.count import count
from penstock.moe.layer import MoE
from penstock.plan.costs import assumed_imbalance
from penstock.plan.hardware import Cluster, Hardware
from penstock.plan.loads import Imbalance, RecordedLoads
from penstock.plan.memory import Overheads, RankMemory, memory_of_meta_run
from penstock.plan.meta_rank import Saving, Target, conventional
from penstock.plan.meta_run import MetaRun, meta_runs_of
from penstock.plan.projection import Advice, Projection, layout_of
from penstock.plan.rules.book import advice
from penstock.plan.rules.rule import facts_of, sizes_of
from penstock.plan.software import OWN, Software, as_run_by, passes_keys
from penstock.plan.step_time import step_time


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Facts that are not known before a run.

    Attributes:
        imbalance: rows of the fullest rank's experts over the even share, in the time of a layer.
        kept_imbalance: the same in memory, over all layers of a rank; None for `imbalance`.
        saving: activations that are saved for backward: as the run does it, or without fused kernels.
        in_turn: tokens take the experts in turn, as many benchmarks force balance.
        software: the trainer that runs the layout.
        loads: recorded loads of experts, in the place of both imbalances. Searches have none.
    """

    imbalance: float = 1.2
    kept_imbalance: float | None = None
    saving: Saving = "run"
    in_turn: bool = False
    software: Software = OWN
    loads: RecordedLoads | None = None

    @property
    def in_time(self) -> Imbalance:
        """What decides the time of a layer."""
        return self.imbalance if self.loads is None else self.loads

    def in_memory(self, run: Run) -> float:
        """What decides the memory of a rank."""
        if self.loads is not None:
            return self.loads.of(run).most
        return self.imbalance if self.kept_imbalance is None else self.kept_imbalance


DEFAULT_ASSUMPTIONS = Assumptions()

PROCESS_BYTES = 3 * 10**9
"""Host memory of a process with a GPU; 2.1 and 2.3 GB in the newest runs of whole-host-h200.json."""


def project(run: Run, cluster: Cluster, assumptions: Assumptions = DEFAULT_ASSUMPTIONS) -> Projection:
    """Project one run.

    Raises:
        ConfigError: the layout does not fit the devices or the model.
        KernelError: the run asks for kernels that the devices cannot run.
        HardwareError: the hardware file lacks a figure that the run needs.
    """
    software = assumptions.software
    run = as_run_by(software, conventional(run) if assumptions.saving == "conventional" else run)
    meta_runs = meta_runs_of(run, cluster.devices, target_of(run, cluster, assumptions))
    memories = (memory_of_meta_run(one, overheads_of(cluster.hardware)) for one in meta_runs)
    return Projection(
        run=run,
        cluster=cluster,
        layout=layout_of(run, grid_of(run, cluster.devices), dispatcher_of(meta_runs[0]), shard_of(run)),
        memories=tuple(_state_of(software, one) for one in memories),
        time=step_time(run, cluster, meta_runs, assumptions.in_time, software=software, in_turn=assumptions.in_turn),
    )


def _state_of(software: Software, memory: RankMemory) -> RankMemory:
    """The memory with gradients and moments of the software's precision, where ours have 4 bytes a value."""
    return replace(
        memory,
        gradients=memory.gradients * software.gradient_bytes // 4,
        moments=memory.moments * software.moment_bytes // 4,
    )


def target_of(run: Run, cluster: Cluster, assumptions: Assumptions) -> Target:
    """Where the ranks of a run would be."""
    return Target(
        device=device_of(cluster.hardware, run),
        ranks_per_node=cluster.node_devices,
        ranks_per_pod=cluster.pod_devices,
        imbalance=assumed_imbalance(run, assumptions.in_memory(run)),
        saving=assumptions.saving,
        in_turn=assumptions.in_turn,
        passes_keys=passes_keys(assumptions.software, run),
    )


def device_of(hardware: Hardware, run: Run) -> DeviceFacts:
    """The device, as the choice of kernels needs it."""
    dtype = run.training.precision
    if hardware.vendor == "cpu":
        return DeviceFacts(kind="cpu", name="CPU", target="cpu", packages=frozenset(), dtype=dtype)
    return DeviceFacts(
        kind="cuda", name=hardware.name, target=hardware.kernels, packages=frozenset(PACKAGES), dtype=dtype
    )


def overheads_of(hardware: Hardware) -> Overheads:
    """Memory of a device, and of the host by a process with a GPU, that no tensor can have."""
    process = 0 if hardware.vendor == "cpu" else PROCESS_BYTES
    return Overheads(context=hardware.memory.capacity_bytes - hardware.usable_bytes, process=process)


def dispatcher_of(meta_run: MetaRun) -> str:
    """The dispatcher of a meta run; `none` without experts."""
    for decoder in meta_run.rank.decoders.values():
        for module in decoder.modules():
            if isinstance(module, MoE):
                return module.dispatcher.name
    return "none"


def advice_for(run: Run, cluster: Cluster) -> tuple[Advice, ...]:
    """Advice of the rules about a run that can start on the cluster, in their order (`penstock plan --layout`)."""
    counted = count(run.model, run.training.sequence_length)
    facts = facts_of(run.model, total_parameters=counted.parameters, active_parameters=counted.active_parameters)
    told = advice(sizes_of(run, cluster, facts))
    return tuple(Advice(rule=rule.name, reason=reason, source=rule.source, changes=rule.fix) for rule, reason in told)
