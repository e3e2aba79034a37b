"""The model: one decoder made of parts. A family (DeepSeek, Qwen, Mixtral, ...) is values of these fields, not code."""

from functools import partial
from typing import Annotated, Literal

from pydantic import Discriminator

from penstock.config.schema import Section, knob

# Limits are far above any trained model, and low enough that products of a few fit 64 bits.
MOST_EXPERTS = 2**16  # of a layer, and groups of them
MOST_LAYERS = 10_000  # also virtual stages of a pipeline rank
MOST_TOKENS = 2**31  # ids of a vocabulary

_width = partial(knob, unit="features", high=2**20)
_heads = partial(knob, unit="heads", high=2**16)
_experts = partial(knob, unit="experts", high=MOST_EXPERTS)
_groups = partial(knob, unit="groups", low=1, high=MOST_EXPERTS)
_layers = partial(knob, unit="layers", high=MOST_LAYERS)


class Yarn(Section):
    """YaRN context extension (arXiv 2309.00071), as DeepSeek uses it."""

    factor: float = knob(doc="How many times longer the context is than in pretraining.", low=1.0)
    original_max_position_embeddings: int = knob(4096, doc="Context length of pretraining.", unit="positions", low=1)
    beta_fast: float = knob(32.0, doc="Rotations over the original context above which a frequency is kept.", low=0.0)
    beta_slow: float = knob(
        1.0, doc="Rotations over the original context below which a frequency is divided by `factor`.", low=0.0
    )
    mscale: float = knob(1.0, doc="Factor of the logarithmic temperature on cosine and sine.", low=0.0)
    mscale_all_dim: float = knob(0.0, doc="The same for all dims, applied to the softmax scale.", low=0.0)
    truncate: bool = knob(True, doc="Whether the ramp begins and ends at whole pairs.")


class Llama3Rope(Section):
    """Context extension of Llama 3.1 (arXiv 2407.21783): slow frequencies are divided, fast ones kept."""

    factor: float = knob(8.0, doc="Divisor of slow frequencies.", low=1.0)
    original_max_position_embeddings: int = knob(8192, doc="Context length of pretraining.", unit="positions", low=1)
    low_freq_factor: float = knob(
        1.0, doc="Rotations over the original context below which a frequency is divided.", low=0.0
    )
    high_freq_factor: float = knob(
        4.0, doc="Rotations over the original context above which a frequency is kept.", low=0.0
    )


class Rope(Section):
    """Rotary position embedding on interleaved pairs."""

    theta: float = knob(10000.0, doc="Base of the frequencies.", low=2.0)
    yarn: Yarn | None = knob(None, doc="Context extension by YaRN; none for plain rotary embedding.")
    llama3: Llama3Rope | None = knob(None, doc="Context extension as in Llama 3.1; at most one of the two.")
    linear: float = knob(1.0, doc="Divisor of all angles: positions are interpolated (Gemma 3).", low=1.0)


class LocalAttention(Section):
    """Layers with local attention between layers with global attention."""

    kind: Literal["window", "chunk"] = knob(
        "window", doc="`window`: the last `size` positions, with the position itself; `chunk`: its block of `size`."
    )
    size: int = knob(doc="Positions that a layer attends to at most.", unit="positions", low=1)
    global_every: int = _layers(0, doc="Every n-th layer, the n-th first, has global attention; 0: none.", low=0)
    global_layers: tuple[int, ...] = knob(
        (), doc="Layers, from 0, with global attention, in place of every n-th (CWM); none: `global_every` says."
    )
    rope: Rope | None = knob(None, doc="Position embedding of local layers (Gemma 3); none: that of all layers.")
    global_rope: bool = knob(True, doc="Whether global layers have rotary embedding (Llama 4: no).")
    global_temperature: float = knob(
        0.0,
        doc="Queries of global layers are scaled by 1 + this x log(1 + floor(position / `temperature_floor`)).",
        low=0.0,
    )
    temperature_floor: int = knob(
        8192, doc="Positions, from 1, below which they are not scaled.", unit="positions", low=1
    )


