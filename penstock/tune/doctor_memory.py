"""Remedies of the memory wall, and of computing: less is computed twice, copied, kept, or computed by slow kernels."""

from penstock.tune.doctor_evidence import Evidence
from penstock.tune.doctor_remedy import PLAN_SOURCES, Remedy, first_accepted
from penstock.tune.doctor_walls import Bottlenecks

REFERENCE_COSTS = 1 - 14307 / 78946
"""Share of the computing that our kernels spare in a run with eager ones (one-gpu.json, tokens/s)."""

TORCH_COSTS = 1 - 51188 / 78946
"""The same of a run with PyTorch's fused forms (one-gpu.json)."""

SELECTIVE = 'recompute.modules=["norm","expert-activation"]'
"""What is cheap to compute again, for much that is kept."""


def recompute_less(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Only what is cheap is computed again."""
    run = evidence.facts.run
    change = first_accepted(evidence, SELECTIVE, words="compute less of forward again in backward")
    if change is None or (run is not None and not {"layer", "moe"} & set(run.recompute.modules)):
        return None
    return Remedy(
        change=change,
        what="compute again only what is cheap for its bytes (norms, activations), if memory allows",
        gain_us=min(evidence.mean("recompute_us"), walls.memory_us),
        rule="selective-before-full",
        source=PLAN_SOURCES["selective-before-full"],
    )


def optimizer_on_device(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Copies to the host and back end."""
    run = evidence.facts.run
    if run is None or not (run.offload.optimizer or run.offload.activations):
        return None
    change = "offload.optimizer=false" if run.offload.optimizer else "offload.activations=[]"
    return Remedy(
        change=change,
        what="keep on the device what is copied to the host and back, if memory allows",
        gain_us=min(evidence.mean("exposed_copies_us"), walls.memory_us),
        rule="optimizer-on-the-device",
        source=PLAN_SOURCES["optimizer-on-the-device"],
    )


def kernels(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Our kernels compute."""
    run = evidence.facts.run
    if run is None or run.kernels.all not in ("reference", "torch"):
        return None
    share = REFERENCE_COSTS if run.kernels.all == "reference" else TORCH_COSTS
    return Remedy(
        change='kernels.all="auto"',
        what=f"compute with our kernels instead of {run.kernels.all} forms",
        gain_us=share * walls.compute_us,
        rule="kernels-by-measurement",
        source="README.md, How fast; one-gpu.json",
    )


def make_it_fit(evidence: Evidence) -> list[Remedy]:
    """What each change frees, of a run that does not fit.

    Those after which it fits come first, the fastest step first; then the others, the one that frees most first.
    """
    facts = evidence.facts
    lacks = (facts.planned_bytes or 0) - (facts.capacity_bytes or 0)
    enough = {change: size for change, size in facts.freed_bytes.items() if size >= lacks}
    others = {change: size for change, size in facts.freed_bytes.items() if 0 < size < lacks}
    fastest = sorted(enough, key=lambda change: (-facts.saved_seconds.get(change, 0.0), -enough[change]))
    return [
        *(_frees(change, enough[change], "fits then") for change in fastest),
        *(
            _frees(change, others[change], "not enough alone")
            for change in sorted(others, key=lambda one: -others[one])
        ),
    ]


def _frees(change: str, size: int, verdict: str) -> Remedy:
    return Remedy(
        change=change,
        what=f"{verdict}: needs {size / 1e9:.1f} GB less on the fullest rank, by the plan",
        gain_us=0.0,
        gain_bytes=size,
        rule="selective-before-full" if change == SELECTIVE else "fits-by-plan",
        source="penstock plan, memory of the fullest rank",
    )
