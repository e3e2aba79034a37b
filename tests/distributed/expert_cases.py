"""Layouts of models whose experts are those of other families: biases, clamps, weighted inputs, every second layer."""

from tests.distributed.case import Case, layout, pipeline

GPT_OSS = (
    'model.family="plain"',
    "model.moe.bias=true",
    "model.moe.clamped={alpha=1.702, limit=0.05}",
    'model.moe.router={scoring_func="softmax", softmax_after_top_k=true, '
    "norm_topk_prob=false, expert_bias=false, logit_bias=true}",
)
LLAMA4 = (
    'model.family="plain"',
    "model.dense_layers=0",
    "model.moe.moe_layer_freq=2",
    "model.moe.top_k=1",
    'model.moe.router={scoring_func="sigmoid", norm_topk_prob=false, apply_probs_on_input=true}',
)
CAPACITY = ("model.moe.balance.capacity_factor=1.0",)
PADDED = (*CAPACITY, "model.moe.balance.pad_to_capacity=true")

GATHERED = ("dispatch.method=all-gather", "dispatch.sync_free=3")
BY_NODE = ("dispatch.method=hierarchical", "dispatch.sync_free=2")
NO_ROOM = ("dispatch.method=all-gather", "dispatch.sync_free=2", "dispatch.row_capacity_factor=1.0")
HALVES = ("dispatch.overlap=halves", "training.micro_batch=2")

EXPERT_CASES = (
    Case("EP 4, biases", 4, layout("expert=4"), GPT_OSS),
    Case("ETP 2, biases", 2, layout("expert_tensor=2"), GPT_OSS),
    Case("EP 2 x ETP 2, FSDP, biases", 8, layout("expert=2", "expert_tensor=2", "shard=full"), GPT_OSS),
    Case("EP 2 x EDP 2, ZeRO-1, biases", 4, layout("expert=2"), GPT_OSS),
    Case("TP 2 folded with ETP 2, biases", 2, layout("tensor=2", "expert_tensor=2"), GPT_OSS),
    Case("EP 4, all-gather, sync-free 3, biases", 4, layout("expert=4", *GATHERED), GPT_OSS),
    Case("EP 4, all-gather, too little room, biases", 4, layout("expert=4", *NO_ROOM), GPT_OSS),
    Case("EP 2 x ETP 2 on 2 nodes, sync-free 2, biases", 4, layout("expert=2", "expert_tensor=2", *BY_NODE), GPT_OSS),
    Case("EP 2, drop and pad, biases", 2, layout("expert=2"), (*GPT_OSS, *PADDED)),
    Case("PP 2 x EP 2, ZB-1F1B, biases", 4, pipeline("zb-1f1b", 2, "expert=2"), GPT_OSS),
    Case("PP 2 x ETP 2, ZB-V, biases", 4, pipeline("zb-v", 2, "expert_tensor=2"), GPT_OSS),
    Case("EP 2, recompute experts, biases", 2, layout("expert=2", "recompute.modules=expert-activation"), GPT_OSS),
    Case("EP 2, recompute moe, biases", 2, layout("expert=2", "recompute.modules=moe"), GPT_OSS),
    Case("EP 2, overlap halves, biases", 2, layout("expert=2", *HALVES), GPT_OSS),
    Case("EP 4, weighted inputs", 4, layout("expert=4"), LLAMA4),
    Case("EP 2 x ETP 2, weighted inputs", 4, layout("expert=2", "expert_tensor=2"), LLAMA4),
    Case("EP 2 x EDP 2, FSDP, weighted inputs", 4, layout("expert=2", "shard=full"), LLAMA4),
    Case("EP 4, all-gather, sync-free 3, weighted inputs", 4, layout("expert=4", *GATHERED), LLAMA4),
    Case("EP 2, capacity, weighted inputs", 2, layout("expert=2"), (*LLAMA4, *CAPACITY)),
    Case("PP 4, interleaved, weighted inputs", 4, pipeline("interleaved"), LLAMA4),
    Case("PP 2 x EP 2, ZB-V, weighted inputs", 4, pipeline("zb-v", 2, "expert=2"), LLAMA4),
    Case(
        "EP 2, recompute experts, weighted inputs", 2, layout("expert=2", "recompute.modules=expert-activation"), LLAMA4
    ),
    Case("EP 2, overlap halves, weighted inputs", 2, layout("expert=2", *HALVES), LLAMA4),
)
