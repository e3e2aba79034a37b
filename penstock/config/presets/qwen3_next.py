"""Qwen3-Next-80B-A3B and Qwen3.5-35B-A3B: three layers with linear attention, then one with gated attention.

Sources: the Hugging Face configs of the base models (sizes). Learning rates and batches were not published.
"""

from typing import Literal

from penstock.config.model import Balance, GroupedQueryAttention, LinearAttention, Model, Moe, Rope, Router
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


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
