"""A tiny random model of every family and variants of it, by name: family, then what is special.

Parity is shown on rows of 24 tokens; windows, chunks and the floor of the temperature are shorter than that.
"""

from penstock.config.model import (
    ClampedSwiglu,
    CompressedAttention,
    GroupedQueryAttention,
    HyperConnections,
    Indexer,
    LinearAttention,
    Llama3Rope,
    LocalAttention,
    Model,
    Moe,
    Rope,
    Router,
    Yarn,
)
from tests.models.families import moe_with, tiny_attention, tiny_model

YARN = Yarn(factor=8.0, original_max_position_embeddings=16)
LLAMA3 = Llama3Rope(factor=4.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0)
SHARP = Llama3Rope(factor=16.0, original_max_position_embeddings=8, low_freq_factor=1.0, high_freq_factor=1.0)
WINDOW = LocalAttention(size=7)
OF_KIND = LocalAttention(size=7, global_every=4, rope=Rope(theta=500.0))
HYBRID = LocalAttention(size=7, global_every=4, global_rope=False)
LISTED = LocalAttention(size=7, global_layers=(0, 4, 5))
MILD = Rope(theta=1e6, yarn=Yarn(factor=8.0, original_max_position_embeddings=8, mscale=0.0))


def attention(**changes: object) -> GroupedQueryAttention:
    """Four query heads and two key/value heads of 8."""
    return GroupedQueryAttention.model_validate({"heads": 4, "kv_heads": 2, "head_dim": 8} | changes)


def moe(**changes: object) -> Moe:
    """Top 2 of 8 experts of width 16."""
    return Moe.model_validate({"experts": 8, "top_k": 2, "moe_intermediate_size": 16} | changes)


SCALED = {
    "embedding_scale": 3.0,
    "residual_scale": 0.6,
    "logits_scaling": 5.0,
    "attention": attention(softmax_scale=0.3),
}


def model(family: str, **changes: object) -> Model:
    """Three layers of width 32."""
    fields = {"family": family, "vocab_size": 61, "hidden_size": 32, "layers": 3, "initializer_range": 0.2}
    return Model.model_validate({**fields, "attention": attention(), **changes})


def dense(family: str, **changes: object) -> Model:
    """The same with dense layers only."""
    return model(family, **{"dense_layers": changes.get("layers", 3), "intermediate_size": 48, **changes})


def mixtral(**changes: object) -> Model:
    """Softmax over the chosen experts."""
    return model(**{"family": "mixtral", "moe": moe(router=Router(softmax_after_top_k=True)), **changes})


def qwen3_moe(**changes: object) -> Model:
    """Norms of heads; weights divided by their sum."""
    experts = changes.pop("moe", moe(router=Router(norm_topk_prob=True)))
    fields = {"attention": attention(qk_norm="head"), "moe": experts, "intermediate_size": 48}
    return model(**{"family": "qwen3-moe", **fields, **changes})


def olmoe(**changes: object) -> Model:
    """Norms over all heads; heads together as wide as the hidden states."""
    return model(**{"family": "olmoe", "attention": attention(qk_norm="projection"), "moe": moe(), **changes})


def llama4(*, local: LocalAttention | None, qk_norm: str, rope: Rope, **changes: object) -> Model:
    """One expert of 4 by sigmoid, weighed on its input, and a shared one."""
    router = Router(scoring_func="sigmoid", apply_probs_on_input=True)
    sizes = {"experts": 4, "top_k": 1, "shared_expert_intermediate_size": 16}
    experts = moe(**sizes, router=router, moe_layer_freq=changes.pop("every", 1))
    heads = attention(qk_norm=qk_norm, local=local, rope=rope)
    return model("llama4", **{"layers": 4, "intermediate_size": 48, "attention": heads, "moe": experts, **changes})


def gpt_oss(*, rope: Rope, **changes: object) -> Model:
    """Sinks, biases everywhere, clamped activation, every second layer sees a window."""
    local = LocalAttention(size=7, global_every=2)
    router = Router(softmax_after_top_k=True, logit_bias=True)
    experts = moe(bias=True, clamped=ClampedSwiglu(limit=0.7), router=router)
    heads = attention(bias=True, sinks=True, local=local, rope=rope)
    return model("gpt-oss", **{"layers": 4, "attention": heads, "moe": experts, **changes})


def sigmoid_with_bias(**changes: object) -> Router:
    """Choice by sigmoid and a bias, weights divided by their sum."""
    fields = {"scoring_func": "sigmoid", "expert_bias": True, "norm_topk_prob": True, **changes}
    return Router.model_validate(fields)