def _query_temperature() -> float:
    return knob(
        0.0,
        doc="Queries of all layers are scaled by 1 + this x log(1 + floor(position / `temperature_floor`)) "
        "(Ministral 3).",
        low=0.0,
    )


def _temperature_floor() -> int:
    return knob(8192, doc="Positions, from 0, below which they are not scaled.", unit="positions", low=1)


class GroupedQueryAttention(Section):
    """Attention whose query heads share key/value heads (arXiv 2305.13245)."""

    kind: Literal["gqa"] = knob("gqa", doc="Grouped-query attention.")
    heads: int = _heads(doc="Query heads.", low=1)
    kv_heads: int = _heads(doc="Key/value heads; must divide `heads`.", low=1)
    head_dim: int = _width(doc="Width of a head; even.", low=2)
    rope: Rope = knob(Rope(), doc="Position embedding.")
    qk_norm: Literal["none", "head", "projection", "rotated-head", "weighted-rotated-head"] = knob(
        "none",
        doc="RMSNorm of queries and keys: of each head (Qwen 3), of all heads as one (OLMoE), of each head after "
        "rotation and without weights, in layers that rotate (Llama 4), or after rotation with weights (Hunyuan).",
    )
    partial_rotary_factor: float = knob(
        1.0, doc="Part of a head, its first features, that is rotated.", low=0.001, high=1.0
    )
    bias: bool = knob(False, doc="Biases on all four projections.")
    qkv_bias: bool = knob(False, doc="Biases on queries, keys and values (GLM-4.5); `bias` includes them.")
    softmax_scale: float = knob(
        0.0, doc="Factor on scores; 0: 1 / sqrt(`head_dim`), times YaRN's temperature.", low=0.0
    )
    nope_every: int = _layers(0, doc="Every n-th layer, the n-th first, does not rotate (SmolLM3); 0: none.", low=0)
    output_gate: bool = knob(False, doc="The output of each head is multiplied by a sigmoid of the input (Qwen3-Next).")
    gate_proj: bool = knob(
        False, doc="The same gate by a matrix of its own without bias (AFMoE), not by rows between those of queries."
    )
    sinks: bool = knob(False, doc="A learned logit for each head in the softmax, without a value (attention sink).")
    query_temperature: float = _query_temperature()
    temperature_floor: int = _temperature_floor()
    local: LocalAttention | None = knob(None, doc="Layers with local attention; none: all are global.")

    def is_global(self, layer: int) -> bool:
        """Whether the layer of this number, from 0, has global attention."""
        if self.local is not None and self.local.global_layers:
            return layer in self.local.global_layers
        every = 1 if self.local is None else self.local.global_every  # 0: no layer is global
        return every > 0 and (layer + 1) % every == 0  # the n-th, 2n-th, ... layer

    def rope_of(self, layer: int) -> Rope:
        """The position embedding of the layer of this number, from 0."""
        return self.rope if self.local is None or self.is_global(layer) else self.local.rope or self.rope

    def rotates(self, layer: int) -> bool:
        """Whether the layer of this number, from 0, has position embedding."""
        if self.nope_every and (layer + 1) % self.nope_every == 0:
            return False
        return self.local is None or self.local.global_rope or not self.is_global(layer)

    @property
    def rotary_dim(self) -> int:
        """Width of the part of a head that is rotated."""
        return int(self.head_dim * self.partial_rotary_factor)


class Indexer(Section):
    """Sparse attention: a light indexer chooses the keys of each query (DeepSeek-V3.2, arXiv 2512.02556)."""

    index_n_heads: int = _heads(doc="Heads of the indexer, which share one key.", low=1)
    index_head_dim: int = _width(doc="Width of such a head; at least the rotary part of attention's heads.", low=2)
    index_topk: int = knob(doc="Keys that a query attends to.", unit="positions", low=1, high=MOST_TOKENS)
    stage: Literal["dense", "sparse"] = knob(
        "sparse",
        doc="dense: attention reads all keys, and only the indexer learns (warm-up); sparse: it reads the chosen ones.",
    )
    loss_coef: float = knob(1.0, doc="Factor of the loss that trains the indexer; 0 switches it off.", low=0.0)


