"""GLM-4.5, GLM-4.5-Air and GLM-5.

Sources: the Hugging Face configs of the base models (sizes), arXiv 2508.06471 section 2 (Muon with a peak learning rate
of 2.5e-4, batches that grow to 64 Mi tokens, bias step, auxiliary loss). Of GLM-5's training only the sizes are taken.
"""

from penstock.config.model import Balance, GroupedQueryAttention, Indexer, LatentAttention, Model, Moe, Rope
from penstock.config.presets.deepseek import sigmoid_router
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


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
