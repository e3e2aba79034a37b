"""For each rule sizes that it has something against, and sizes as near as can be that it lets pass."""

from dataclasses import replace
from typing import Any, NamedTuple

from penstock.plan.rules import ModelFacts, Sizes

V3 = ModelFacts(
    layers=61,
    dense_layers=3,
    vocab_size=129280,
    head_counts=(128,),
    experts=256,
    top_k=8,
    expert_width=2048,
    shared_width=2048,
    dense_width=18432,
    is_latent=True,
    key_heads=0,
    forces_balance=False,
    pads=False,
    total_parameters=671_000_000_000,
    active_parameters=37_600_000_000,
)
DENSE = replace(V3, experts=0, top_k=0, expert_width=0, shared_width=0, dense_layers=61, is_latent=False)
SMALL = replace(V3, total_parameters=15_700_000_000, active_parameters=2_660_000_000)

PLAIN = Sizes(
    model=V3, world=1024, node_devices=8, vendor="nvidia", global_batch=8192, sequence_length=4096, shard="optimizer"
)
"""Every rank trains the whole model on rows of its own: no rule has anything against that."""

EP8: dict[str, Any] = {"ep": 8, "dispatcher": "symmetric"}
EP16: dict[str, Any] = {"ep": 16, "dispatcher": "hierarchical"}
PP16: dict[str, Any] = {"pp": 16, "schedule": "1f1b"}
PP8X2: dict[str, Any] = {"pp": 8, "vpp": 2, "schedule": "interleaved"}


class Case(NamedTuple):
    """Changes of PLAIN."""

    rule: str  # name of it
    against: dict[str, Any]  # that it refuses, or has advice for
    passes: dict[str, Any]  # that it has nothing to say to
    says: str  # what its reason holds


