"""Qwen3, two models with experts and six dense ones; Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B.

Sources: the Hugging Face configs of the base models (sizes), arXiv 2505.09388 sections 2 and 3 (norms of queries and
keys, balance over the global batch, rows of 4,096 in the first stage). Learning rates and batches were not published.
The last two have three layers with linear attention, then one with gated attention.
"""

from typing import Literal

from penstock.config.model import Balance, GroupedQueryAttention, LinearAttention, Model, Moe, Rope, Router
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


def _attention(heads: int, kv_heads: int) -> GroupedQueryAttention:
    return GroupedQueryAttention(heads=heads, kv_heads=kv_heads, head_dim=128, qk_norm="head", rope=Rope(theta=1e6))


def _with_experts(name: str, *, hidden_size: int, layers: int, heads: int, ffn_size: int, learning_rate: float) -> Run:
    model = Model(
        family="qwen3-moe",
        vocab_size=151936,
        hidden_size=hidden_size,
        layers=layers,
        intermediate_size=8 * ffn_size,  # of dense layers, which these models do not have
        attention=_attention(heads, 4),
        moe=Moe(
            experts=128,
            top_k=8,
            moe_intermediate_size=ffn_size,
            router=Router(scoring_func="softmax", norm_topk_prob=True),
            balance=Balance(aux_loss="global-batch", aux_loss_coef=1e-3),
        ),
    )
    return pretrain(name, model, learning_rate=learning_rate)


def _dense(
    name: str, *, hidden_size: int, layers: int, heads: int, ffn_size: int, tied: bool = False, learning_rate: float
) -> Run:
    model = Model(
        family="qwen3",
        vocab_size=151936,
        hidden_size=hidden_size,
        layers=layers,
        dense_layers=layers,
        intermediate_size=ffn_size,
        attention=_attention(heads, 8),
        tie_word_embeddings=tied,
    )
    return pretrain(name, model, learning_rate=learning_rate)


def qwen3_30b_a3b() -> Run:
    """Qwen3-30B-A3B: 30.5 B parameters, 3.4 B active."""
    return _with_experts("qwen3-30b-a3b", hidden_size=2048, layers=48, heads=32, ffn_size=768, learning_rate=3e-4)


def qwen3_235b_a22b() -> Run:
    """Qwen3-235B-A22B: 235.1 B parameters, 22.2 B active."""
    return _with_experts("qwen3-235b-a22b", hidden_size=4096, layers=94, heads=64, ffn_size=1536, learning_rate=2e-4)


def qwen3_0_6b() -> Run:
    """Qwen3-0.6B, dense: 0.60 B parameters."""
    return _dense("qwen3-0.6b", hidden_size=1024, layers=28, heads=16, ffn_size=3072, tied=True, learning_rate=6e-4)


def qwen3_1_7b() -> Run:
    """Qwen3-1.7B, dense: 1.7 B parameters."""
    return _dense("qwen3-1.7b", hidden_size=2048, layers=28, heads=16, ffn_size=6144, tied=True, learning_rate=4e-4)


def qwen3_4b() -> Run:
    """Qwen3-4B, dense: 4.0 B parameters."""
    return _dense("qwen3-4b", hidden_size=2560, layers=36, heads=32, ffn_size=9728, tied=True, learning_rate=3e-4)


def qwen3_8b() -> Run:
    """Qwen3-8B, dense: 8.2 B parameters."""
    return _dense("qwen3-8b", hidden_size=4096, layers=36, heads=32, ffn_size=12288, learning_rate=3e-4)


def qwen3_14b() -> Run:
    """Qwen3-14B, dense: 14.8 B parameters."""
    return _dense("qwen3-14b", hidden_size=5120, layers=40, heads=40, ffn_size=17408, learning_rate=2e-4)


def qwen3_32b() -> Run:
    """Qwen3-32B, dense: 32.8 B parameters."""
    return _dense("qwen3-32b", hidden_size=5120, layers=64, heads=64, ffn_size=25600, learning_rate=1.5e-4)


def _model(
    family: Literal["qwen3-next", "qwen3.5-moe"],
    *,
    vocab_size: int,
    layers: int,
    intermediate_size: int,
    experts: int,
    top_k: int,
    mtp_layers: int,
) -> Model:
    return Model(
        family=family,
        vocab_size=vocab_size,
        hidden_size=2048,
        layers=layers,
        intermediate_size=intermediate_size,  # of dense layers, which these models do not have
        attention=GroupedQueryAttention(
            heads=16,
            kv_heads=2,
            head_dim=256,
            rope=Rope(theta=1e7),
            partial_rotary_factor=0.25,
            qk_norm="head",
            output_gate=True,
        ),
        linear_attention=LinearAttention(
            key_heads=16, value_heads=32, key_head_dim=128, value_head_dim=128, conv_size=4, full_every=4
        ),
        moe=Moe(
            experts=experts,
            top_k=top_k,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            shared_expert_gate=True,
            router=Router(scoring_func="softmax", norm_topk_prob=True),
            balance=Balance(aux_loss="global-batch", aux_loss_coef=1e-3),
        ),
        mtp_layers=mtp_layers,
        zero_centred_norms=True,
    )


def qwen3_next_80b_a3b() -> Run:
    """Qwen3-Next-80B-A3B: 79.7 B parameters, 3.9 B active, and one layer of multi-token prediction."""
    model = _model(
        "qwen3-next", vocab_size=151936, layers=48, intermediate_size=5120, experts=512, top_k=10, mtp_layers=1
    )
    return pretrain("qwen3-next-80b-a3b", model, learning_rate=3e-4)


def qwen3_5_35b_a3b() -> Run:
    """Qwen3.5-35B-A3B, the text model: 34.7 B parameters, 3.5 B active, one layer of multi-token prediction."""
    model = _model("qwen3.5-moe", vocab_size=248320, layers=40, intermediate_size=0, experts=256, top_k=8, mtp_layers=1)
    return pretrain("qwen3.5-35b-a3b", model, learning_rate=3e-4)
