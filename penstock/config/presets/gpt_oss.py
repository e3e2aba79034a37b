"""gpt-oss-20b and gpt-oss-120b.

Sources: the Hugging Face configs of the two models, arXiv 2508.10925 section 2. Every second layer sees the last 128
positions only. No recipe was published. The active sizes that are published (3.6 B, 5.1 B) leave the embedding out.
"""

from penstock.config.model import (
    Balance,
    ClampedSwiglu,
    GroupedQueryAttention,
    LocalAttention,
    Model,
    Moe,
    Rope,
    Router,
    Yarn,
)
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


def _gpt_oss(name: str, *, layers: int, experts: int, learning_rate: float) -> Run:
    model = Model(
        family="gpt-oss",
        vocab_size=201088,
        hidden_size=2880,
        layers=layers,
        attention=GroupedQueryAttention(
            heads=64,
            kv_heads=8,
            head_dim=64,
            rope=Rope(theta=150000.0, yarn=Yarn(factor=32.0, truncate=False)),
            bias=True,
            sinks=True,
            local=LocalAttention(size=128, global_every=2),
        ),
        moe=Moe(
            experts=experts,
            top_k=4,
            moe_intermediate_size=2880,
            bias=True,
            clamped=ClampedSwiglu(),
            router=Router(softmax_after_top_k=True, logit_bias=True),
            balance=Balance(aux_loss="micro-batch", aux_loss_coef=1e-3),
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain(name, model, learning_rate=learning_rate)


def gpt_oss_20b() -> Run:
    """gpt-oss-20b: 20.9 B parameters, 4.2 B active."""
    return _gpt_oss("gpt-oss-20b", layers=24, experts=32, learning_rate=3e-4)


def gpt_oss_120b() -> Run:
    """gpt-oss-120b: 116.8 B parameters, 5.7 B active."""
    return _gpt_oss("gpt-oss-120b", layers=36, experts=128, learning_rate=2e-4)