class LatentAttention(Section):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    kind: Literal["mla"] = knob("mla", doc="Multi-head latent attention.")
    heads: int = _heads(doc="Heads.", low=1)
    q_lora_rank: int = _width(0, doc="Rank of the query projection; 0 projects queries directly.", low=0)
    kv_lora_rank: int = _width(doc="Rank of the key/value projection.", low=1)
    qk_nope_head_dim: int = _width(doc="Part of a query/key head without position.", low=1)
    qk_rope_head_dim: int = _width(doc="Part of a query/key head with position; even.", low=2)
    v_head_dim: int = _width(doc="Width of a value head.", low=1)
    rope: Rope = knob(Rope(), doc="Position embedding of the rotary part.")
    rotary: bool = knob(True, doc="Rotate that part; false: keys have no position, only an order (Kimi Linear).")
    sinks: bool = knob(False, doc="A learned logit for each head in the softmax, without a value (attention sink).")
    query_temperature: float = _query_temperature()
    temperature_floor: int = _temperature_floor()
    indexer: Indexer | None = knob(None, doc="Choice of keys; none: a query attends to all.")

    @property
    def head_dim(self) -> int:
        """Width of a query/key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim  # values may have another width

    @property
    def rotary_dim(self) -> int:
        """Width of the part of a head that is rotated."""
        return self.qk_rope_head_dim


LAYER_KINDS = ("window", "csa", "hca")  # of compressed attention


class CompressedAttention(Section):
    """Attention to a window and to compressed keys of all positions before it (DeepSeek-V4).

    All heads share one key, which is the value too. Compressed sparse attention (`csa`) makes an entry of every
    `csa_rate` positions and those before them, and an indexer chooses entries; heavily compressed attention (`hca`)
    reads an entry for every `hca_rate` positions. Entries do not cross documents.
    """

    kind: Literal["compressed"] = knob("compressed", doc="Compressed attention.")
    heads: int = _heads(doc="Query heads.", low=1)
    head_dim: int = _width(doc="Width of a head.", low=2)
    qk_rope_head_dim: int = _width(doc="Part of a head, its last features, that is rotated; even.", low=2)
    q_lora_rank: int = _width(doc="Rank of the query projection.", low=1)
    o_groups: int = _heads(doc="Groups of heads with an output projection of their own; must divide `heads`.", low=1)
    o_lora_rank: int = _width(doc="Width of a group's output projection.", low=1)
    sliding_window: int = knob(doc="Positions before, the own one included, that every layer reads.", low=1)
    first_layers: tuple[str, ...] = knob((), doc="Kinds of the first layers: window (alone), csa, hca.")
    other_layers: tuple[str, ...] = knob(("hca", "csa"), doc="Kinds of the layers behind them, by turns.")
    csa_rate: int = knob(4, doc="Positions from one entry to the next in csa layers.", unit="positions", low=1)
    hca_rate: int = knob(128, doc="Positions of an entry in hca layers.", unit="positions", low=1)
    indexer: Indexer = knob(doc="Choice of entries in csa layers.")
    rope: Rope = knob(Rope(theta=160000.0), doc="Position embedding of csa and hca layers, and of entries.")
    window_rope: Rope = knob(Rope(), doc="Position embedding of window layers.")

    def kind_of(self, layer: int) -> str:
        """`window`, `csa` or `hca` of the layer of this number, from 0."""
        behind = layer - len(self.first_layers)
        return self.first_layers[layer] if behind < 0 else self.other_layers[behind % len(self.other_layers)]

    @property
    def rotary_dim(self) -> int:
        """Width of the part of a head that is rotated."""
        return self.qk_rope_head_dim


class LinearAttention(Section):
    """Layers with linear attention by a gated delta rule, between layers with `model.attention`."""

    kind: Literal["gdn", "kda"] = knob(
        "gdn",
        doc="Decay of the state: a number for each head (Gated DeltaNet, Qwen3-Next), or for each key feature (Kimi "
        "Delta Attention).",
    )
    key_heads: int = _heads(doc="Heads of queries and keys.", low=1)
    value_heads: int = _heads(doc="Heads of values; a multiple of `key_heads`.", low=1)
    key_head_dim: int = _width(doc="Width of a query or key.", low=1)
    value_head_dim: int = _width(doc="Width of a value.", low=1)
    conv_size: int = knob(
        4, doc="Positions of the short convolution over queries, keys and values.", unit="positions", low=1, high=64
    )
    full_every: int = _layers(4, doc="Every n-th layer, the n-th first, has `model.attention` instead; 0: none.", low=0)
    full_last: bool = knob(False, doc="The last layer has `model.attention` too (Kimi Linear).")


Attention = Annotated[GroupedQueryAttention | LatentAttention | CompressedAttention, Discriminator("kind")]


class Router(Section):
    """Choice of a token's experts and their weights. Always computed in float32."""

    scoring_func: Literal["softmax", "sigmoid", "sqrt-softplus"] = knob(
        "softmax", doc="Function from logits to scores: softmax over experts, sigmoid, or the root of softplus."
    )
    softmax_after_top_k: bool = knob(
        False, doc="Choose by logits and take the softmax over the chosen experts only (Mixtral) instead of before."
    )
    n_group: int = _groups(1, doc="Equal groups of experts; 1 means no groups.")
    topk_group: int = _groups(1, doc="Groups that one token may choose from.")
    group_score: Literal["max", "top2"] = knob(
        "max", doc="Judge a group by its best expert (DeepSeek-V2) or by its best two (DeepSeek-V3)."
    )
    norm_topk_prob: bool = knob(False, doc="Divide the chosen weights by their sum.")
    routed_scaling_factor: float = knob(1.0, doc="Factor on the chosen weights.", low=0.0)
    expert_bias: bool = knob(
        False, doc="Balance without auxiliary loss: a bias for each expert steers the choice (arXiv 2408.15664)."
    )
    expert_bias_rate: float = knob(
        1e-3, doc="Step of the bias, once per global batch, with `balance.bias_rule` sign.", low=0.0
    )
    logit_bias: bool = knob(False, doc="A learned bias on the logits (gpt-oss).")
    num_hash_layers: int = _layers(
        0,
        doc="First layers with experts that choose by a fixed table of token ids, drawn at random; their router gives "
        "the weights only, and has no `expert_bias` (DeepSeek-V4).",
        low=0,
    )
    apply_probs_on_input: bool = knob(
        False, doc="Multiply the chosen weight with the expert's input (Llama 4) instead of its output."
    )