LEGAL = (
    Case("sizes-divide-the-ranks", {"tp": 3}, {"tp": 4}, "pipeline 1 x tensor 3 x context 1 = 3; got 1,024 ranks"),
    Case("sizes-divide-the-ranks", {"pp": 3, "ep": 2}, {"pp": 4, "ep": 2}, "pipeline 3 x tensor 1 x context 1"),
    Case(
        "sizes-divide-the-ranks", {"ep": 256, "pp": 8}, {"ep": 128, "pp": 8}, "expert_tensor 1 = 2048; got 1,024 ranks"
    ),
    Case("micro-batches-are-whole", {"global_batch": 1000}, {"global_batch": 1024}, "(1 x 1024); got 1000"),
    Case(
        "schedule-has-its-micro-batches",
        {"pp": 8, "vpp": 2, "schedule": "dualpipe-v", "global_batch": 1024},
        {"pp": 8, "vpp": 2, "schedule": "dualpipe-v", "global_batch": 2048},
        "has too few micro-batches; got 8",
    ),
    Case("experts-have-ranks-only-if-there-are-any", {"model": DENSE, **EP8}, {"model": DENSE}, "the model has none"),
    Case("expert-ranks-divide-experts", {"ep": 512}, {"ep": 256}, "must divide model.moe.experts (256); got 512"),
    Case("expert-tensor-ranks-divide-an-expert", {"etp": 3}, {"etp": 4}, "(2048); got 3"),
    Case("tensor-ranks-divide-heads", {"tp": 256}, {"tp": 128}, "attention.heads (128); got 256"),
    Case("tensor-ranks-divide-widths", {"tp": 4096}, {"tp": 2048}, "intermediate_size (18432)"),
    Case("tensor-ranks-divide-the-vocabulary", {"tp": 512}, {"tp": 256}, "parallel.tensor (512); got 129280"),
    Case(
        "ranks-divide-the-sequence",
        {"cp": 4, "sequence_length": 4100, "context_method": "all-gather"},
        {"cp": 4, "sequence_length": 4104, "context_method": "all-gather"},
        "a multiple of 2 x parallel.context x parallel.tensor (8)",
    ),
    Case(
        "ulysses-divides-heads",
        {"cp": 16, "tp": 16, "context_method": "ulysses"},
        {"cp": 16, "tp": 16, "context_method": "auto"},
        "(256); got 128",
    ),
    Case(
        "ranks-divide-linear-heads",
        {"cp": 4, "tp": 8, "model": replace(V3, key_heads=16)},
        {"cp": 2, "tp": 8, "model": replace(V3, key_heads=16)},
        "linear_attention.key_heads (16); got 32",
    ),
    Case(
        "indexer-has-rows-and-heads-of-its-own",
        {"cp": 2, "model": replace(V3, has_indexer=True)},
        {"cp": 1, "model": replace(V3, has_indexer=True)},
        "parallel.context does not go with model.attention.indexer",
    ),
    Case("schedule-has-its-stages", {**PP16, "vpp": 2}, PP16, "pipeline.schedule 1f1b; got 2"),
    Case("schedule-has-its-stages", {**PP8X2, "vpp": 1}, PP8X2, "interleaved; got 1"),
    Case("pipeline-has-enough-layers", {"pp": 64, "schedule": "1f1b"}, PP16, "64 ranks x 1 stages = 64"),
    Case(
        "gathered-weights-meet-whole-backwards",
        {"pp": 8, "schedule": "zb-1f1b", "shard": "full"},
        {"pp": 8, "schedule": "1f1b", "shard": "full"},
        "zb-1f1b, which splits backward",
    ),
    Case(
        "recomputed-modules-exist",
        {"model": DENSE, "recompute": ("norm", "latent-up")},
        {"model": DENSE, "recompute": ("norm", "dense")},
        "names latent-up",
    ),
    Case(
        "sent-rows-are-counted-by-the-host",
        {"ep": 8, "dispatcher": "all-to-all", "sync_free": 2},
        {"ep": 8, "dispatcher": "symmetric", "sync_free": 2},
        "whose row counts the host reads; got 2",
    ),
    Case(
        "kernels-never-wait",
        {"model": replace(V3, most_sync_free=1), "sync_free": 2, **EP8},
        {"model": replace(V3, most_sync_free=1), "sync_free": 1, **EP8},
        "read counts on the host, and stage 2 allows none",
    ),
    Case(
        "padded-rows-are-sent",
        {"model": replace(V3, pads=True), **EP8},
        {"model": replace(V3, pads=True), "ep": 8, "dispatcher": "all-to-all"},
        "sends no padding, but model.moe.balance.pad_to_capacity does; got symmetric",
    ),
    Case(
        "tokens-travel-to-experts",
        {"model": replace(V3, shared_width=0), **EP8, "overlap": "shared"},
        {**EP8, "overlap": "shared"},
        "needs a shared expert",
    ),
    Case(
        "travels-happen-once",
        {**EP8, "overlap": "shared", "recompute": ("layer",)},
        {**EP8, "overlap": "shared", "recompute": ("expert-activation",)},
        "names layer, which does not go with dispatch.overlap shared",
    ),
    Case(
        "pieces-have-their-weights",
        {**EP8, "overlap": "passes", "shard": "full"},
        {**EP8, "overlap": "shared", "shard": "full"},
        "full does not go with dispatch.overlap passes",
    ),
    Case(
        "passes-stand-beside-each-other",
        {**EP8, **PP16, "overlap": "passes"},
        {**EP8, **PP8X2, "overlap": "passes"},
        "got pipeline.schedule 1f1b on 16 ranks",
    ),
    Case(
        "captured-passes-are-not-cut-into-stages",
        {**PP16, "capture": "partial"},
        {"capture": "partial"},
        "graphs.capture partial has memory for one; got 16",
    ),
)

