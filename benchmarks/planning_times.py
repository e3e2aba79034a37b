"""The projected times that `benchmarks.planning` sets beside published ones: layouts, ways to send tokens, scaling."""

from dataclasses import replace
from typing import Any

from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.plan.assumptions import Assumptions
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.hardware_file import load_hardware
from penstock.plan.project import project
from penstock.plan.projection import Projection
from penstock.plan.rates import TokenTraffic
from penstock.plan.what_if import scale, slowest

EVEN, IN_TURN = Assumptions(imbalance=1.0), Assumptions(imbalance=1.0, in_turn=True)

SWEPT = (8, 16, 32, 64)  # ranks that share the experts

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
SCALING = (0.96, 0.97)  # published efficiency at the last of them
ROWS_A_RANK = (16, 32, 64)  # rows of a step on each data-parallel rank; what was used is not published


def numbers() -> dict[str, Any]:
    """Both."""
    return {"dispatch": dispatch_sweep(), "scaling": weak_scaling()}


def plan(run: Run, cluster: Cluster) -> Projection:
    """A projection with even routing."""
    return project(run, cluster, EVEN)


def dispatch_sweep() -> list[dict[str, Any]]:
    """MoE-2T on 1,024 MI300X by expert ranks: rows sent to each rank, and each token once to each node."""
    cluster = cluster_of(1024, load_hardware("MI300X"))
    rows = []
    for ranks in SWEPT:
        for method in ("all-to-all", "auto"):
            run = load_run("moe-2t", [*SWEEP, f"parallel.expert={ranks}", f"dispatch.method={method}"])
            even, turn = (project(run, cluster, assumed) for assumed in (EVEN, IN_TURN))
            rows.append(
                {
                    "expert": ranks,
                    "method": method,
                    "dispatcher": even.layout.dispatcher,
                    "fits": even.fits,
                    "tokens_per_second_per_device": even.time.tokens_per_second_per_device,
                    "in_turn": turn.time.tokens_per_second_per_device,
                }
            )
    return rows


def travels_of(run: Run) -> tuple[TokenTraffic, TokenTraffic]:
    """What goes to the experts of a layer, with choices that are equally likely, and with experts in turn."""
    moe = run.model.moe
    assert moe is not None, "a model with experts"
    tokens = run.training.micro_batch * run.training.sequence_length // run.parallel.context
    even = TokenTraffic(tokens=tokens, copy_bytes=2 * run.model.hidden_size, experts=moe.experts, top_k=moe.top_k)
    return even, replace(even, stride=1)


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
                    "published": list(SCALING),
                }
            )
    return rows
