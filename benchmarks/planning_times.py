"""The projected times that `benchmarks.planning` sets beside published ones: layouts, ways to send tokens, scaling."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import planning_amd as published
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.hardware_file import load_hardware
from penstock.plan.project import Assumptions, project
from penstock.plan.projection import Projection
from penstock.plan.transfers import DispatchMethod, TokenTraffic, TransferTimes, copies
from penstock.plan.what_if import scale, slowest

EVEN = Assumptions(imbalance=1.0)

SWEPT = (8, 16, 32, 64)
"""Ranks that share the experts."""

SWEEP = [
    "parallel.pipeline=16",
    "pipeline.schedule=interleaved",
    "pipeline.stages_per_rank=6",
    # Without it 8 expert ranks fit no MI300X; it dispatches twice forward.
    'recompute.modules=["layer"]',
    "training.global_batch=4096",
]
"""MoE-2T on 1,024 GPUs, one row in a micro-batch: 64 micro-batches a step."""

SCALED = ["parallel.pipeline=8", "pipeline.schedule=interleaved", "pipeline.stages_per_rank=4", "parallel.expert=8"]
"""DeepSeek-V3 as it was scaled."""

SCALED_TO = (128, 256, 512, 1024)
ROWS_A_RANK = (16, 32, 64)
"""Rows of a step on each data-parallel rank; what was used is not published."""


def numbers() -> dict[str, Any]:
    """All but the ranking of layouts."""
    return {"sent": sent(), "dispatch": dispatch_sweep(), "scaling": weak_scaling()}


def plan(run: Run, cluster: Cluster) -> Projection:
    """A projection with even routing."""
    return project(run, cluster, EVEN)


def speed_row(run: Run, cluster: Cluster) -> dict[str, Any]:
    """Speed and memory of a run."""
    found = plan(run, cluster)
    place = slowest(found)
    return {
        "dispatcher": found.layout.dispatcher,
        "fits": found.fits,
        "memory": found.memory.total,
        "step_seconds": found.time.step_seconds,
        "tokens_per_second_per_device": found.time.tokens_per_second_per_device,
        "model_flops_utilization": found.time.model_flops_utilization,
        "bubble": found.time.bubble,
        "passes_seconds": place.passes,
        "update_seconds": place.update,
        "dispatch_seconds": place.terms.get("dispatch", 0.0),
    }


def dispatch_sweep() -> list[dict[str, Any]]:
    """MoE-2T on 1,024 MI300X by expert ranks: rows sent to each rank, and each token once to each node."""
    cluster = cluster_of(1024, load_hardware("MI300X"))
    rows = []
    for ranks in SWEPT:
        for method in ("all-to-all", "auto"):
            run = load_run("moe-2t", [*SWEEP, f"parallel.expert={ranks}", f"dispatch.method={method}"])
            row = {"expert": ranks, "method": method, **speed_row(run, cluster)}
            rows.append(row | {"in_turn": _in_turn(row, run, cluster)})
    return rows


def _in_turn(row: dict[str, Any], run: Run, cluster: Cluster) -> float:
    """Tokens per second of each device if tokens took experts in turn: passes are shorter by what dispatch takes less.

    Stages wait for each other by as much less as they are shorter.
    """
    group, transfers = cluster.group(run.parallel.expert), TransferTimes(cluster.hardware)
    even, turn = (
        transfers.dispatch(row["dispatcher"], "dispatch", travel, group).seconds for travel in travels_of(run)
    )
    left = 1 - row["dispatch_seconds"] / row["passes_seconds"] * (1 - turn / even)
    step = row["update_seconds"] + (row["step_seconds"] - row["update_seconds"]) * left
    speed: float = row["tokens_per_second_per_device"] * row["step_seconds"] / step
    return speed


def travels_of(run: Run) -> tuple[TokenTraffic, TokenTraffic]:
    """What goes to the experts of a layer, with choices that are equally likely, and with experts in turn."""
    moe = run.model.moe
    assert moe is not None, "a model with experts"
    tokens = run.training.micro_batch * run.training.sequence_length // run.parallel.context
    even = TokenTraffic(tokens=tokens, copy_bytes=2 * run.model.hidden_size, experts=moe.experts, top_k=moe.top_k)
    return even, replace(even, stride=1)


def sent() -> list[dict[str, Any]]:
    """Copies of a token that leave its node, and seconds of one way, for each way to send and kind of routing."""
    cluster, rows = cluster_of(1024, load_hardware("MI300X")), []
    transfers = TransferTimes(cluster.hardware)
    for ranks in SWEPT:
        group = cluster.group(ranks)
        methods: Sequence[DispatchMethod] = (
            "all-to-all",
            "symmetric" if group.nodes == 1 else "hierarchical",
            "deep-ep",
        )
        for travel in travels_of(load_run("moe-2t", SWEEP)):
            rows.append(
                {
                    "expert": ranks,
                    "in_turn": bool(travel.stride),
                    "rows_leaving_node": travel.top_k * (1 - 1 / group.nodes),
                    "tokens_leaving_node": copies(travel, group.nodes),
                    "ranks_needed": copies(travel, ranks),
                    "seconds": {one: transfers.dispatch(one, "dispatch", travel, group).seconds for one in methods},
                }
            )
    return rows


def weak_scaling() -> list[dict[str, Any]]:
    """DeepSeek-V3 on 128 to 1,024 MI325X, with as many rows on each data-parallel rank."""
    rows = []
    for each in ROWS_A_RANK:
        cluster = cluster_of(SCALED_TO[0], load_hardware("MI325X"))
        data = SCALED_TO[0] // 8
        run = load_run("deepseek-v3", [*SCALED, 'recompute.modules=["layer"]', f"training.global_batch={data * each}"])
        for devices, point in zip(SCALED_TO, scale(run, cluster, SCALED_TO, plan, "weak"), strict=True):
            assert isinstance(point.answer, Projection), point.answer
            time = point.answer.time
            rows.append(
                {
                    "rows_a_rank": each,
                    "devices": devices,
                    "fits": point.answer.fits,
                    "step_seconds": time.step_seconds,
                    "tokens_per_second_per_device": time.tokens_per_second_per_device,
                    "gradients_seconds": slowest(point.answer).terms.get("gradients", 0.0),
                    "efficiency": point.efficiency,
                    "published": list(published.SCALING),
                }
            )
    return rows
