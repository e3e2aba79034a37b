"""Facts that a projection assumes, and what follows from them and the hardware for the ranks of a run."""

from dataclasses import dataclass

from penstock.config.run import Run
from penstock.kernels.tuning import PACKAGES, DeviceFacts
from penstock.plan.costs import assumed_imbalance
from penstock.plan.hardware import Cluster, Hardware
from penstock.plan.loads import Imbalance, RecordedLoads
from penstock.plan.memory import Overheads
from penstock.plan.meta_rank import Saving, Target
from penstock.plan.software import OWN, Software, passes_keys


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Facts that are not known before a run."""

    imbalance: float = 1.2  # rows of the fullest rank's experts over the even share, in the time of a layer
    kept_imbalance: float | None = None  # the same in memory, over all layers of a rank; None for `imbalance`
    saving: Saving = "run"  # activations that are saved for backward: as the run does it, or without fused kernels
    in_turn: bool = False  # tokens take the experts in turn, as many benchmarks force balance
    software: Software = OWN  # the trainer that runs the layout
    loads: RecordedLoads | None = None  # recorded, instead of both imbalances; a search has none

    @property
    def in_time(self) -> Imbalance:
        return self.imbalance if self.loads is None else self.loads

    def in_memory(self, run: Run) -> float:
        if self.loads is not None:
            return self.loads.of(run).most
        return self.imbalance if self.kept_imbalance is None else self.kept_imbalance


DEFAULT_ASSUMPTIONS = Assumptions()

PROCESS_BYTES = 3 * 10**9
"""Host memory of a process with a GPU; 2.1 and 2.3 GB in the newest runs of whole-host-h200.json."""


def target_of(run: Run, cluster: Cluster, assumptions: Assumptions) -> Target:
    """Where the ranks of a run would be."""
    return Target(
        device=device_of(cluster.hardware, run),
        world=cluster.devices,
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
