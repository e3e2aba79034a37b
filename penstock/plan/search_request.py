"""What a search of layouts is asked, and the run without the parts that the search decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.config.fit import NO_PIPELINE
from penstock.config.rules import check
from penstock.config.run import Run, with_values
from penstock.models.kernels import most_sync_free
from penstock.plan.assumptions import DEFAULT_ASSUMPTIONS, Assumptions, device_of
from penstock.plan.candidates import Saving, run_of, searched_overlap, with_saving
from penstock.plan.hardware import Cluster
from penstock.plan.layout_names import check_fixed
from penstock.plan.meta_rank import conventional
from penstock.plan.project import project
from penstock.plan.projection import Plan
from penstock.plan.rules import Sizes, sizes_of


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """A search."""

    run: Run  # to train; the search ignores the parts of its layout that it chooses
    cluster: Cluster
    global_batch: int | None = None  # rows of a step; None for the run's
    fixed: Mapping[str, str] = field(default_factory=dict)  # parts of a layout
    top: int = 10  # candidates that are wanted; there may be fewer
    assumptions: Assumptions = DEFAULT_ASSUMPTIONS


def prepared_run(request: SearchRequest) -> Run:
    """The run without the parts that the search decides."""
    check_fixed(request.fixed)
    rows = request.global_batch
    run = request.run if rows is None else with_values(request.run, training={"global_batch": rows})
    if request.assumptions.saving == "conventional":
        run = conventional(run)
    if (shard := request.fixed.get("shard")) is not None:
        run = with_values(run, parallel={"shard": shard})
    if (offload := request.fixed.get("offload")) is not None:
        run = with_values(run, offload={"optimizer": offload == "optimizer"})
    return run


def neutral_sizes(request: SearchRequest, run: Run) -> Sizes:
    """Sizes of a run on the cluster of a request, with one rank for everything."""
    sizes = sizes_of(run, request.cluster, most_sync_free(run, device_of(request.cluster.hardware, run)))
    return replace(
        sizes, tp=1, cp=1, pp=1, vpp=1, ep=1, etp=1, micro_batch=1, schedule=NO_PIPELINE, recompute=(), sync_free=0,
        dispatcher="local", overlap=searched_overlap(run), capture=run.graphs.capture, offloads_optimizer=False,
    )  # fmt: skip


def plan_of_fixed(request: SearchRequest, run: Run) -> Plan | None:
    """The plan of a request with every part of the layout fixed; None if its sizes do not fill the cluster."""
    fixed, world = request.fixed, request.cluster.devices
    tp, cp, pp, ep, etp = (int(fixed[name]) for name in ("tp", "cp", "pp", "ep", "etp"))
    if world % (tp * cp * pp) or world % (ep * etp * pp):
        return None
    recompute = () if fixed["recompute"] == "none" else tuple(fixed["recompute"].split("+"))
    sizes = replace(
        neutral_sizes(request, run), tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, vpp=int(fixed["vpp"]),
        schedule=fixed["schedule"], micro_batch=int(fixed["micro_batch"]), dispatcher=fixed["dispatcher"],
        sync_free=int(fixed["sync_free_stage"]),
    )  # fmt: skip
    asked = run_of(run, with_saving(sizes, Saving(recompute, run.offload.optimizer)))
    check(asked)
    projection = project(asked, request.cluster, request.assumptions)
    return Plan(model=run.name, cluster=request.cluster, candidates=(projection,), refused=(), considered=1)
