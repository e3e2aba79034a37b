"""Mixtral 8x7B and 8x22B, version 0.1, and OLMoE-1B-7B (0924).

Sources: the Hugging Face configs of the three models, arXiv 2401.04088 (8x7B), arXiv 2409.02060 section 2 and appendix
B (OLMoE: learning rate, batch, warm-up, auxiliary loss and z-loss). No recipe of Mixtral was published: the auxiliary
loss has the coefficient of the configs, the rest is `recipe`'s.
"""

from penstock.config.model import Balance, GroupedQueryAttention, Model, Moe, Rope, Router
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


def _mixtral(
    name: str, *, hidden_size: int, layers: int, heads: int, ffn_size: int, balance: float, learning_rate: float
) -> Run:
    model = Model(
        family="mixtral",
        vocab_size=32000,
        hidden_size=hidden_size,
        layers=layers,
        attention=GroupedQueryAttention(heads=heads, kv_heads=8, head_dim=128, rope=Rope(theta=1e6)),
        moe=Moe(
            experts=8,
            top_k=2,
            moe_intermediate_size=ffn_size,
            router=Router(scoring_func="softmax", softmax_after_top_k=True),
            balance=Balance(aux_loss="micro-batch", aux_loss_coef=balance),
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain(name, model, learning_rate=learning_rate)


def mixtral_8x7b() -> Run:
    """Mixtral 8x7B: 46.7 B parameters, 12.9 B active."""
    return _mixtral(
        "mixtral-8x7b", hidden_size=4096, layers=32, heads=32, ffn_size=14336, balance=2e-2, learning_rate=3e-4
    )


def mixtral_8x22b() -> Run:
    """Mixtral 8x22B: 140.6 B parameters, 39.2 B active."""
    return _mixtral(
        "mixtral-8x22b", hidden_size=6144, layers=56, heads=48, ffn_size=16384, balance=1e-3, learning_rate=2e-4
    )


def olmoe_1b_7b() -> Run:
    """OLMoE-1B-7B: 6.9 B parameters, 1.3 B active."""
    model = Model(
        family="olmoe",
        vocab_size=50304,
        hidden_size=2048,
        layers=16,
        attention=GroupedQueryAttention(
            heads=16, kv_heads=16, head_dim=128, qk_norm="projection", rope=Rope(theta=10000.0)
        ),
        moe=Moe(
            experts=64,
            top_k=8,
            moe_intermediate_size=1024,
            router=Router(scoring_func="softmax"),
            balance=Balance(aux_loss="micro-batch", aux_loss_coef=1e-2, z_loss_coef=1e-3),
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain("olmoe-1b-7b", model, learning_rate=4e-4, warmup=2500)
