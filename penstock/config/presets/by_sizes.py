"""Models of many houses, by the sizes in their Hugging Face configs; few of them published a learning rate."""

from penstock.config.model import Balance, GroupedQueryAttention, LatentAttention, LocalAttention, Model, Moe, Rope
from penstock.config.presets.deepseek import sigmoid_router
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


def _model(family: str, sizes: tuple[int, int, int, int], attention: object, **fields: object) -> Model:
    """`sizes` are vocabulary, layers, hidden and intermediate; without `moe` all layers are dense."""
    vocab_size, layers, hidden, intermediate = sizes
    values = {"vocab_size": vocab_size, "layers": layers, "hidden_size": hidden, "intermediate_size": intermediate}
    values["dense_layers"] = 0 if "moe" in fields else layers
    return Model.model_validate({"family": family, "attention": attention, "rms_norm_eps": 1e-5, **values, **fields})


def _heads(heads: int, kv_heads: int, theta: float, **fields: object) -> GroupedQueryAttention:
    values = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128, "rope": Rope(theta=theta)}
    return GroupedQueryAttention.model_validate({**values, **fields})


def _sigmoid(experts: int, top_k: int, width: int, *, shared: int = 1, scale: float = 1.0) -> Moe:
    """The router of DeepSeek-V3, without groups."""
    return Moe(
        experts=experts,
        top_k=top_k,
        moe_intermediate_size=width,
        shared_expert_intermediate_size=shared * width,
        router=sigmoid_router(scale),
        balance=Balance(aux_loss="sequence", aux_loss_coef=1e-4),
    )


def mistral_7b() -> Run:
    """Mistral 7B version 0.3, dense: 7.2 B parameters."""
    model = _model("mistral", (32768, 32, 4096, 14336), _heads(32, 8, 1e6))
    return pretrain("mistral-7b", model, learning_rate=3e-4, sequence_length=8192)


def qwen2_5_7b() -> Run:
    """Qwen2.5-7B, dense: 7.6 B parameters."""
    model = _model("qwen2", (152064, 28, 3584, 18944), _heads(28, 4, 1e6, qkv_bias=True), rms_norm_eps=1e-6)
    return pretrain("qwen2.5-7b", model, learning_rate=3e-4)


def seed_oss_36b() -> Run:
    """Seed-OSS-36B, dense: 36.2 B parameters."""
    model = _model("seed-oss", (155136, 64, 5120, 27648), _heads(80, 8, 1e7, qkv_bias=True), rms_norm_eps=1e-6)
    return pretrain("seed-oss-36b", model, learning_rate=2e-4)


def phi_4() -> Run:
    """Phi-4, dense: 14.7 B parameters."""
    model = _model("phi3", (100352, 40, 5120, 17920), _heads(40, 10, 250000.0))
    return pretrain("phi-4", model, learning_rate=3e-4)  # arXiv 2412.08905 section 3


def ernie_4_5_0_3b() -> Run:
    """ERNIE-4.5-0.3B, dense: 0.36 B parameters."""
    model = _model("ernie4.5", (103424, 18, 1024, 3072), _heads(16, 2, 5e5), tie_word_embeddings=True)
    return pretrain("ernie-4.5-0.3b", model, learning_rate=6e-4)


def glm_4_9b() -> Run:
    """GLM-4-9B, dense: 9.4 B parameters."""
    attention = _heads(32, 2, 10000.0, qkv_bias=True, partial_rotary_factor=0.5)
    model = _model("glm", (151552, 40, 4096, 13696), attention, rms_norm_eps=1.5625e-07)
    return pretrain("glm-4-9b", model, learning_rate=3e-4, sequence_length=8192)


def glm_4_32b() -> Run:
    """GLM-4-32B-0414, dense: 32.6 B parameters."""
    attention = _heads(48, 2, 10000.0, partial_rotary_factor=0.5)
    model = _model("glm4", (151552, 61, 6144, 23040), attention, norm_position="sandwich")
    return pretrain("glm-4-32b", model, learning_rate=2e-4)


def olmo_2_7b() -> Run:
    """OLMo 2 7B, dense: 7.3 B parameters."""
    attention = _heads(32, 32, 5e5, qk_norm="projection")
    model = _model("olmo2", (100352, 32, 4096, 11008), attention, norm_position="post", rms_norm_eps=1e-6)
    return pretrain("olmo-2-7b", model, learning_rate=3e-4, rows=1024)  # arXiv 2501.00656 table 3


def exaone_4_0_32b() -> Run:
    """EXAONE-4.0-32B, dense: 32.0 B parameters."""
    local = LocalAttention(size=4096, global_every=4, global_rope=False)
    attention = _heads(40, 8, 1e6, qk_norm="head", local=local)
    model = _model("exaone4", (102400, 64, 5120, 27392), attention, norm_position="post")
    return pretrain("exaone-4.0-32b", model, learning_rate=2e-4)