def glm4_moe(*, bias: bool, qk_norm: str, **changes: object) -> Model:
    """Half of each head is rotated; biases on queries, keys and values; a shared expert; the first layer is dense."""
    router = sigmoid_with_bias(group_score="top2", routed_scaling_factor=2.5)
    experts = moe(shared_expert_intermediate_size=16, router=router)
    heads = attention(partial_rotary_factor=0.5, qkv_bias=bias, qk_norm=qk_norm)
    fields = {"dense_layers": 1, "intermediate_size": 48, "attention": heads, "moe": experts}
    return model("glm4-moe", **{**fields, **changes})


def ernie(**changes: object) -> Model:
    """Softmax with a bias for the choice only, two shared experts, a dense first layer, tied embeddings."""
    router = Router(scoring_func="softmax", expert_bias=True, norm_topk_prob=True)
    experts = moe(shared_expert_intermediate_size=32, router=router)
    fields = {"dense_layers": 1, "intermediate_size": 48, "tie_word_embeddings": True, "moe": experts}
    return model("ernie4.5-moe", **{**fields, **changes})


def minimax_m2(**changes: object) -> Model:
    """Norms over all heads, of which a half is rotated."""
    heads = attention(partial_rotary_factor=0.5, qk_norm="projection", rope=Rope(theta=5e6))
    return model("minimax-m2", **{"attention": heads, "moe": moe(router=sigmoid_with_bias()), **changes})


def qwen3_next(family: str = "qwen3-next", *, value_heads: int = 4, **changes: object) -> Model:
    """Three layers with linear attention, then one with gated attention, and so on; zero-centred norms."""
    heads = attention(head_dim=16, partial_rotary_factor=0.25, qk_norm="head", output_gate=True)
    linear = LinearAttention(
        key_heads=2, value_heads=value_heads, key_head_dim=16, value_head_dim=12, conv_size=4, full_every=4
    )
    experts = moe(shared_expert_intermediate_size=16, shared_expert_gate=True, router=Router(norm_topk_prob=True))
    fields = {"layers": 4, "attention": heads, "linear_attention": linear, "moe": experts, "zero_centred_norms": True}
    return model(family, **{**fields, **changes})


def kimi_linear(**changes: object) -> Model:
    """Kimi Delta Attention, but for every second layer and the last one: latent attention without positions."""
    linear = LinearAttention(
        kind="kda", key_heads=2, value_heads=2, key_head_dim=12, value_head_dim=12, full_every=2, full_last=True
    )
    experts = moe(shared_expert_intermediate_size=16, router=sigmoid_with_bias(group_score="top2"))
    heads = tiny_attention(q_lora_rank=0).model_copy(update={"rotary": False})
    fields = {"layers": 3, "dense_layers": 1, "intermediate_size": 48, "attention": heads, "linear_attention": linear}
    return model("kimi-linear", **{**fields, "moe": experts, **changes})


def deepseek_like(family: str, **changes: object) -> Model:
    """Grouped queries, the router of DeepSeek-V3, a shared expert, a dense first layer."""
    router = sigmoid_with_bias(group_score="top2", routed_scaling_factor=2.5)
    experts = moe(shared_expert_intermediate_size=16, router=router)
    return model(family, **{"dense_layers": 1, "intermediate_size": 48, "moe": experts, **changes})


def qwen2_moe(**changes: object) -> Model:
    """A shared expert with a gate, biases on queries, keys and values."""
    experts = moe(shared_expert_intermediate_size=24, shared_expert_gate=True)
    return model(
        "qwen2-moe", **{"attention": attention(qkv_bias=True), "moe": experts, "intermediate_size": 48, **changes}
    )


def hunyuan_moe(**changes: object) -> Model:
    """Norms of heads behind their rotation, a shared expert as wide as the others."""
    experts = moe(shared_expert_intermediate_size=16, router=Router(norm_topk_prob=True))
    heads = attention(qk_norm="weighted-rotated-head")
    return model("hunyuan-moe", **{"attention": heads, "moe": experts, **changes})


def afmoe(**changes: object) -> Model:
    """Gates by a matrix of their own, norms around, scaled embeddings; layers that see the whole row do not rotate."""
    experts = moe(shared_expert_intermediate_size=32, router=sigmoid_with_bias(group_score="top2"))
    heads = attention(qk_norm="head", gate_proj=True, local=HYBRID.model_copy(update={"global_every": 2}))
    fields = {"dense_layers": 1, "intermediate_size": 48, "norm_position": "sandwich", "embedding_scale": 32**0.5}
    return model("afmoe", **{"attention": heads, "moe": experts, **fields, **changes})


