"""Models built from DeepSeek's parts: DeepSeek-V2-Lite, V2, V3, V3.2 and V4-Flash, Moonlight, Kimi and GLM.

DeepSeek's sources: the Hugging Face configs of the models (sizes, rotary scaling), arXiv 2405.04434 section 3.1.2 and
appendix B (V2, V2-Lite: optimizer, auxiliary loss), arXiv 2412.19437 sections 4.1 and 4.2 (V3).
"""

from penstock.config.model import (
    Balance,
    ClampedSwiglu,
    CompressedAttention,
    GroupedQueryAttention,
    HyperConnections,
    Indexer,
    LatentAttention,
    LinearAttention,
    Model,
    Moe,
    Rope,
    Router,
    Yarn,
)
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


def latent_attention(heads: int, q_lora_rank: int, rope: Rope) -> LatentAttention:
    """Attention with the head sizes of DeepSeek-V2."""
    return LatentAttention(
        heads=heads,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope=rope,
    )


def sigmoid_router(scale: float, n_group: int = 1, topk_group: int = 1) -> Router:
    """The router of DeepSeek-V3: sigmoid scores, and a bias for each expert instead of an auxiliary loss."""
    return Router(
        scoring_func="sigmoid",
        n_group=n_group,
        topk_group=topk_group,
        group_score="top2",
        norm_topk_prob=True,
        routed_scaling_factor=scale,
        expert_bias=True,
        expert_bias_rate=1e-3,
    )


def _rope(temperature: float) -> Rope:
    return Rope(theta=10000.0, yarn=Yarn(factor=40.0, mscale=temperature, mscale_all_dim=temperature))


def deepseek_v2_lite() -> Run:
    """DeepSeek-V2-Lite: 15.7 B parameters, 2.7 B active."""
    model = Model(
        family="deepseek-v2",
        vocab_size=102400,
        hidden_size=2048,
        layers=27,
        dense_layers=1,
        intermediate_size=10944,
        attention=latent_attention(16, 0, _rope(0.707)),
        moe=Moe(
            experts=64,
            top_k=6,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=2816,
            router=Router(scoring_func="softmax"),
            balance=Balance(aux_loss="sequence", aux_loss_coef=1e-3),
        ),
        initializer_range=0.006,
    )
    return pretrain("deepseek-v2-lite", model, learning_rate=4.2e-4, rows=512)


def deepseek_v2() -> Run:
    """DeepSeek-V2: 236 B parameters, 21 B active."""
    model = Model(
        family="deepseek-v2",
        vocab_size=102400,
        hidden_size=5120,
        layers=60,
        dense_layers=1,
        intermediate_size=12288,
        attention=latent_attention(128, 1536, _rope(0.707)),
        moe=Moe(
            experts=160,
            top_k=6,
            moe_intermediate_size=1536,
            shared_expert_intermediate_size=3072,
            router=Router(scoring_func="softmax", n_group=8, topk_group=3, routed_scaling_factor=16.0),
            balance=Balance(aux_loss="sequence", aux_loss_coef=3e-3),
        ),
        initializer_range=0.006,
    )
    return pretrain("deepseek-v2", model, learning_rate=2.4e-4, rows=9216)


def deepseek_v3() -> Run:
    """DeepSeek-V3: 671 B parameters, 37 B active, and one layer of multi-token prediction."""
    model = Model(
        family="deepseek-v3",
        vocab_size=129280,
        hidden_size=7168,
        layers=61,
        dense_layers=3,
        intermediate_size=18432,
        attention=latent_attention(128, 1536, _rope(1.0)),
        moe=Moe(
            experts=256,
            top_k=8,
            moe_intermediate_size=2048,
            shared_expert_intermediate_size=2048,
            router=sigmoid_router(2.5, n_group=8, topk_group=4),
            balance=Balance(aux_loss="sequence", aux_loss_coef=1e-4),
        ),
        mtp_layers=1,
        initializer_range=0.006,
    )
    return pretrain("deepseek-v3", model, learning_rate=2.2e-4, rows=15360)


def deepseek_v3_2() -> Run:
    """DeepSeek-V3.2: V3 with sparse attention, 671.9 B parameters; its second stage (arXiv 2512.02556 section 2.1)."""
    model = deepseek_v3().model
    assert isinstance(model.attention, LatentAttention), "V3 has latent attention"
    attention = model.attention.model_copy(
        update={"indexer": Indexer(index_n_heads=64, index_head_dim=128, index_topk=2048)}
    )
    model = model.model_copy(update={"family": "deepseek-v3.2", "attention": attention})
    return pretrain("deepseek-v3.2", model, learning_rate=7.3e-6, sequence_length=131072, rows=480)