class Balance(Section):
    """Even load of the experts."""

    aux_loss: Literal["none", "micro-batch", "sequence", "global-batch"] = knob(
        "none",
        doc="Tokens over which the auxiliary loss counts load: one micro-batch; one row (sequence); or the step's "
        "micro-batches so far, over all ranks of the stage (global-batch), so only the last one sees the whole batch.",
    )
    aux_loss_coef: float = knob(0.0, doc="Factor of the auxiliary loss; 0 switches it off.", low=0.0)
    z_loss_coef: float = knob(0.0, doc="Factor of the router z-loss (ST-MoE); 0 switches it off.", low=0.0)
    bias_rule: Literal["sign", "quantile"] = knob(
        "sign",
        doc="How `router.expert_bias` follows the loads, once per global batch: by a fixed step against each expert's "
        "excess (sign), or to the bias with which it would have had its even share (quantile, no rate).",
    )
    capacity_factor: float = knob(
        0.0,
        doc="Slots of an expert over its fair share; slots beyond are dropped, those of smaller weights first, and of "
        "equal weights those of later positions. 0 means dropless, as held-out loss and sampling always are.",
        low=0.0,
    )
    pad_to_capacity: bool = knob(False, doc="Give every expert exactly its capacity of rows (drop and pad).")
    force_load_balance: bool = knob(
        False, doc="BENCHMARK ONLY: ignore the router's choice and spread tokens evenly. Marked in every log."
    )


