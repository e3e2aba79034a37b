"""Mixtral 8x7B and 8x22B, version 0.1.

Sources: the Hugging Face configs of the two models, arXiv 2401.04088 (8x7B). No recipe was published: the auxiliary
loss has the weight that the configs name, the rest is `recipe`'s.
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