def deepseek_v4_flash() -> Run:
    """DeepSeek-V4-Flash: 284 B parameters, 13 B active; without its layer of multi-token prediction.

    Source: the Hugging Face config. Learning rate and balance are those of V3.
    """
    yarn = Yarn(factor=16.0, original_max_position_embeddings=65536, mscale=0.0)
    router = Router(
        scoring_func="sqrt-softplus",
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        expert_bias=True,
        num_hash_layers=3,
    )
    model = Model(
        family="deepseek-v4",
        vocab_size=129280,
        hidden_size=4096,
        layers=43,
        attention=CompressedAttention(
            heads=64,
            head_dim=512,
            qk_rope_head_dim=64,
            q_lora_rank=1024,
            o_groups=8,
            o_lora_rank=1024,
            sliding_window=128,
            first_layers=("window", "window"),
            other_layers=("csa", "hca"),
            indexer=Indexer(index_n_heads=64, index_head_dim=128, index_topk=512),
            rope=Rope(theta=160000.0, yarn=yarn),
        ),
        moe=Moe(
            experts=256,
            top_k=6,
            moe_intermediate_size=2048,
            shared_expert_intermediate_size=2048,
            clamped=ClampedSwiglu(alpha=1.0, limit=10.0, up_offset=0.0),
            clamp_shared=True,
            router=router,
            balance=Balance(aux_loss="sequence", aux_loss_coef=1e-4),
        ),
        hyper_connections=HyperConnections(),
    )
    return pretrain("deepseek-v4-flash", model, learning_rate=2.2e-4)


# Moonlight-16B-A3B and Kimi-K2 have the parts of DeepSeek-V3 in other sizes, without expert groups.
# Sources: the Hugging Face configs of the base models (sizes, rotary scaling, auxiliary loss), arXiv 2502.16982
# (Moonlight: learning rate, batch), arXiv 2507.20534 section 2.5 (Kimi-K2). Kimi Linear has Moonlight's learning rate.
# All were trained with Muon (`optimizer.method=muon`).


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


# GLM-4.5, GLM-4.5-Air and GLM-5.
# Sources: the Hugging Face configs of the base models (sizes), arXiv 2508.06471 section 2 (Muon with a peak learning
# rate of 2.5e-4, batches that grow to 64 Mi tokens, bias step, auxiliary loss). Of GLM-5 only the sizes are taken.


def _glm(  # noqa: PLR0913 (the sizes in which the two models differ)
    name: str,
    *,
    hidden_size: int,
    layers: int,
    dense_layers: int,
    intermediate_size: int,
    experts: int,
    ffn_size: int,
    scale: float,
    has_norm: bool,
) -> Run:
    model = Model(
        family="glm4-moe",
        vocab_size=151552,
        hidden_size=hidden_size,
        layers=layers,
        dense_layers=dense_layers,
        intermediate_size=intermediate_size,
        attention=GroupedQueryAttention(
            heads=96,
            kv_heads=8,
            head_dim=128,
            rope=Rope(theta=1e6),
            partial_rotary_factor=0.5,
            qk_norm="head" if has_norm else "none",
            qkv_bias=True,
        ),
        moe=Moe(
            experts=experts,
            top_k=8,
            moe_intermediate_size=ffn_size,
            shared_expert_intermediate_size=ffn_size,
            router=sigmoid_router(scale),
            balance=Balance(aux_loss="sequence", aux_loss_coef=1e-4),
        ),
        mtp_layers=1,
        rms_norm_eps=1e-5,
    )
    return pretrain(name, model, learning_rate=2.5e-4, rows=16384)


def glm_4_5() -> Run:
    """GLM-4.5: 352.8 B parameters, 33.6 B active, and one layer of multi-token prediction."""
    return _glm(
        "glm-4.5",
        hidden_size=5120,
        layers=92,
        dense_layers=3,
        intermediate_size=12288,
        experts=160,
        ffn_size=1536,
        scale=2.5,
        has_norm=True,
    )


def glm_4_5_air() -> Run:
    """GLM-4.5-Air: 106.9 B parameters, 13.4 B active, and one layer of multi-token prediction."""
    return _glm(
        "glm-4.5-air",
        hidden_size=4096,
        layers=46,
        dense_layers=1,
        intermediate_size=10944,
        experts=128,
        ffn_size=1408,
        scale=1.0,
        has_norm=False,
    )


def glm_5() -> Run:
    """GLM-5: sparse attention as DeepSeek-V3.2's in a model of its own sizes, and a layer of multi-token prediction."""
    model = Model(
        family="glm5-moe",
        vocab_size=154880,
        hidden_size=6144,
        layers=78,
        dense_layers=3,
        intermediate_size=12288,
        attention=LatentAttention(
            heads=64,
            q_lora_rank=2048,
            kv_lora_rank=512,
            qk_nope_head_dim=192,
            qk_rope_head_dim=64,
            v_head_dim=256,
            rope=Rope(theta=1e6),
            indexer=Indexer(index_n_heads=32, index_head_dim=128, index_topk=2048),
        ),
        moe=Moe(
            experts=256,
            top_k=8,
            moe_intermediate_size=2048,
            shared_expert_intermediate_size=2048,
            router=sigmoid_router(2.5),
            balance=Balance(aux_loss="sequence", aux_loss_coef=1e-4),
        ),
        mtp_layers=1,
        rms_norm_eps=1e-5,
    )
    return pretrain("glm-5", model, learning_rate=2.5e-4, rows=16384)
