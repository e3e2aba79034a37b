"""Layouts of models whose attention is that of other families: windows, chunks, sinks, biases, norms of heads."""

from tests.distributed.case import DOCUMENTS, GQA, Case, layout, pipeline

GPT_OSS = (
    *GQA,
    "model.attention.rope={theta=150000.0, yarn={factor=4.0, original_max_position_embeddings=8, truncate=false}}",
    "model.attention.bias=true",
    "model.attention.sinks=true",
    "model.attention.local={size=5, global_every=2}",
)
LLAMA4 = (
    *GQA,
    'model.attention.qk_norm="rotated-head"',
    'model.attention.local={kind="chunk", size=12, global_every=4, global_rope=false, global_temperature=0.3, '
    "temperature_floor=7}",
)
QWEN3 = (*GQA, 'model.attention.qk_norm="head"')
OLMOE = (*GQA, 'model.attention.qk_norm="projection"')

GPT_OSS_PACKED, LLAMA4_PACKED = (*GPT_OSS, *DOCUMENTS), (*LLAMA4, *DOCUMENTS)

GATHERED, EXCHANGED = "context_method=all-gather", "context_method=ulysses"

ATTENTION_CASES = (
    Case("TP 2, windows, sinks, biases, documents", 2, layout("tensor=2"), GPT_OSS_PACKED),
    Case("CP 2, heads exchanged, windows, sinks", 2, layout("context=2", EXCHANGED), GPT_OSS),
    Case("CP 2, keys gathered, windows, sinks, documents", 2, layout("context=2", GATHERED), GPT_OSS_PACKED),
    Case("TP 2 x CP 2, keys gathered, windows, sinks", 4, layout("tensor=2", "context=2", GATHERED), GPT_OSS),
    Case("EP 2 x EDP 2, FSDP, windows, sinks, documents", 4, layout("expert=2", "shard=full"), GPT_OSS_PACKED),
    Case("PP 2 x EP 2, ZB-V, windows, sinks", 4, pipeline("zb-v", 2, "expert=2"), GPT_OSS),
    Case(
        "FSDP 2, windows, sinks, recompute attention", 2, layout("shard=full", "recompute.modules=attention"), GPT_OSS
    ),
    Case("EP 2, windows, sinks, recompute layer", 2, layout("expert=2", "recompute.modules=layer"), GPT_OSS_PACKED),
    Case("TP 2, chunks without positions between", 2, layout("tensor=2"), LLAMA4),
    Case("CP 2, heads exchanged, chunks, documents", 2, layout("context=2", EXCHANGED), LLAMA4_PACKED),
    Case("CP 2, keys gathered, chunks", 2, layout("context=2", GATHERED), LLAMA4),
    Case("CP 4, keys gathered, chunks, documents", 4, layout("context=4", GATHERED), LLAMA4_PACKED),
    Case("PP 4, interleaved, chunks", 4, pipeline("interleaved"), LLAMA4),
    Case("TP 2, norm of each head", 2, layout("tensor=2"), QWEN3),
    Case("EP 2 x EDP 2, FSDP, norm of each head", 4, layout("expert=2", "shard=full"), QWEN3),
    Case("TP 2, norm of all heads", 2, layout("tensor=2"), OLMOE),
    Case("TP 2 x CP 2 folded with EP 4, norm of all heads", 4, layout("tensor=2", "context=2", "expert=4"), OLMOE),
    Case("PP 2 x EP 2, norm of all heads", 4, pipeline("1f1b", 2, "expert=2"), OLMOE),
)