def flint(**changes: object) -> Model:
    """Sinks; layers that see the whole row do not rotate and stand where a list says; the first one is dense."""
    local = LISTED.model_copy(update={"global_rope": False})
    experts = moe(
        shared_expert_intermediate_size=24, router=Router(scoring_func="sigmoid", norm_topk_prob=True), moe_layer_freq=1
    )
    fields = {"layers": 6, "dense_layers": 1, "intermediate_size": 48, "moe": experts}
    heads = attention(qk_norm="head", sinks=True, local=local)
    return model("flint", **{"attention": heads, **fields, **changes})


def mistral4(**changes: object) -> Model:
    """Latent attention whose queries have a temperature, experts of half of the groups by softmax."""
    yarn = Yarn(factor=8.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0)
    heads = tiny_attention(q_lora_rank=20, yarn=yarn).model_copy(
        update={"query_temperature": 0.3, "temperature_floor": 8}
    )
    router = Router(n_group=4, topk_group=2, group_score="top2", norm_topk_prob=True, routed_scaling_factor=1.5)
    experts = moe(shared_expert_intermediate_size=16, router=router)
    fields = {"dense_layers": 1, "intermediate_size": 48, "attention": heads, "moe": experts}
    return model("mistral4", **{**fields, **changes})


def gemma3(**changes: object) -> Model:
    """Norms around, GELU, scaled embeddings, windows with a rotary embedding of their own."""
    local = OF_KIND.model_copy(update={"global_every": 3})
    fields = {
        "attention": attention(qk_norm="head", local=local, rope=Rope(theta=1e6, linear=8.0)),
        "norm_position": "sandwich",
        "zero_centred_norms": True,
        "hidden_act": "gelu",
        "embedding_scale": 32**0.5,
        "tie_word_embeddings": True,
    }
    return dense("gemma3", **{**fields, **changes})


def deepseek_v4(**changes: object) -> Model:
    """Two residual streams; a window layer, then csa and hca by turns; the first layer chooses experts by a table."""
    heads = CompressedAttention(
        heads=4,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=20,
        o_groups=2,
        o_lora_rank=6,
        sliding_window=5,
        first_layers=("window",),
        other_layers=("csa", "hca"),
        csa_rate=2,
        hca_rate=4,
        indexer=Indexer(index_n_heads=3, index_head_dim=12, index_topk=4),
        rope=Rope(theta=1600.0, yarn=YARN.model_copy(update={"mscale": 0.0})),
    )
    router = Router(
        scoring_func="sqrt-softplus",
        expert_bias=True,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        num_hash_layers=1,
    )
    clamped = ClampedSwiglu(alpha=1.0, limit=0.7, up_offset=0.0)
    experts = moe(shared_expert_intermediate_size=16, router=router, clamped=clamped, clamp_shared=True)
    streams = HyperConnections(streams=2, sinkhorn_iters=3)
    return model("deepseek-v4", **{"attention": heads, "moe": experts, "hyper_connections": streams, **changes})


def nope(every: int) -> LocalAttention:
    """Chunks of 9; every n-th layer sees all, does not rotate, and grows its queries."""
    return LocalAttention(
        kind="chunk", size=9, global_every=every, global_rope=False, global_temperature=0.3, temperature_floor=5
    )


LATENT_YARN = tiny_attention(
    q_lora_rank=20, yarn=Yarn(factor=8.0, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.707)
)
V2, V3 = tiny_model("deepseek-v2"), tiny_model("deepseek-v3")
INDEXER = Indexer(index_n_heads=3, index_head_dim=12, index_topk=6)
V32 = tiny_model("deepseek-v3").model_copy(
    update={
        "family": "deepseek-v3.2",
        "attention": tiny_attention(q_lora_rank=20).model_copy(update={"indexer": INDEXER}),
    }
)
GROUPED_V2 = Router(scoring_func="softmax", n_group=4, topk_group=2, group_score="max", routed_scaling_factor=16.0)
RAW_V3 = Router(scoring_func="sigmoid", expert_bias=True, group_score="top2")

