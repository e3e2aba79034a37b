"""Models with grouped-query attention: Llama, gpt-oss, Mixtral, OLMoE, ERNIE, MiniMax, and AMD's proxies."""

from penstock.config.model import (
    Balance,
    ClampedSwiglu,
    GroupedQueryAttention,
    Llama3Rope,
    LocalAttention,
    Model,
    Moe,
    Rope,
    Router,
    Yarn,
)
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run

# Llama 3.1 8B, 70B and 405B, and the text models of Llama 4 Scout and Maverick.
# Sources: the Hugging Face configs of the base models, arXiv 2407.21783 table 3 (Llama 3.1: learning rates). Llama 4
# was published with an image encoder of 0.87 B parameters, which is not here; of its training nothing was published.
# Three layers of four see a chunk of 8,192 positions, the fourth all, without position embedding, with a temperature.
# Scout's rotary embedding is as first published; its files were changed later to a factor of 16 and equal bounds.


def _llama3(name: str, sizes: tuple[int, int, int, int], learning_rate: float) -> Run:
    """`sizes` are layers, hidden, intermediate and heads."""
    layers, hidden, intermediate, heads = sizes
    model = Model(
        family="llama",
        vocab_size=128256,
        hidden_size=hidden,
        layers=layers,
        dense_layers=layers,
        intermediate_size=intermediate,
        attention=GroupedQueryAttention(
            heads=heads, kv_heads=8, head_dim=128, rope=Rope(theta=5e5, llama3=Llama3Rope(factor=8.0))
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain(name, model, learning_rate=learning_rate, sequence_length=8192)


def llama_3_1_8b() -> Run:
    """Llama 3.1 8B, dense: 8.0 B parameters."""
    return _llama3("llama3.1-8b", (32, 4096, 14336, 32), 3e-4)


def llama_3_1_70b() -> Run:
    """Llama 3.1 70B, dense: 70.6 B parameters."""
    return _llama3("llama3.1-70b", (80, 8192, 28672, 64), 1.5e-4)


def llama_3_1_405b() -> Run:
    """Llama 3.1 405B, dense: 405.9 B parameters."""
    return _llama3("llama3.1-405b", (126, 16384, 53248, 128), 8e-5)


def _llama4(name: str, *, experts: int, every: int, qk_norm: bool, rope: Rope) -> Run:
    local = LocalAttention(
        kind="chunk", size=8192, global_every=4, global_rope=False, global_temperature=0.1, temperature_floor=8192
    )
    model = Model(
        family="llama4",
        vocab_size=202048,
        hidden_size=5120,
        layers=48,
        intermediate_size=16384,
        attention=GroupedQueryAttention(
            heads=40, kv_heads=8, head_dim=128, rope=rope, qk_norm="rotated-head" if qk_norm else "none", local=local
        ),
        moe=Moe(
            experts=experts,
            top_k=1,
            moe_intermediate_size=8192,
            shared_expert_intermediate_size=8192,
            moe_layer_freq=every,
            router=Router(scoring_func="sigmoid", apply_probs_on_input=True),
            balance=Balance(aux_loss="micro-batch", aux_loss_coef=1e-3),
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain(name, model, learning_rate=2e-4, sequence_length=8192)


def llama4_scout() -> Run:
    """Llama 4 Scout, text model: 107.8 B parameters, 17.2 B active."""
    rope = Rope(theta=5e5, llama3=Llama3Rope(factor=8.0))
    return _llama4("llama4-scout", experts=16, every=1, qk_norm=True, rope=rope)


def llama4_maverick() -> Run:
    """Llama 4 Maverick, text model: 400.7 B parameters, 17.2 B active."""
    return _llama4("llama4-maverick", experts=128, every=2, qk_norm=False, rope=Rope(theta=5e5))


# gpt-oss-20b and gpt-oss-120b.
# Sources: the Hugging Face configs of the two models, arXiv 2508.10925 section 2. Every second layer sees the last 128
# positions only. No recipe was published. The active sizes that are published (3.6 B, 5.1 B) leave the embedding out.


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


# Mixtral 8x7B and 8x22B, version 0.1, and OLMoE-1B-7B (0924).
# Sources: the Hugging Face configs of the three models, arXiv 2401.04088 (8x7B), arXiv 2409.02060 section 2 and
# appendix B (OLMoE: learning rate, batch, warm-up, auxiliary loss and z-loss). No recipe of Mixtral was published: the
# auxiliary loss has the coefficient of the configs, the rest is `recipe`'s.


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


# ERNIE-4.5 with experts, and MiniMax-M2: sizes of the Hugging Face configs. No learning rates were published.


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


# MoE-515B, MoE-1T and MoE-2T: AMD's proxy models for plans and measurements.
# Source: AMD's blog "MoE Training Best Practices on AMD GPUs" (December 2025). The three differ in their experts only.
# The active sizes that are advertised (44 B, 44 B, 80 B) leave out the query and output projections; the docstrings
# count all parameters that a token meets, embedding and output projection included. No learning rate or batch was
# published: they are similar to DeepSeek-V3's.


def _proxy(name: str, *, experts: int, top_k: int) -> Run:
    model = Model(
        family="plain",
        vocab_size=102400,
        hidden_size=8192,
        layers=96,
        attention=GroupedQueryAttention(heads=64, kv_heads=8, head_dim=128, rope=Rope(theta=10000.0)),
        moe=Moe(
            experts=experts,
            top_k=top_k,
            moe_intermediate_size=1920,
            shared_expert_intermediate_size=1920,
            router=Router(scoring_func="softmax"),
            balance=Balance(aux_loss="sequence", aux_loss_coef=1e-3),
        ),
        initializer_range=0.006,
    )
    return pretrain(name, model, learning_rate=2.2e-4, rows=6144)


def moe_515b() -> Run:
    """AMD's MoE-515B proxy: 528 B parameters, 57.0 B active."""
    return _proxy("moe-515b", experts=112, top_k=8)


def moe_1t() -> Run:
    """AMD's MoE-1T proxy: 1,036 B parameters, 57.1 B active."""
    return _proxy("moe-1t", experts=224, top_k=8)


def moe_2t() -> Run:
    """AMD's MoE-2T proxy: 2,050 B parameters, 93.5 B active."""
    return _proxy("moe-2t", experts=448, top_k=16)
