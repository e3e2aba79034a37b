"""Moonlight-16B-A3B and Kimi-K2: the parts of DeepSeek-V3 in other sizes, without expert groups; Kimi-Linear-48B-A3B.

Sources: the Hugging Face configs of the base models (sizes, rotary scaling, auxiliary loss), arXiv 2502.16982
(Moonlight: learning rate, batch), arXiv 2507.20534 section 2.5 (Kimi-K2). Kimi Linear has Moonlight's learning rate.
All were trained with Muon (`optimizer.method=muon`).
"""

from penstock.config.model import Balance, LinearAttention, Model, Moe, Rope, Yarn
from penstock.config.presets.deepseek import latent_attention, sigmoid_router
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run

BALANCE = Balance(aux_loss="sequence", aux_loss_coef=1e-3)


def moonlight_16b_a3b() -> Run:
    """Moonlight-16B-A3B: 16.0 B parameters, 2.9 B active."""
    model = Model(
        family="deepseek-v3",
        vocab_size=163840,
        hidden_size=2048,
        layers=27,
        dense_layers=1,
        intermediate_size=11264,
        attention=latent_attention(16, 0, Rope(theta=50000.0)),
        moe=Moe(
            experts=64,
            top_k=6,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=2816,
            router=sigmoid_router(2.446),
            balance=BALANCE,
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain("moonlight-16b-a3b", model, learning_rate=4.2e-4, sequence_length=8192, rows=2048)


def kimi_k2() -> Run:
    """Kimi-K2: 1,026 B parameters, 32.9 B active."""
    yarn = Yarn(factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
    model = Model(
        family="deepseek-v3",
        vocab_size=163840,
        hidden_size=7168,
        layers=61,
        dense_layers=1,
        intermediate_size=18432,
        attention=latent_attention(64, 1536, Rope(theta=50000.0, yarn=yarn)),
        moe=Moe(
            experts=384,
            top_k=8,
            moe_intermediate_size=2048,
            shared_expert_intermediate_size=2048,
            router=sigmoid_router(2.827),
            balance=BALANCE,
        ),
    )
    return pretrain("kimi-k2", model, learning_rate=2e-4, rows=16384)


def kimi_linear_48b_a3b() -> Run:
    """Kimi-Linear-48B-A3B: three layers with Kimi Delta Attention, then one with latent attention without positions."""
    model = Model(
        family="kimi-linear",
        vocab_size=163840,
        hidden_size=2304,
        layers=27,
        dense_layers=1,
        intermediate_size=9216,
        attention=latent_attention(32, 0, Rope()).model_copy(update={"rotary": False}),
        linear_attention=LinearAttention(
            kind="kda", key_heads=32, value_heads=32, key_head_dim=128, value_head_dim=128, full_last=True
        ),
        moe=Moe(
            experts=256,
            top_k=8,
            moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
            router=sigmoid_router(2.446),
            balance=BALANCE,
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain("kimi-linear-48b-a3b", model, learning_rate=4.2e-4, rows=2048)
