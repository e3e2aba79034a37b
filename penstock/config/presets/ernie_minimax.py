"""ERNIE-4.5 with experts, and MiniMax-M2: sizes of the Hugging Face configs. No learning rates were published."""

from penstock.config.model import Balance, GroupedQueryAttention, Model, Moe, Rope, Router
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


def _ernie_router() -> Router:
    return Router(scoring_func="softmax", norm_topk_prob=True, expert_bias=True, expert_bias_rate=1e-3)


def ernie_4_5_21b_a3b() -> Run:
    """ERNIE-4.5-21B-A3B: 21.8 B parameters, 3.4 B active."""
    model = Model(
        family="ernie4.5-moe",
        vocab_size=103424,
        hidden_size=2560,
        layers=28,
        dense_layers=1,
        intermediate_size=12288,
        attention=GroupedQueryAttention(heads=20, kv_heads=4, head_dim=128, rope=Rope(theta=5e5)),
        moe=Moe(
            experts=64,
            top_k=6,
            moe_intermediate_size=1536,
            shared_expert_intermediate_size=3072,
            router=_ernie_router(),
            balance=Balance(aux_loss="micro-batch", aux_loss_coef=1e-3),
        ),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    return pretrain("ernie-4.5-21b-a3b", model, learning_rate=3e-4)


def ernie_4_5_300b_a47b() -> Run:
    """ERNIE-4.5-300B-A47B: 299.5 B parameters, 47.9 B active."""
    model = Model(
        family="ernie4.5-moe",
        vocab_size=103424,
        hidden_size=8192,
        layers=54,
        dense_layers=3,
        intermediate_size=28672,
        attention=GroupedQueryAttention(heads=64, kv_heads=8, head_dim=128, rope=Rope(theta=5e5)),
        moe=Moe(
            experts=64,
            top_k=8,
            moe_intermediate_size=3584,
            router=_ernie_router(),
            balance=Balance(aux_loss="micro-batch", aux_loss_coef=1e-3),
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain("ernie-4.5-300b-a47b", model, learning_rate=2e-4)


def minimax_m2() -> Run:
    """MiniMax-M2: 228.7 B parameters, 11.0 B active."""
    model = Model(
        family="minimax-m2",
        vocab_size=200064,
        hidden_size=3072,
        layers=62,
        attention=GroupedQueryAttention(
            heads=48, kv_heads=8, head_dim=128, rope=Rope(theta=5e6), partial_rotary_factor=0.5, qk_norm="projection"
        ),
        moe=Moe(
            experts=256,
            top_k=8,
            moe_intermediate_size=1536,
            router=Router(scoring_func="sigmoid", norm_topk_prob=True, expert_bias=True, expert_bias_rate=1e-3),
            balance=Balance(aux_loss="global-batch", aux_loss_coef=1e-3),
        ),
    )
    return pretrain("minimax-m2", model, learning_rate=2e-4)
