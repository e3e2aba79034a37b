"""One loss on every layout: a few steps of the debug model, on one process and on any layout, side by side.

    python -m tests.distributed.one_loss --output benchmarks/results/numerics.json

All cases share one model in miniature with everything in it that could go wrong: latent attention, a dense layer,
experts with a bias and a balance loss, a shared expert, multi-token prediction. Float32 on a CPU. The optimizer's
epsilon is large, because AdamW with a small one turns a gradient that is nearly zero into a step of full size, whatever
its sign.
"""

import argparse

import torch
import torch.distributed as dist

from benchmarks import record
from penstock.config.load import load_run
from penstock.config.parallel import RECOMPUTABLE
from penstock.parallel.launch.environment import Environment
from penstock.prove.play import BOUNDS, Saved, StepFigures, differences, follow, put_together, saved_by
from penstock.train.setup import Session, prepare
from tests.distributed.case import (
    ATTENTION_CASES,
    DOCUMENTS,
    EXPERT_CASES,
    FAMILY_CASES,
    GQA,
    MUON_CASES,
    Case,
    layout,
    pipeline,
)
from tests.distributed.pool import Pool

STEPS, RATE = 3, 1e-2  # the rate is constant
BASE = (
    *("data.source=synthetic-learnable", "model.vocab_size=64", "model.layers=8", "model.hidden_size=64"),
    *("model.intermediate_size=128", "model.moe.moe_intermediate_size=32", "model.mtp_layers=1"),
    *("model.moe.shared_expert_intermediate_size=32", "model.moe.balance.aux_loss_coef=0.01"),
    *("model.moe.balance.z_loss_coef=0.001", "training.sequence_length=32", "training.global_batch=8"),
    *("training.micro_batch=1", "training.z_loss_coef=0.0001", "optimizer.epsilon=1e-3", "schedule.warmup_steps=0"),
    *("evaluation.rows=8", "checkpoint.enabled=false", "device=cpu"),
)

TOLERANCES = {figure: BOUNDS[figure] for figure in BOUNDS if figure != "one tensor"}


def play(overrides: tuple[str, ...], steps: int = STEPS, rate: float = RATE) -> tuple[StepFigures, Saved]:
    """Train on this rank; returns what it saw, and the parts of the state that it would save."""
    session = start_session(overrides)
    seen = follow(session, steps, rate)
    session.state.batches.close()
    return seen, saved_by(session)