def smollm3_3b() -> Run:
    """SmolLM3-3B, dense: 3.1 B parameters."""
    attention = _heads(16, 4, 5e6, nope_every=4)
    model = _model("smollm3", (128256, 36, 2048, 11008), attention, tie_word_embeddings=True, rms_norm_eps=1e-6)
    return pretrain("smollm3-3b", model, learning_rate=2e-4)


def granite_3_3_8b() -> Run:
    """Granite 3.3 8B, dense: 8.2 B parameters."""
    scales = {"embedding_scale": 12.0, "residual_scale": 0.22, "logits_scaling": 16.0, "tie_word_embeddings": True}
    attention = _heads(32, 8, 1e7, softmax_scale=0.0078125)
    model = _model("granite", (49159, 40, 4096, 12800), attention, **scales)
    return pretrain("granite-3.3-8b", model, learning_rate=3e-4)


def gemma_3_1b() -> Run:
    """Gemma 3 1B, dense: 1.0 B parameters."""
    local = LocalAttention(size=512, global_every=6, rope=Rope(theta=10000.0))
    model = _model(
        "gemma3",
        (262144, 26, 1152, 6912),
        _heads(4, 1, 1e6, head_dim=256, qk_norm="head", local=local),
        norm_position="sandwich",
        zero_centred_norms=True,
        hidden_act="gelu",
        embedding_scale=1152**0.5,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
    )
    return pretrain("gemma-3-1b", model, learning_rate=4e-4)


def dots_llm1() -> Run:
    """dots.llm1: 142.8 B parameters, 14.0 B active."""
    moe, attention = _sigmoid(128, 6, 1408, shared=2, scale=2.5), _heads(32, 32, 1e7, qk_norm="head")
    model = _model("dots1", (152064, 62, 4096, 10944), attention, moe=moe, dense_layers=1)
    return pretrain("dots.llm1", model, learning_rate=3e-4)  # arXiv 2506.05767 section 3


def solar_open_100b() -> Run:
    """Solar-Open-100B: 102.7 B parameters, 12.1 B active."""
    model = _model("solar-open", (196608, 48, 4096, 0), _heads(64, 8, 1e6), moe=_sigmoid(128, 8, 1280))
    return pretrain("solar-open-100b", model, learning_rate=2e-4)


def k_exaone_236b_a23b() -> Run:
    """K-EXAONE-236B-A23B without its layer of multi-token prediction: 236.6 B parameters, 23.7 B active."""
    local = LocalAttention(size=128, global_every=4, global_rope=False)
    attention, moe = _heads(64, 8, 1e6, qk_norm="head", local=local), _sigmoid(128, 8, 2048, scale=2.5)
    model = _model("exaone-moe", (153600, 48, 6144, 18432), attention, moe=moe, dense_layers=1)
    return pretrain("k-exaone-236b-a23b", model, learning_rate=2e-4)


def hy3() -> Run:
    """Hy3-preview without its layer of multi-token prediction: 295.0 B parameters, 20.7 B active."""
    attention, moe = _heads(64, 8, 11158840.0, qk_norm="head"), _sigmoid(192, 8, 1536, scale=2.826)
    model = _model("hy-v3", (120832, 80, 4096, 13312), attention, moe=moe, dense_layers=1)
    return pretrain("hy3", model, learning_rate=2e-4)


def glm_4_7_flash() -> Run:
    """GLM-4.7-Flash: 29.9 B parameters, 3.9 B active, and one layer of multi-token prediction."""
    attention = LatentAttention(
        heads=20,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        rope=Rope(theta=1e6),
    )
    moe = _sigmoid(64, 4, 1536, scale=1.8)
    model = _model("glm4-moe-lite", (154880, 47, 2048, 10240), attention, moe=moe, dense_layers=1, mtp_layers=1)
    return pretrain("glm-4.7-flash", model, learning_rate=3e-4)


def qwen1_5_moe_a2_7b() -> Run:
    """Qwen1.5-MoE-A2.7B: 14.3 B parameters, 2.7 B active."""
    moe = Moe(
        experts=60,
        top_k=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        shared_expert_gate=True,
        balance=Balance(aux_loss="global-batch", aux_loss_coef=1e-3),
    )
    attention = _heads(16, 16, 1e6, qkv_bias=True)
    model = _model("qwen2-moe", (151936, 24, 2048, 5632), attention, moe=moe, rms_norm_eps=1e-6)
    return pretrain("qwen1.5-moe-a2.7b", model, learning_rate=3e-4)