VARIANTS: dict[str, Model] = {
    "deepseek-v2": V2,
    "deepseek-v2, latent queries, YaRN": V2.model_copy(update={"attention": LATENT_YARN}),
    "deepseek-v2, groups, scale": moe_with(V2, router=GROUPED_V2),
    "deepseek-v2, two dense layers": V2.model_copy(update={"dense_layers": 2}),
    "deepseek-v3": V3,
    "deepseek-v3, latent queries, YaRN": V3.model_copy(update={"attention": LATENT_YARN}),
    "deepseek-v3, raw weights, no groups": moe_with(V3, router=RAW_V3),
    "deepseek-v3, top 4": moe_with(V3, top_k=4),
    "deepseek-v3.2": V32,
    "deepseek-v4": deepseek_v4(),
    "deepseek-v4, csa alone, plain rotary embedding, three streams": deepseek_v4(
        attention=deepseek_v4().attention.model_copy(
            update={"first_layers": (), "other_layers": ("csa",), "rope": Rope(theta=1600.0), "csa_rate": 3}
        ),
        hyper_connections=HyperConnections(streams=3),
    ),
    "glm5-moe": V32.model_copy(update={"family": "glm5-moe"}),
    "llama": dense("llama", attention=attention(rope=Rope(llama3=LLAMA3))),
    "llama, frequencies divided or kept": dense("llama", attention=attention(rope=Rope(llama3=SHARP))),
    "llama, plain rotary embedding, biases": dense("llama", attention=attention(bias=True)),
    "llama, tied embeddings, YaRN": dense("llama", tie_word_embeddings=True, attention=attention(rope=Rope(yarn=YARN))),
    "qwen3": dense("qwen3", attention=attention(qk_norm="head", rope=Rope(theta=1e6))),
    "qwen3, tied embeddings": dense("qwen3", attention=attention(qk_norm="head"), tie_word_embeddings=True),
    "qwen3, window but for every 2nd layer": dense(
        "qwen3", attention=attention(qk_norm="head", local=LocalAttention(size=7, global_every=2))
    ),
    "mixtral": mixtral(),
    "mixtral, window": mixtral(attention=attention(local=WINDOW)),
    "mixtral, top 4, YaRN": mixtral(
        moe=moe(top_k=4, router=Router(softmax_after_top_k=True)), attention=attention(rope=Rope(yarn=YARN))
    ),
    "qwen3-moe": qwen3_moe(),
    "qwen3-moe, experts every 2nd layer": qwen3_moe(
        layers=4, moe=moe(moe_layer_freq=2, router=Router(norm_topk_prob=True))
    ),
    "qwen3-moe, raw weights, first layer dense, window": qwen3_moe(
        moe=moe(), dense_layers=1, attention=attention(qk_norm="head", local=WINDOW)
    ),
    "olmoe": olmoe(),
    "olmoe, weights divided by their sum": olmoe(moe=moe(router=Router(norm_topk_prob=True))),
    "llama4": llama4(local=nope(4), qk_norm="rotated-head", rope=Rope(theta=5e5, llama3=LLAMA3)),
    "llama4, experts every 2nd layer, no norm": llama4(local=nope(2), qk_norm="none", rope=Rope(theta=5e5), every=2),
    "gpt-oss": gpt_oss(rope=Rope(theta=1.5e5, yarn=YARN.model_copy(update={"truncate": False}))),
    "gpt-oss, plain rotary embedding": gpt_oss(rope=Rope()),
    "glm4-moe": glm4_moe(bias=True, qk_norm="head"),
    "glm4-moe, no norm, no bias": glm4_moe(bias=False, qk_norm="none"),
    "ernie4.5-moe": ernie(),
    "ernie4.5-moe, no shared expert, experts everywhere": ernie(
        dense_layers=0, moe=moe(router=Router(expert_bias=True, norm_topk_prob=True)), tie_word_embeddings=False
    ),
    "minimax-m2": minimax_m2(),
    "minimax-m2, whole heads are rotated": minimax_m2(attention=attention(qk_norm="projection")),
    "qwen3-next": qwen3_next(intermediate_size=48),
    "qwen3-next, a value head for each key head, first layer dense, biases": qwen3_next(
        value_heads=2,
        layers=5,
        dense_layers=1,
        intermediate_size=48,
        attention=attention(head_dim=16, partial_rotary_factor=0.5, qk_norm="head", output_gate=True, bias=True),
    ),
    "qwen3.5-moe": qwen3_next("qwen3.5-moe"),
    "kimi-linear": kimi_linear(),
    "qwen2-moe": qwen2_moe(),
    "qwen2-moe, first layer dense, no bias": qwen2_moe(dense_layers=1, attention=attention()),
    "dots1": deepseek_like("dots1", attention=attention(qk_norm="head")),
    "solar-open": deepseek_like("solar-open", dense_layers=0, intermediate_size=0, attention=attention(qkv_bias=True)),
    "exaone-moe": deepseek_like("exaone-moe", layers=4, attention=attention(qk_norm="head", local=HYBRID)),
    "hy-v3": deepseek_like("hy-v3", attention=attention(qk_norm="head")),
    "glm4-moe-lite": V3.model_copy(update={"family": "glm4-moe-lite", "dense_layers": 2}),
    "qwen2": dense("qwen2", attention=attention(qkv_bias=True, rope=Rope(theta=1e6))),
    "mistral": dense("mistral"),
    "mistral, window": dense("mistral", attention=attention(local=WINDOW)),
    "seed-oss": dense("seed-oss", attention=attention(qkv_bias=True)),
    "seed-oss, bias of the output": dense("seed-oss", attention=attention(bias=True)),
    "phi3": dense("phi3"),
    "phi3, three quarters of a head are rotated, window": dense(
        "phi3", attention=attention(partial_rotary_factor=0.75, local=WINDOW)
    ),
    "arcee": dense("arcee", hidden_act="relu2"),
    "ernie4.5": dense("ernie4.5", tie_word_embeddings=True),
    "glm": dense("glm", attention=attention(qkv_bias=True, partial_rotary_factor=0.5)),
    "flex-olmo": olmoe(family="flex-olmo", norm_position="post"),
    "granite-moe": mixtral(family="granite-moe", **SCALED),
    "granite-moe, shared expert": mixtral(
        family="granite-moe",
        **SCALED,
        moe=moe(shared_expert_intermediate_size=24, router=Router(softmax_after_top_k=True)),
    ),
    "olmo2": dense("olmo2", norm_position="post", attention=attention(qk_norm="projection")),
    "exaone4": dense("exaone4", layers=4, norm_position="post", attention=attention(qk_norm="head", local=HYBRID)),
    "exaone4, all layers rotate and see all": dense(
        "exaone4", norm_position="post", attention=attention(qk_norm="head")
    ),
    "olmo3": dense(
        "olmo3",
        norm_position="post",
        layers=4,
        attention=attention(qk_norm="projection", rope=Rope(theta=5e5, yarn=YARN), local=OF_KIND),
    ),
    "gemma3": gemma3(),
    "gemma3, scores of another width, every layer sees all": gemma3(
        attention=attention(qk_norm="head", softmax_scale=32**-0.5)
    ),
    "mellum": qwen3_moe(family="mellum", layers=4, attention=attention(qk_norm="head", local=OF_KIND)),
    "hunyuan": dense("hunyuan", attention=attention(qk_norm="weighted-rotated-head", rope=Rope(theta=1.1e4))),
    "hunyuan-moe": hunyuan_moe(),
    "afmoe": afmoe(),
    "afmoe, biases, all layers see all, plain embeddings": afmoe(
        embedding_scale=1.0,
        attention=attention(
            qk_norm="head", gate_proj=True, bias=True, local=HYBRID.model_copy(update={"global_every": 1})
        ),
    ),
    "cwm": dense("cwm", layers=6, attention=attention(rope=Rope(theta=1e6, llama3=LLAMA3), local=LISTED)),
    "flint": flint(),
    "ministral3": dense("ministral3", attention=attention(rope=MILD, query_temperature=0.3, temperature_floor=8)),
    "ministral3, window": dense(
        "ministral3", attention=attention(local=WINDOW, rope=MILD, query_temperature=0.1, temperature_floor=8)
    ),
    "mistral4": mistral4(),
    "hunyuan-moe, biases, tied embeddings, top 4": hunyuan_moe(
        attention=attention(qk_norm="weighted-rotated-head", bias=True),
        tie_word_embeddings=True,
        moe=moe(top_k=4, shared_expert_intermediate_size=16, router=Router(norm_topk_prob=True)),
    ),
    "glm4": dense("glm4", norm_position="sandwich", attention=attention(qkv_bias=True, partial_rotary_factor=0.5)),
    "granite": dense("granite", **SCALED),
    "smollm3": dense("smollm3", layers=4, attention=attention(nope_every=2), tie_word_embeddings=True),
    "qwen3.5": qwen3_next("qwen3.5", moe=None, dense_layers=4, intermediate_size=48),
}