class ClampedSwiglu(Section):
    """(up + offset) * gate * sigmoid(alpha * gate), with gate and up clamped first; the defaults are gpt-oss's."""

    alpha: float = knob(1.702, doc="Factor inside the sigmoid; 1 makes it SwiGLU's (DeepSeek-V4).", low=0.0)
    limit: float = knob(7.0, doc="Gate is at most this, up at most this and at least its negative.", low=0.0)
    up_offset: float = knob(1.0, doc="Added to up after it is clamped; 0 for DeepSeek-V4.", low=0.0)


class Moe(Section):
    """Mixture-of-experts feed-forward network."""

    experts: int = _experts(doc="Routed experts of a layer.", low=1)
    top_k: int = _experts(doc="Experts per token.", low=1)
    moe_intermediate_size: int = _width(doc="Width of one expert.", low=1)
    shared_expert_intermediate_size: int = _width(
        0, doc="Width of the shared expert that sees every token; 0 for none.", low=0
    )
    moe_layer_freq: int = _layers(
        1, doc="Every n-th layer after the first dense ones has experts, the n-th first.", low=1
    )
    shared_expert_gate: bool = knob(
        False, doc="A sigmoid of the token multiplies the shared expert's output (Qwen3-Next)."
    )
    bias: bool = knob(False, doc="Biases on both products of every routed expert.")
    clamped: ClampedSwiglu | None = knob(
        None, doc="Clamped activation in routed experts (gpt-oss, DeepSeek-V4); none: without limits."
    )
    clamp_shared: bool = knob(False, doc="The shared expert's activation is clamped too (DeepSeek-V4).")
    router: Router = knob(Router(), doc="Choice of experts.")
    balance: Balance = knob(Balance(), doc="Even load.")


class HyperConnections(Section):
    """Several residual streams, mixed by weights of each position (mHC, arXiv 2512.24880; DeepSeek-V4)."""

    streams: int = knob(4, doc="Residual streams, each as wide as `model.hidden_size`.", low=2, high=64)
    sinkhorn_iters: int = knob(
        20, doc="Times that rows and columns of the matrix between streams are divided by their sums.", low=1, high=1000
    )
    epsilon: float = knob(1e-6, doc="Added to sums and to weights of streams.", low=0.0)


