"""DeepSeek-V2-Lite, V2, V3 and V3.2, as their authors published them.

Sources: the Hugging Face configs of the three models (sizes, rotary scaling), arXiv 2405.04434 section 3.1.2 and
appendix B (V2, V2-Lite: optimizer, auxiliary loss), arXiv 2412.19437 sections 4.1 and 4.2 (V3).
"""

from penstock.config.model import Balance, Indexer, LatentAttention, Model, Moe, Rope, Router, Yarn
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
