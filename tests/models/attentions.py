"""Attention as each family has it, in miniature."""

from penstock.config.model import GroupedQueryAttention, Llama3Rope, LocalAttention, Rope, Yarn

YARN = Yarn(factor=4.0, original_max_position_embeddings=8, truncate=False)
ATTENTIONS = {
    "llama": GroupedQueryAttention(
        heads=4, kv_heads=2, head_dim=8, rope=Rope(theta=5e5, llama3=Llama3Rope(original_max_position_embeddings=8))
    ),
    "qwen3": GroupedQueryAttention(heads=4, kv_heads=2, head_dim=16, qk_norm="head"),
    "olmoe": GroupedQueryAttention(heads=4, kv_heads=4, head_dim=8, qk_norm="projection"),
    "gpt-oss": GroupedQueryAttention(
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope=Rope(theta=150000.0, yarn=YARN),
        bias=True,
        sinks=True,
        local=LocalAttention(kind="window", size=5, global_every=2),
    ),
    "llama4": GroupedQueryAttention(
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope=Rope(theta=5e5),
        qk_norm="rotated-head",
        local=LocalAttention(
            kind="chunk", size=6, global_every=2, global_rope=False, global_temperature=0.3, temperature_floor=3
        ),
    ),
}
"""By family; where layers differ, the first sees a part of the row and the second all of it."""
