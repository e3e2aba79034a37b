"""One loss on every layout: a few steps of a small model, on one process and on a layout, side by side.

    python -m tests.distributed.one_loss --output benchmarks/results/numerics.json

All cases share one model in miniature with everything in it that could go wrong: latent attention, a dense layer,
experts with a bias and a balance loss, a shared expert, multi-token prediction. Float32 on a CPU. The optimizer's
epsilon is large, because AdamW with a small one turns a gradient that is nearly zero into a step of full size, whatever
its sign.
"""

import torch
import torch.distributed as dist

from benchmarks import record
from penstock.config.load import load_run
from penstock.parallel.launch.environment import Environment
from penstock.prove.play import BOUNDS, Saved, StepFigures, differences, follow, put_together, saved_by
from penstock.train.setup import Session, prepare
from tests.distributed.case import (
    DOCUMENTS,
    FAMILIES,
    FAMILY_CASES,
    IN_MXFP4,
    MUON,
    STREAMS,
    WARM_UP,
    Case,
    layout,
    pipeline,
)
from tests.distributed.pool import Pool

DEEPSEEK_V4, RECOMPUTED = FAMILIES["DeepSeek-V4"], 'recompute.modules=["norm", "latent-up", "attention"]'
STEPS, RATE = 3, 1e-2  # the rate is constant
BASE = (
    *("data.source=synthetic-learnable", "model.vocab_size=64", "model.layers=8", "model.hidden_size=64"),
    *("model.intermediate_size=128", "model.moe.moe_intermediate_size=32", "model.mtp_layers=1"),
    *("model.moe.shared_expert_intermediate_size=32", "model.moe.balance.aux_loss_coef=0.01"),
    *("model.moe.balance.z_loss_coef=0.001", "training.sequence_length=32", "training.global_batch=8"),
    *("training.micro_batch=1", "training.z_loss_coef=0.0001", "optimizer.epsilon=1e-3", "schedule.warmup_steps=0"),
    *("evaluation.rows=8", "checkpoint.enabled=false", "device=cpu"),
)

TOLERANCES = {figure: BOUNDS[figure] for figure in BOUNDS if not figure.startswith("one ")}


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


NO_ROOM = (
    *layout("expert=4"),
    *("dispatch.method=all-gather", "dispatch.sync_free=2", "dispatch.row_capacity_factor=1.0"),
)
"""Room for even loads only: every step is made twice."""

DRAWN_CASES = (
    Case("DP 2, optimizer whole", 2, layout("shard=none")),
    Case("DP 4, ZeRO-1", 4, layout("shard=optimizer")),
    Case("DP 4, FSDP", 4, layout("shard=full")),
    Case("EP 4", 4, layout("expert=4")),
    Case("EP 4 on 2 nodes", 4, (*layout("expert=4"), TWO_NODES)),
    Case("EP 4, all-gather, sync-free 2, too little room", 4, NO_ROOM),
    Case("EP 2 x EDP 2, FSDP", 4, layout("expert=2", "shard=full")),
    Case("EP 2 x ETP 2, FSDP", 8, layout("expert=2", "expert_tensor=2", "shard=full")),
    Case("TP 2 + SP", 2, layout("tensor=2")),
    Case("TP 2 x DP 4 folded with EP 4 x EDP 2, FSDP", 8, layout("tensor=2", "expert=4", "shard=full")),
    Case("CP 2, heads exchanged", 2, layout("context=2", "context_method=ulysses")),
    Case("CP 4, latent gathered, documents", 4, layout("context=4", "context_method=all-gather"), DOCUMENTS),
    Case("CP 2 x TP 2 folded with EP 4", 4, layout("context=2", "tensor=2", "expert=4")),
    Case("PP 4, 1f1b", 4, pipeline("1f1b")),
    Case("PP 4, zb-v", 4, pipeline("zb-v")),
    Case("PP 4, dualpipe-v", 4, pipeline("dualpipe-v")),
    Case("PP 2 x VPP 2 x EP 2 x FSDP", 8, pipeline("interleaved", 2, "expert=2", "shard=full")),
    Case("Muon: TP 2 folded with EP 4", 4, layout("tensor=2", "expert=4"), MUON),
)
"""One of each kind, for the table of docs/numerics.md; random draws (tests/prove) play these and their mixtures."""

PINNED_CASES = (
    Case("PP 4, explicit layout", 4, pipeline("1f1b", 4, 'pipeline.layout="Et|t*4|t*2|t,mL"')),
    Case("EP 2, FSDP, warm-up of the indexer", 2, layout("expert=2", "shard=full"), WARM_UP),
    Case("PP 2, warm-up of the indexer", 2, pipeline("1f1b", 2), WARM_UP),
    Case("EP 2, experts in MXFP4", 2, layout("expert=2"), IN_MXFP4),
    Case("EP 2 x ETP 2, FSDP, experts in MXFP4", 4, layout("expert=2", "expert_tensor=2", "shard=full"), IN_MXFP4),
    Case("PP 2 x EP 2, zb-1f1b, experts in MXFP4", 4, pipeline("zb-1f1b", 2, "expert=2"), IN_MXFP4),
    Case("EP 2, FSDP, streams", 2, layout("expert=2", "shard=full"), STREAMS),
    Case("PP 2 x EP 2, zb-1f1b, streams", 4, pipeline("zb-1f1b", 2, "expert=2", 'recompute.modules=["norm"]'), STREAMS),
    Case("CP 2 x TP 2 folded with EP 4, streams", 4, layout("context=2", "tensor=2", "expert=4"), STREAMS),
    Case("PP 2 x EP 2, zb-v, DeepSeek-V4, recomputed", 4, pipeline("zb-v", 2, "expert=2", RECOMPUTED), DEEPSEEK_V4),
    *FAMILY_CASES,
)
"""What no draw reaches: settings that are not drawn, and all settings of a family at once."""

CASES = (*DRAWN_CASES, *PINNED_CASES)

OFTEN = (
    "PP 4, explicit layout",
    "EP 2, FSDP, warm-up of the indexer",
    "Llama 4: PP 2",
    "DeepSeek-V4: EP 2, FSDP",
    "DeepSeek-V4: PP 2",
    "EP 2, experts in MXFP4",
    "PP 2 x EP 2, zb-1f1b, streams",
)
"""Cases that every test run plays; the rest is slow."""


def main() -> None:
    arguments = record.parser(__doc__, only=("", "cases whose name contains this")).parse_args()
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