class Model(Section):
    """A decoder-only language model."""

    family: Literal[
        "deepseek-v2",
        "deepseek-v3",
        "deepseek-v3.2",
        "deepseek-v4",
        "glm5-moe",
        "mixtral",
        "qwen3-moe",
        "olmoe",
        "llama4",
        "gpt-oss",
        "glm4-moe",
        "ernie4.5-moe",
        "minimax-m2",
        "qwen3-next",
        "qwen3.5-moe",
        "kimi-linear",
        "qwen2-moe",
        "dots1",
        "solar-open",
        "exaone-moe",
        "hy-v3",
        "hunyuan-moe",
        "flint",
        "afmoe",
        "mistral4",
        "glm4-moe-lite",
        "mellum",
        "flex-olmo",
        "granite-moe",
        "llama",
        "qwen3",
        "qwen2",
        "mistral",
        "seed-oss",
        "phi3",
        "arcee",
        "ernie4.5",
        "glm",
        "qwen3.5",
        "olmo2",
        "exaone4",
        "glm4",
        "granite",
        "smollm3",
        "olmo3",
        "gemma3",
        "hunyuan",
        "cwm",
        "ministral3",
        "plain",
    ] = knob(doc="Names of weights in files (plain: none); the values below decide everything else.")
    vocab_size: int = knob(doc="Token ids.", unit="tokens", low=2, high=MOST_TOKENS)
    hidden_size: int = _width(doc="Width of the residual stream.", low=2)
    layers: int = _layers(doc="Decoder layers.", low=1)
    dense_layers: int = _layers(
        0, doc="First layers whose feed-forward network is dense; `moe.moe_layer_freq` may leave more.", low=0
    )
    intermediate_size: int = _width(0, doc="Width of a dense feed-forward network.", low=0)
    hidden_act: Literal["silu", "gelu", "relu2"] = knob(
        "silu",
        doc="Activation of dense networks and experts: silu(gate) * up (SwiGLU), gelu(gate) * up with GELU's tanh form "
        "(Gemma), or relu(up)**2 without a gate (Nemotron-H).",
    )
    attention: Attention = knob(doc="Attention of every layer, or of those without linear attention.")
    linear_attention: LinearAttention | None = knob(
        None, doc="Linear attention of most layers; none: all layers have `attention`."
    )
    moe: Moe | None = knob(None, doc="Mixture of experts of the other layers; none for a dense model.")
    mtp_layers: int = _layers(0, doc="Multi-token prediction depth (DeepSeek-V3 section 2.2).", low=0)
    rms_norm_eps: float = knob(1e-6, doc="Epsilon of RMSNorm.", low=0.0)
    zero_centred_norms: bool = knob(False, doc="Weights of norms begin at 0 and are added to 1 (Qwen3-Next).")
    norm_position: Literal["pre", "post", "sandwich"] = knob(
        "pre",
        doc="Norms of a layer: of the inputs of attention and feed-forward network, of their outputs (OLMo 2), or of "
        "both (Gemma 2, GLM-4).",
    )
    embedding_scale: float = knob(1.0, doc="Factor on embeddings (Granite, Gemma).", low=0.0)
    residual_scale: float = knob(1.0, doc="Factor on what a layer adds to the residual stream (Granite).", low=0.0)
    hyper_connections: HyperConnections | None = knob(
        None, doc="Several residual streams; none: one, to which a layer adds."
    )
    logits_scaling: float = knob(1.0, doc="Divisor of logits (Granite).", low=1e-9)
    tie_word_embeddings: bool = knob(False, doc="Output projection shares the embedding's weights.")
    initializer_range: float = knob(0.02, doc="Standard deviation of initial weights.", low=0.0)

    def is_linear(self, layer: int) -> bool:
        """Whether the layer of this number, from 0, has linear attention; multi-token prediction has none."""
        linear = self.linear_attention
        if linear is None or layer >= self.layers or (linear.full_last and layer == self.layers - 1):
            return False
        return linear.full_every == 0 or (layer + 1) % linear.full_every != 0

    def is_dense(self, layer: int) -> bool:
        """Whether the layer of this number, from 0, has no experts; multi-token prediction comes last."""
        if self.moe is None or layer < self.dense_layers:
            return True
        # From `layers` on it is multi-token prediction, which has experts.
        return layer < self.layers and (layer - self.dense_layers + 1) % self.moe.moe_layer_freq != 0

    def is_hashed(self, layer: int) -> bool:
        """Whether the experts of this layer, numbered from 0, are chosen by a table of token ids."""
        if self.moe is None or self.is_dense(layer) or layer >= self.layers:
            return False
        return (layer - self.dense_layers) // self.moe.moe_layer_freq < self.moe.router.num_hash_layers

    @property
    def residual_size(self) -> int:
        """Width of what layers and pipeline stages pass on: of all residual streams."""
        return self.hidden_size * (1 if self.hyper_connections is None else self.hyper_connections.streams)

    @property
    def projections(self) -> int:
        """Projections of a feed-forward network before its activation: gate and up, or one."""
        return 1 if self.hidden_act == "relu2" else 2

    @property
    def moe_layers(self) -> int:
        """Decoder layers with experts, without multi-token prediction."""
        return 0 if self.moe is None else (self.layers - self.dense_layers) // self.moe.moe_layer_freq


def warms_indexer_up(model: Model) -> bool:
    """Whether only the indexer of sparse attention learns, from dense attention."""
    attention = model.attention
    return (
        isinstance(attention, LatentAttention) and attention.indexer is not None and attention.indexer.stage == "dense"
    )