def start_session(overrides: tuple[str, ...]) -> Session:
    """The small run, on this rank. It is alone on its node, or one of those on two nodes if they are asked for."""
    world = dist.get_world_size()
    here = max(1, world // 2) if TWO_NODES in overrides else 1
    alone = Environment(color=False, threads=1, world_size=world, rank=dist.get_rank(), local_world_size=here)
    return prepare(load_run("debug", BASE + overrides), alone)


def same_state(one: Saved, other: Saved) -> bool:
    """Whether two ranks would save the same bits."""
    return [entry[:2] for entry in one] == [entry[:2] for entry in other] and all(
        offset == there and values.dtype == expected.dtype and torch.equal(values, expected)
        for (_, _, pieces), (_, _, wanted) in zip(one, other, strict=True)
        for (offset, values), (there, expected) in zip(pieces, wanted, strict=True)
    )


def trace(ranks: Pool, count: int, overrides: tuple[str, ...], steps: int = STEPS, rate: float = RATE) -> StepFigures:
    return put_together(ranks.run(count, play, overrides, steps, rate))


TWO_NODES = "dispatch.method=hierarchical"


CAPACITY = ("model.moe.balance.capacity_factor=1.0",)
PADDED = (*CAPACITY, "model.moe.balance.pad_to_capacity=true")


def gathered(stage: int, *settings: str) -> tuple[str, ...]:
    return (*layout(*settings), "dispatch.method=all-gather", f"dispatch.sync_free={stage}")


def overlapped(overlap: str, *settings: str) -> tuple[str, ...]:
    rows = ("training.micro_batch=2",) if overlap == "halves" else ()  # a half is a row
    return (*layout(*settings), f"dispatch.overlap={overlap}", *rows)


ALL_PARTS = f"recompute.modules={[*RECOMPUTABLE[: RECOMPUTABLE.index('moe')]]}"
"""Of a layer, without the ways of the tokens."""

NORM_AND_LATENT = 'recompute.modules=["norm", "latent-up"]'


def by_node(stage: int, *settings: str) -> tuple[str, ...]:
    return (*layout(*settings), TWO_NODES, f"dispatch.sync_free={stage}")


HALVES_RECOMPUTED = overlapped("halves", "expert=4", ALL_PARTS)

PASSES_FOLDED = overlapped("passes", *pipeline("interleaved", 2, "tensor=2", "expert=2"))

NO_ROOM = (*gathered(2, "expert=4"), "dispatch.row_capacity_factor=1.0")
"""Room for even loads only: every step is made twice."""

BOUNDED = ("dispatch.balance=bounded", "dispatch.balance_rows=4", "dispatch.balance_tolerance=0.02")
EXACT = ("dispatch.balance=exact",)
AUTO = ("dispatch.balance=auto", "dispatch.balance_rows=4")
BIASED = ("model.moe.bias=true",)

BALANCED_CASES = (
    Case("EP 4, bounded balance", 4, (*layout("expert=4"), *BOUNDED)),
    Case("EP 4, all-gather, sync-free 2, bounded balance", 4, (*gathered(2, "expert=4"), *BOUNDED)),
    Case("EP 4, all-gather, sync-free 3, exact balance", 4, (*gathered(3, "expert=4"), *EXACT)),
    Case("EP 4, all-gather, sync-free 2, balance where it pays", 4, (*gathered(2, "expert=4"), *AUTO)),
    Case("EP 2 x EDP 2, ZeRO-1, exact balance", 4, (*layout("expert=2"), *EXACT)),
    Case("EP 2 x EDP 2, FSDP, exact balance", 4, (*layout("expert=2", "shard=full"), *EXACT)),
    Case("EP 2 x ETP 2, exact balance", 4, (*layout("expert=2", "expert_tensor=2"), *EXACT)),
    Case("TP 2 folded with EP 4, exact balance", 4, (*layout("tensor=2", "expert=4"), *EXACT)),
    Case("EP 4, capacity, exact balance", 4, (*layout("expert=4"), *EXACT), CAPACITY),
    *(
        Case(
            f"EP 2 x DP 2, recompute {kind}, exact balance", 4, layout("expert=2", f"recompute.modules={kind}") + EXACT
        )
        for kind in ("expert-activation", "moe", "layer")
    ),
    Case("EP 4, overlap shared, exact balance", 4, (*overlapped("shared", "expert=4"), *EXACT)),
    Case("EP 4, overlap halves, recompute all parts, exact balance", 4, (*HALVES_RECOMPUTED, *EXACT)),
    Case("PP 2 x EP 2, 1F1B, exact balance", 4, (*pipeline("1f1b", 2, "expert=2"), *EXACT)),
    Case("PP 2 x EP 2, ZB-1F1B, biases, exact balance", 4, (*pipeline("zb-1f1b", 2, "expert=2"), *EXACT), BIASED),
    Case(
        "PP 2 x EP 2, DualPipeV, overlap passes, exact balance",
        4,
        (*overlapped("passes", *pipeline("dualpipe-v", 2, "expert=2")), *EXACT),
    ),
)

QUANTILE = ("model.moe.balance.bias_rule=quantile",)
SIX_EXPERTS = ("model.moe.experts=6",)

CASES = (
    Case("DP 2, optimizer whole", 2, layout("shard=none")),
    Case("DP 4, ZeRO-1", 4, layout("shard=optimizer")),
    Case("DP 4, ZeRO-1 in pairs", 4, layout("shard=optimizer", "shard_size=2")),
    Case("DP 4, FSDP", 4, layout("shard=full")),
    Case("DP 4, FSDP in pairs", 4, layout("shard=full", "shard_size=2")),
    Case("EP 4", 4, layout("expert=4")),
    Case("EP 4, all-gather, counted", 4, gathered(0, "expert=4")),
    Case("EP 4, all-gather, sync-free 2", 4, gathered(2, "expert=4")),
    Case("EP 4, all-gather, sync-free 2, too little room", 4, NO_ROOM),
    Case("EP 4, all-gather, sync-free 3", 4, gathered(3, "expert=4")),
    Case("EP 2 x ETP 2, all-gather, sync-free 3", 4, gathered(3, "expert=2", "expert_tensor=2")),
    Case("TP 2 folded with EP 4, all-gather, sync-free 2", 4, gathered(2, "tensor=2", "expert=4")),
    Case("PP 2 x EP 2, ZB-V, all-gather, too little room", 4, (*pipeline("zb-v", 2, "expert=2"), *NO_ROOM[1:])),
    Case("EP 2 x EDP 2, FSDP, all-gather, too little room", 4, (*layout("expert=2", "shard=full"), *NO_ROOM[1:])),
    Case("EP 4, all-gather, recompute moe, too little room", 4, (*NO_ROOM, "recompute.modules=moe")),
    Case("EP 4 on 2 nodes", 4, (*layout("expert=4"), TWO_NODES)),
    Case("EP 2 x ETP 2 on 2 nodes, sync-free 3", 4, by_node(3, "expert=2", "expert_tensor=2")),
    Case("EP 4 on 2 nodes, sync-free 2, too little room", 4, (*by_node(2, "expert=4"), NO_ROOM[-1])),
    Case("EP 2 x EDP 2, ZeRO-1", 4, layout("expert=2")),
    Case("EP 2 x EDP 2, FSDP", 4, layout("expert=2", "shard=full")),
    *(
        Case(f"EP 2 x EDP 2, ranks divide an expert, {shard}", 4, layout("expert=2", f"shard={shard}"), SIX_EXPERTS)
        for shard in ("optimizer", "full")
    ),
    Case("ETP 2", 2, layout("expert_tensor=2")),
    Case("EP 2 x ETP 2, FSDP", 8, layout("expert=2", "expert_tensor=2", "shard=full")),
    Case("TP 2 + SP", 2, layout("tensor=2")),
    Case("TP 4 + SP", 4, layout("tensor=4")),
    Case("TP 2 + SP, grouped queries", 2, layout("tensor=2"), GQA),
    Case("TP 2 folded with EP 4", 4, layout("tensor=2", "expert=4")),
    Case("TP 2 x DP 4 folded with EP 4 x EDP 2, FSDP", 8, layout("tensor=2", "expert=4", "shard=full")),
    Case("CP 2, heads exchanged", 2, layout("context=2", "context_method=ulysses")),
    Case("CP 2, latent gathered", 2, layout("context=2", "context_method=all-gather")),
    Case("CP 4, latent gathered, documents", 4, layout("context=4", "context_method=all-gather"), DOCUMENTS),
    Case("CP 2, heads exchanged, documents", 2, layout("context=2", "context_method=ulysses"), DOCUMENTS),
    Case("CP 2, keys gathered, grouped queries", 2, layout("context=2", "context_method=all-gather"), GQA),
    Case("CP 2 x TP 2 folded with EP 4", 4, layout("context=2", "tensor=2", "expert=4")),
    *(
        Case(f"PP 4, {schedule}", 4, pipeline(schedule))
        for schedule in ("gpipe", "1f1b", "interleaved", "zb-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v")
    ),
    Case("PP 2 x EP 2", 4, pipeline("1f1b", 2, "expert=2")),
    Case("PP 2 x VPP 2 x EP 2 x FSDP", 8, pipeline("interleaved", 2, "expert=2", "shard=full")),
    Case("PP 2 x VPP 2 x EP 2, ZeRO-1", 8, pipeline("interleaved", 2, "expert=2")),
    Case("PP 2 x TP 2 folded with EP 2, ZB-V", 4, pipeline("zb-v", 2, "tensor=2", "expert=2")),
    Case("PP 2 x CP 2, 1F1B", 4, pipeline("1f1b", 2, "context=2")),
    Case("PP 4, explicit layout", 4, pipeline("1f1b", 4, 'pipeline.layout="Et|t*4|t*2|t,mL"')),
    Case("PP 2, tied embeddings", 2, pipeline("1f1b", 2), ("model.tie_word_embeddings=true",)),
    Case("PP 2, ZB-V, tied embeddings", 2, pipeline("zb-v", 2), ("model.tie_word_embeddings=true",)),
    Case("TP 2 folded with EP 4, quantile balancing", 4, layout("tensor=2", "expert=4"), QUANTILE),
    Case("PP 2 x EP 2, 1F1B, quantile balancing", 4, pipeline("1f1b", 2, "expert=2"), QUANTILE),
    Case("EP 4, capacity", 4, layout("expert=4"), CAPACITY),
    Case("EP 4, drop and pad", 4, layout("expert=4"), PADDED),
    Case("TP 2 folded with EP 4, drop and pad", 4, layout("tensor=2", "expert=4"), PADDED),
    Case("CP 2 x EP 2, capacity", 2, layout("context=2", "expert=2"), CAPACITY),
    Case("EP 4, micro-batch balance", 4, layout("expert=4"), ("model.moe.balance.aux_loss=micro-batch",)),
    Case("TP 2, micro-batch balance", 2, layout("tensor=2"), ("model.moe.balance.aux_loss=micro-batch",)),
    Case("CP 2, global-batch balance", 2, layout("context=2"), ("model.moe.balance.aux_loss=global-batch",)),
    *(
        Case(f"EP 2 x DP 2, recompute {kind}", 4, layout("expert=2", f"recompute.modules={kind}"))
        for kind in ("norm", "latent-up", "attention", "expert-activation", "shared-expert", "dense", "moe", "layer")
    ),
    *(Case(f"one rank, overlap {overlap}", 1, overlapped(overlap)) for overlap in ("shared", "halves")),
    *(Case(f"EP 4, overlap {overlap}", 4, overlapped(overlap, "expert=4")) for overlap in ("shared", "halves")),
    *(
        Case(f"PP 2 x EP 2, {schedule}, overlap passes", 4, overlapped("passes", *pipeline(schedule, 2, "expert=2")))
        for schedule in ("interleaved", "dualpipe-v")
    ),
    Case("PP 2, interleaved, overlap passes", 2, overlapped("passes", *pipeline("interleaved", 2))),
    Case("PP 2 x TP 2 folded with EP 2, interleaved, overlap passes", 4, PASSES_FOLDED),
    Case("EP 2 x DP 2, FSDP, overlap shared", 4, overlapped("shared", "expert=2", "shard=full")),
    Case("EP 2, overlap halves", 2, overlapped("halves", "expert=2")),
    Case("EP 4, drop and pad, overlap shared", 4, overlapped("shared", "expert=4"), PADDED),
    Case("EP 4, all-gather, sync-free 3, overlap halves", 4, overlapped("halves", *gathered(3, "expert=4"))),
    Case("EP 4, all-gather, too little room, overlap halves", 4, overlapped("halves", *NO_ROOM)),
    Case("TP 2 folded with EP 4, overlap halves", 4, overlapped("halves", "tensor=2", "expert=4")),
    Case(
        "PP 2 x EP 2, ZB-V, overlap halves",
        4,
        overlapped("halves", *pipeline("zb-v", 2, "expert=2"), "training.global_batch=16"),
        ("training.global_batch=16",),
    ),
    Case("EP 4, overlap halves, recompute all parts", 4, HALVES_RECOMPUTED),
    Case("PP 2, ZB-V x EP 2, recompute norm and latent-up", 4, pipeline("zb-v", 2, "expert=2", NORM_AND_LATENT)),
    *FAMILY_CASES,
    *ATTENTION_CASES,
    *EXPERT_CASES,
    *BALANCED_CASES,
    *MUON_CASES,
)

OFTEN = (
    *("DP 2, optimizer whole", "DP 4, ZeRO-1 in pairs", "EP 4, all-gather, sync-free 3"),
    *("EP 4, all-gather, recompute moe, too little room", "EP 2 x ETP 2 on 2 nodes, sync-free 3"),
    *("EP 2 x EDP 2, FSDP", "TP 2 folded with EP 4", "CP 2, latent gathered"),
    *("PP 4, gpipe", "PP 4, v-half", "PP 4, v-min", "PP 4, dualpipe-v", "PP 2 x VPP 2 x EP 2 x FSDP"),
    *("EP 4, overlap halves, recompute all parts", "EP 2 x DP 2, recompute layer"),
    *("EP 4, drop and pad, overlap shared", "PP 2, interleaved, overlap passes"),
    *("CP 2, keys gathered, windows, sinks, documents", "PP 2 x EP 2, ZB-V, windows, sinks"),
    *("CP 2, heads exchanged, chunks, documents", "ETP 2, biases", "PP 2 x EP 2, ZB-1F1B, biases"),
    *("EP 4, weighted inputs", "OLMoE: EP 2, FSDP", "Qwen3, dense: FSDP 2"),
    *("EP 2, recompute moe, hashed", "TP 2 folded with EP 2, squares"),
    *("gpt-oss: TP 2 folded with EP 2", "Llama 4: PP 2"),
    *("EP 4, all-gather, sync-free 2, bounded balance", "EP 2 x EDP 2, FSDP, exact balance"),
    "TP 2 folded with EP 4, quantile balancing",
    *("Muon: EP 2 x EDP 2, FSDP", "Muon: TP 2 folded with EP 4", "Muon: PP 2 x VPP 2 x EP 2"),
    *("EP 2 x DP 2, recompute layer, exact balance", "PP 2 x EP 2, ZB-1F1B, biases, exact balance"),
)
"""Cases that every test run plays: few in which every schedule, way of the tokens, kind of recomputation and overlap
occurs, and every axis beside others. The rest is slow."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    record.add_arguments(parser)
    arguments = parser.parse_args()
    pool, rows, alone = Pool(), [], {}
    for case in CASES:
        if arguments.only in case.name:
            if case.model not in alone:  # one process, with the steps and without any
                alone[case.model] = (trace(pool, 1, case.model), trace(pool, 1, case.model, 0).tensors)
            try:
                found = differences(trace(pool, case.ranks, case.model + case.overrides), *alone[case.model])
            except AssertionError as error:
                print(f"{case.name:<55}{str(error)[-1500:]}", flush=True)
                rows.append({"case": case.name, "ranks": case.ranks, "error": str(error).splitlines()[-1]})
                continue
            rows.append({"case": case.name, "ranks": case.ranks, **found})
            print(f"{case.name:<55}" + "".join(f"{value:>10.1e}" for value in found.values()), flush=True)
    pool.close()
    if not arguments.only:
        record.write(arguments, {"tolerances": TOLERANCES, "cases": rows})


if __name__ == "__main__":
    main()