ADVICE = (
    Case("tensor-inside-node", {"tp": 16}, {"tp": 8}, "TP 16 crosses nodes of 8"),
    Case("tensor-inside-node", {"tp": 16, "node_devices": 72}, {"tp": 8, "node_devices": 72}, "nodes of 72"),
    Case(
        "expert-before-tensor",
        {"ep": 4, "etp": 2, "dispatcher": "symmetric"},
        {"ep": 256, "etp": 4, "dispatcher": "hierarchical"},
        "EP 8 divides 256 experts, and ETP 2",
    ),
    Case(
        "gathers-if-fewer-copies",
        {"ep": 16, "dispatcher": "all-gather"},
        {"ep": 8, "dispatcher": "all-gather"},
        "15 copies of a token over 16 ranks, and rows to their experts are 7.5",
    ),
    Case(
        "backward-soon",
        {"pp": 16, "schedule": "gpipe"},
        {"pp": 16, "schedule": "gpipe", "global_batch": 1024},
        "holds all 128 micro-batches; 1f1b has its bubble and holds at most 16",
    ),
    Case("selective-before-full", {"recompute": ("layer",)}, {"recompute": ("attention",)}, "computed twice"),
    Case("selective-before-full", {"recompute": ("moe",)}, {}, "their tokens are sent twice"),
    Case("tensor-only-to-fit", {"tp": 2}, {}, "a model of 37.6B active parameters"),
    Case("whole-weights-in-pipeline", {**PP16, "shard": "full"}, {"shard": "full"}, "128 micro-batches"),
    Case("small-model-without-pipeline", {"model": SMALL, **PP16}, PP16, "15.7B parameters"),
    Case("expert-product-inside-node", EP16, EP8, "= 16 crosses nodes of 8"),
    Case(
        "context-inside-node", {"cp": 16, "sequence_length": 65536}, {"cp": 8, "sequence_length": 65536}, "= 16 crosses"
    ),
    Case("context-from-8k", {"cp": 2}, {"cp": 2, "sequence_length": 8192}, "into 2048, fewer than 4096"),
    Case("stages-when-pipeline", {**PP16, "global_batch": 2048}, {**PP8X2, "global_batch": 2048}, "waits 32%, two 19%"),
    Case(
        "micro-batches-fill-the-pipeline",
        {**PP8X2, "global_batch": 1024},
        {**PP8X2, "global_batch": 4096},
        "8 micro-batches on PP 8 x 2 interleaved: ranks wait 30%",
    ),
    Case("stages-are-even", {"pp": 32, "schedule": "1f1b", "model": replace(V3, layers=48)}, PP16, "the mean is 1.5"),
    Case("context-for-long-rows", {"sequence_length": 32768}, {"sequence_length": 32768, "cp": 2}, "rows of 32768"),
    Case(
        "long-rows-attend-once",
        {"sequence_length": 32768, "cp": 4, "recompute": ("attention",)},
        {"sequence_length": 4096, "recompute": ("attention",)},
        "32768 x 32768",
    ),
    Case("full-shards-with-tensor", {"shard": "full", "tp": 4}, {"shard": "full", "tp": 2}, "the sums of TP 4"),
    Case("gathers-once-a-step", {"shard": "full"}, {"shard": "full", "global_batch": 1024}, "each of 8 micro-batches"),
    Case("experts-over-nodes-want-overlap", EP16, {**EP16, "overlap": "shared"}, "crosses nodes of 8"),
    Case(
        "overlap-if-exposed",
        {"ep": 4, "dispatcher": "symmetric", "overlap": "passes"},
        {**EP8, "overlap": "passes"},
        "stay among 4 ranks",
    ),
    Case("room-for-the-worst-case", {**EP8, "sync_free": 3}, {**EP8, "sync_free": 2}, "8 times the even share"),
    Case("sums-over-many-in-fp32", {"reduce": "bf16"}, {"reduce": "bf16", "world": 64}, "gradients of 1024 ranks"),
    Case("natural-routing", {"model": replace(V3, forces_balance=True)}, {}, "by force"),
    Case("optimizer-on-the-device", {"offloads_optimizer": True}, {}, "the host's link"),
)

CASES = (*LEGAL, *ADVICE)
