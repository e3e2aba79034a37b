"""Random compositions: a model and a layout.

`DIMENSIONS` is the table of what is drawn by itself: how often, which alternatives, and for which models. What depends
on each other is drawn by the functions below it: sizes and ranks, attention, experts, the layout. Values are drawn so
that rules refuse few.

On GPUs models are wider and rows longer, because kernels are made for that, and the layout chooses kernels and captured
graphs as well; the one process computes the definitions of all kernels.
"""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from penstock.config.load import load_run
from penstock.config.model import GroupedQueryAttention, LatentAttention, Model
from penstock.config.parallel import DISPATCHERS, OFFLOADABLE, RECOMPUTABLE
from penstock.prove.composition import (
    BF16,
    FAMILIES,
    FEWER_BITS,
    IN_ORDER,
    LABELS,
    PRESET,
    SCALES,
    THEN,
    WEIGHTS,
    Composition,
    Device,
    Setting,
    base_of,
    family_overrides,
    is_of_layout,
    refusal,
)

MODELS_SHARE = 6  # layouts that are drawn for one model, whose single process trains once
LAYOUTS_TRIED = 3  # until one is legal: rules refuse the rest, which tests them
FAMILY_SHARE, THEN_SHARE = 0.25, 0.08  # draws with the model of a family, and those that go on in another layout

RANKS: Mapping[int, Mapping[int, int]] = MappingProxyType(
    {4: {1: 4, 2: 50, 4: 40, 8: 6}, 3: {3: 90, 1: 10}, 5: {5: 90, 1: 10}, 6: {6: 50, 3: 25, 2: 25}}
)
"""How many of a hundred draws have so many ranks, by the factor of rows, positions, heads and experts of a model."""

FACTORS: Mapping[int, int] = MappingProxyType({4: 85, 3: 6, 5: 4, 6: 5})
"""How many of a hundred models have which factor."""

BACKENDS = ("triton", "cudnn", "flash", "efficient")  # of attention on a GPU in 16 bits
RECIPES = ("blockwise", "blockwise-square", "tensorwise", "rowwise")  # of every GPU with products in 8 bits


@dataclass(frozen=True)
class Dimension:
    """Alternatives of which one is drawn in a share of the draws; `<16>` stands for 16 times the scale of widths."""

    share: float
    options: tuple[Setting, ...]
    needs: tuple[str, ...] = ()  # facts of a model that must hold
    lacks: tuple[str, ...] = ()  # and those that must not


def _each(path: str, *values: object) -> tuple[Setting, ...]:
    return tuple((f"{path}={value}",) for value in values)


def _fields(section: str, **values: object) -> Setting:
    toml = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return tuple(f"{section}.{name}={value}" for name, value in toml.items())


_PARTS = '{code={source="standard-library",weight=0.7},more={source="standard-library",weight=0.3}}'

DIMENSIONS: Mapping[str, Dimension] = MappingProxyType(
    {
        # The model.
        "tied": Dimension(0.15, _each("model.tie_word_embeddings", "true"), lacks=("family",)),
        "activation": Dimension(0.15, _each("model.hidden_act", "relu2"), lacks=("clamped", "family")),
        "centred": Dimension(0.1, _each("model.zero_centred_norms", "true"), lacks=("family",)),
        "theta": Dimension(0.15, _each("model.attention.rope.theta", 100.0, 5e5), lacks=("unrotated",)),
        "context": Dimension(
            0.2,
            (
                ("model.attention.rope.yarn={factor=4.0, original_max_position_embeddings=<8>}",),
                ("model.attention.rope.yarn={factor=8.0, original_max_position_embeddings=<8>, truncate=false}",),
                (
                    "model.attention.rope.yarn={factor=2.0, original_max_position_embeddings=<8>}",
                    "model.attention.rope.yarn.mscale=0.7",
                    "model.attention.rope.yarn.mscale_all_dim=0.7",
                ),
                ("model.attention.rope.llama3={factor=4.0, original_max_position_embeddings=<8>}",),
            ),
            lacks=("family", "unrotated"),
        ),
        "vocabulary": Dimension(0.1, _each("model.vocab_size", 61, 67), lacks=("text", "cuda", "family")),
        "width": Dimension(0.1, _each("model.hidden_size", 36, 40, 44), lacks=("float8", "cuda", "family")),
        "experts' width": Dimension(
            0.1, _each("model.moe.moe_intermediate_size", 12, 20), needs=("moe",), lacks=("cuda", "family")
        ),
        # Data and losses.
        "documents": Dimension(0.25, _each("data.document_mask", "true")),
        "order": Dimension(0.15, _each("data.shuffle", "true")),
        "labels": Dimension(0.08, ((LABELS,),)),
        "prediction": Dimension(0.5, _each("training.mtp_weight", 0.0, 0.1, 1.0), needs=("mtp",)),
        "z-loss": Dimension(0.3, _each("training.z_loss_coef", 0.001)),
        "rate of the bias": Dimension(0.5, _each("model.moe.router.expert_bias_rate", 0.0, 0.01, 0.1), needs=("bias",)),
        # Steps.
        "clipping": Dimension(0.15, _each("training.clip_norm", 0.1)),
        "schedule": Dimension(
            0.15,
            (
                ("training.steps=4", "schedule.warmup_steps=3"),
                ("training.steps=5", "schedule.warmup_steps=2", "schedule.decay=cosine"),
                ("training.steps=4", "schedule.decay=linear", "schedule.final_ratio=0.0"),
                ("training.steps=4", "schedule.warmup_steps=1", "schedule.decay=wsd", "schedule.decay_steps=2"),
            ),
        ),
        "decay": Dimension(0.1, _each("optimizer.weight_decay", 0.0, 1.0)),
        "held out": Dimension(0.2, _each("evaluation.rows", 4)),
        "weights": Dimension(0.1, ((WEIGHTS[1],),)),
        "experts' format": Dimension(
            0.05,
            (("qat.experts=mxfp4", "model.hidden_size=<32>", "model.moe.moe_intermediate_size=<64>"),),
            needs=("moe",),
            lacks=("float8-experts", "cuda", "family"),
        ),
        "weights of files": Dimension(0.25, ((WEIGHTS[0],),), needs=("family",)),
        "streams": Dimension(0.1, _each("model.hyper_connections.streams", 2, 3), lacks=("mtp", "family")),
    }
)
"""What is drawn by itself."""


def draw(seed: int, number: int, gpus: int = 0) -> Composition:
    """The composition of this number; `MODELS_SHARE` neighbours have the same model. `gpus` 0 is for CPU ranks."""
    device: Device = "cuda" if gpus else "cpu"
    model = _Draw(random.Random(f"{seed} {number // MODELS_SHARE} model"), SCALES[device])
    _model(model, device)
    if gpus:
        model.numbers = random.Random(f"{seed} {number // MODELS_SHARE} precision")
        _precision(model)
    for attempt in range(LAYOUTS_TRIED):
        layout = _Draw(random.Random(f"{seed} {number} layout {attempt}"), SCALES[device])
        layout.facts = dict(model.facts)
        ranks = _ranks(layout, gpus)
        _layout(layout, ranks)
        drawn = Composition(ranks, tuple(model.settings + layout.settings), device)
        if refusal(drawn) is None:
            break
    if layout.chance(THEN_SHARE) and (then := _then(drawn, layout, model.facts, gpus)) is not None:
        return then
    if not gpus:
        return drawn
    layout.numbers = random.Random(f"{seed} {number} kernels")
    in_float32 = BF16 not in model.settings
    if not (in_float32 and layout.facts.get("indexer")):
        layout.maybe(0.4, f"kernels.all={layout.word('triton', 'triton', 'triton' if in_float32 else 'torch')}")
    layout.maybe(0.3, f"kernels.attention={'efficient' if in_float32 else layout.word(*BACKENDS)}")
    drawn = Composition(ranks, tuple(model.settings + layout.settings), device)
    return (_with_graphs(drawn, layout.numbers) if layout.chance(0.25) else None) or drawn


def _ranks(draw: "_Draw", gpus: int) -> int:
    shares = {n: share for n, share in RANKS[draw.facts["factor"]].items() if not gpus or n <= gpus}
    return draw.numbers.choices([*shares], [*shares.values()])[0]


def _then(drawn: Composition, layout: "_Draw", facts: Mapping[str, int], gpus: int) -> Composition | None:
    """The same, whose second half of the steps runs in another layout; None if that one is illegal."""
    other = _Draw(layout.numbers, layout.scale)
    other.facts = dict(facts)
    ranks = _ranks(other, gpus)
    _layout(other, ranks)
    # Bounds follow the settings of the first layout, so the other one rounds to no fewer bits.
    of_layout = (word for setting in other.settings for word in setting if is_of_layout(word))
    settings = (word.replace(" ", "") for word in of_layout if not word.startswith(FEWER_BITS))
    then = drawn.plus(f"{THEN}{' '.join((str(ranks), *settings))}")
    return then if refusal(drawn) is None and refusal(then) is None else None


def draw_graphs(seed: int, number: int, gpus: int) -> Composition:
    """The draw of this number with graphs, in bfloat16, and with as few micro-batches as its layout can have.

    Graphs need a GPU's kernels, which have 16 bits, and memory that stays: neither pipelines nor full sharding.
    """
    drawn = draw(seed, number, gpus).eager()
    left = ("training.global_batch=8", "training.micro_batch=", IN_ORDER, THEN, *BF16)
    left += ("kernels.all=torch", "kernels.attention=flash")
    left += ("parallel.pipeline=", "parallel.shard=full", "dispatch.overlap=passes")
    settings = tuple(setting for setting in drawn.settings if not setting[0].startswith(left))
    eager = replace(drawn, settings=settings).plus(*BF16)
    eager = eager.plus("training.micro_batch=2", f"training.global_batch={2 * drawn.ranks}")
    captured = _with_graphs(eager, random.Random(f"{seed} {number} graphs"))
    return captured or eager.plus("graphs.capture=full", IN_ORDER)


def _with_graphs(drawn: Composition, numbers: random.Random) -> Composition | None:
    """The same with graphs of one kind or the other, if need be without offload and recomputation; None if illegal."""
    kinds = numbers.sample(("full", "partial"), 2)
    in_order = tuple(setting for setting in drawn.settings if setting[0] != "kernels.attention=cudnn")
    on_device = tuple(setting for setting in in_order if not setting[0].startswith(("offload.", "recompute.")))
    tries = [
        replace(drawn, settings=settings).plus(f"graphs.capture={kind}", IN_ORDER)
        for settings in (in_order, on_device)
        for kind in kinds
    ]
    return next((attempt for attempt in tries if refusal(attempt) is None), None)


class _Draw:
    def __init__(self, numbers: random.Random, scale: int) -> None:
        self.numbers = numbers
        self.scale = scale  # of widths and positions
        self.settings: list[Setting] = []
        self.facts: dict[str, int] = {}  # what later settings depend on

    def any(self, *values: int) -> int:
        return self.numbers.choice(values)

    def word(self, *values: str) -> str:
        return self.numbers.choice(values)

    def chance(self, share: float) -> bool:
        return self.numbers.random() < share

    def add(self, *overrides: str) -> None:
        self.settings.append(overrides)

    def draw(self, dimension: Dimension) -> None:
        """One of its alternatives, in its share of the models that it is for."""
        fits = all(self.facts.get(fact) for fact in dimension.needs)
        if fits and not any(self.facts.get(fact) for fact in dimension.lacks) and self.chance(dimension.share):
            option = self.numbers.choice(dimension.options)
            self.add(*(re.sub(r"<(\d+)>", lambda size: str(int(size[1]) * self.scale), word) for word in option))

    def maybe(self, share: float, *overrides: str) -> bool:
        """Add a setting in this share of draws."""
        is_added = self.chance(share)
        if is_added:
            self.add(*overrides)
        return is_added


def _model(draw: _Draw, device: Device) -> None:
    """Everything that one process has too."""
    facts = draw.facts
    facts["factor"] = draw.numbers.choices([*FACTORS], [*FACTORS.values()])[0] if device == "cpu" else 4
    facts[device] = 1
    if facts["factor"] == 4 and draw.chance(FAMILY_SHARE):
        _family(draw, device)
    else:
        is_dense = draw.chance(0.06)
        layers = draw.any(1, 1, 2, 2, 2, 3, 4)
        first_dense = layers if is_dense else draw.any(*range(min(2, layers)))
        draw.add("model.family=plain", f"model.layers={layers}", f"model.dense_layers={first_dense}")
        facts |= {"layers": layers, "dense": first_dense, "moe": int(not is_dense)}
        _sizes(draw)
        _attention(draw, layers)
        if is_dense:
            draw.add("model.moe=none")
        else:
            _experts(draw, layers - first_dense)
        if draw.chance(0.3):
            facts["mtp"] = draw.any(1, 1, 2)
            draw.add(f"model.mtp_layers={facts['mtp']}")
    if draw.chance(0.06):
        facts["text"] = 1
        mixture = [f"data.mixture={_PARTS}"] if draw.chance(0.5) else []
        draw.add("data.source=standard-library", *mixture, f"model.vocab_size={264 if draw.scale == 1 else 512}")
    if draw.maybe(0.3, "training.micro_batch=2"):
        facts["micro"] = 2
    if draw.chance(0.4) or facts.get("micro"):
        draw.add(f"training.global_batch={2 * facts['factor']}")
    if draw.maybe(0.1, "training.precision=bf16"):
        draw.maybe(0.3, "optimizer.store_param_remainders=true")
    _formats(draw)
    for dimension in DIMENSIONS.values():
        draw.draw(dimension)


def _sizes(draw: _Draw) -> None:
    """Rows, positions and widths that the factor of the ranks divides; heads are drawn with attention."""
    factor, scale = draw.facts["factor"], draw.scale
    positions = {4: 16, 3: 24, 5: 20, 6: 24}[factor] * scale * (2 if draw.chance(0.2) else 1)
    if factor == 4 and positions == 16 * scale:
        return
    sizes = [f"training.sequence_length={positions}"]
    if factor != 4:
        width, vocabulary = (20, 65) if factor == 5 else (24, 66)
        sizes += [f"training.global_batch={factor}"]
        sizes += _fields("model", vocab_size=vocabulary, intermediate_size=2 * width)
        sizes += _fields("model.moe", moe_intermediate_size=width, shared_expert_intermediate_size=width)
    draw.add(*sizes)


def _family(draw: _Draw, device: Device) -> None:
    """The model of a preset in small, and what later settings depend on in it."""
    base = load_run(PRESET, base_of(device)).model
    overrides = family_overrides(draw.word(*FAMILIES), base, draw.scale, base.initializer_range)
    draw.add(*overrides)
    model = load_run(PRESET, (*base_of(device), *overrides), is_whole=False).model
    draw.facts |= _facts_of(model)
    balance = "model.moe.balance."
    if model.moe is not None and draw.chance(0.5):
        draw.add(f"{balance}aux_loss=sequence", f"{balance}aux_loss_coef=0.01", f"{balance}z_loss_coef=0.001")
        draw.facts |= {"global-batch": 0, "micro-batch": 0}


def _facts_of(model: Model) -> dict[str, int]:
    moe, attention = model.moe, model.attention
    facts = {"family": 1, "layers": model.layers, "dense": model.dense_layers, "mtp": model.mtp_layers}
    facts["moe"] = int(moe is not None)
    if isinstance(attention, LatentAttention):
        facts |= {"latent": 1, "indexer": int(attention.indexer is not None), "unrotated": int(not attention.rotary)}
    if isinstance(attention, GroupedQueryAttention) and attention.local is not None:
        facts["local"] = 1
    if moe is not None:
        coefficient = bool(moe.balance.aux_loss_coef)
        facts |= {"experts": moe.experts, "shared": int(moe.shared_expert_intermediate_size > 0)}
        facts |= {"clamped": int(moe.clamped is not None), "bias": int(moe.router.expert_bias)}
        facts |= {kind: int(coefficient and moe.balance.aux_loss == kind) for kind in ("global-batch", "micro-batch")}
        facts["all-experts"] = int(moe.top_k == moe.experts)
    return facts


def _formats(draw: _Draw) -> None:
    """Formats of products and moments, or Muon, whose step would enlarge their rounding."""
    is_low = draw.maybe(0.05, f"optimizer.moment_dtype={draw.word('bf16', 'int8')}")
    in_8_bits = draw.maybe(0.04, "float8.dense=blockwise")
    if draw.facts["moe"] and draw.maybe(0.04, "float8.experts=blockwise"):
        in_8_bits, draw.facts["float8-experts"] = True, 1
    if in_8_bits:
        draw.facts["float8"] = 1
        if draw.facts["layers"] > 1:
            draw.maybe(0.4, f"float8.{draw.word('first', 'last')}_layers=1")
    is_low |= in_8_bits
    if not is_low and BF16 not in draw.settings and draw.chance(0.16):
        draw.add("optimizer.method=muon", "optimizer.muon.precision=fp32")
        draw.maybe(0.3, "optimizer.muon.qk_clip=0.05")
    else:
        draw.maybe(0.04, "float8.head=blockwise")


def _attention(draw: _Draw, layers: int) -> None:
    """Latent attention, grouped queries with what families add, or linear attention between."""
    heads = {4: draw.any(4, 4, 4, 4, 3, 6), 3: 6, 5: 5, 6: 6}[draw.facts["factor"]]
    if draw.chance(0.4):
        draw.facts["latent"] = 1
        if heads != 4:
            draw.add(f"model.attention.heads={heads}")
        widths = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8 * draw.scale)
        draw.add(*_fields("model.attention", kv_lora_rank=16 * draw.scale, **widths))
        has_query = draw.maybe(0.4, f"model.attention.q_lora_rank={16 * draw.scale}")
        if has_query and draw.chance(0.25):
            draw.facts["indexer"] = 1
            sizes = f"index_n_heads=2, index_head_dim={8 * draw.scale}, index_topk={6 * draw.scale}"
            draw.add(f"model.attention.indexer={{{sizes}}}")
        else:
            draw.maybe(0.2, "model.attention.sinks=true")
        return
    kv_heads = draw.any(*(divisor for divisor in range(1, heads + 1) if heads % divisor == 0))
    draw.add(*_fields("model.attention", kind="gqa", heads=heads, head_dim=8 * draw.scale, kv_heads=kv_heads))
    kind = draw.word("none", "none", "head", "projection", "rotated-head", "weighted-rotated-head")
    if kind != "none":
        draw.add(f"model.attention.qk_norm={kind}")
    draw.maybe(0.15, "model.attention.bias=true") or draw.maybe(0.15, "model.attention.qkv_bias=true")
    draw.maybe(0.15, "model.attention.partial_rotary_factor=0.5")
    draw.maybe(0.2, "model.attention.sinks=true")
    draw.maybe(0.15, "model.attention.output_gate=true")
    if draw.chance(0.3):
        every = draw.any(0, 2)
        kind = draw.word("window", "chunk")
        has_more, floor = every and draw.chance(0.4), 5 * draw.scale
        extra = f", global_rope=false, global_temperature=0.3, temperature_floor={floor}" if has_more else ""
        size = draw.any(5, 6, 9) * draw.scale
        draw.add(f'model.attention.local={{kind="{kind}", size={size}, global_every={every}{extra}}}')
    if draw.facts["factor"] == 4 and draw.chance(0.2):
        kind, values = draw.numbers.choice((("gdn", 4), ("gdn", 8), ("kda", 4)))
        last = f"full_every=2, full_last={str(draw.chance(0.5)).lower()}"
        sizes = f"key_heads=4, value_heads={values}, key_head_dim={8 * draw.scale}, value_head_dim={8 * draw.scale}"
        draw.add(f'model.linear_attention={{kind="{kind}", {sizes}, {last}}}')


def _experts(draw: _Draw, layers: int) -> None:
    """Experts, router, balance."""
    experts = draw.any(*{4: (4, 8, 8, 8, 6), 3: (3, 6, 9), 5: (5, 10), 6: (6, 12)}[draw.facts["factor"]])
    groups = experts == 8 and draw.chance(0.25)
    top_k = draw.any(1, 2, 2, 2, 3) if not groups else 2
    draw.facts["experts"] = experts
    draw.add(*_fields("model.moe", experts=experts, top_k=top_k))
    if layers > 1:
        draw.maybe(0.15, "model.moe.moe_layer_freq=2")
    if draw.chance(0.5):
        draw.facts["shared"] = 1
        draw.maybe(0.25, "model.moe.shared_expert_gate=true")
    else:
        draw.add("model.moe.shared_expert_intermediate_size=0")
    has_bias = _router(draw, top_k, groups=groups)
    draw.maybe(0.15, "model.moe.router.apply_probs_on_input=true") or draw.maybe(0.2, "model.moe.bias=true")
    if draw.chance(0.2):
        draw.facts["clamped"], offset = 1, draw.any(0, 1)
        draw.add(f"model.moe.clamped={{alpha=1.702, limit=0.5, up_offset={offset}}}")
        if draw.chance(0.5) and draw.facts.get("shared"):
            draw.add("model.moe.clamp_shared=true")
    draw.maybe(0.15, "model.moe.router.num_hash_layers=1")
    _balance(draw, has_bias=has_bias and not groups and top_k < experts)


def _router(draw: _Draw, top_k: int, *, groups: bool) -> bool:
    """How experts are chosen; returns whether a bias takes part."""
    score = draw.word("softmax", "sigmoid", "sqrt-softplus")
    router: dict[str, object] = {"scoring_func": score, "norm_topk_prob": top_k > 1 and draw.chance(0.5)}
    if score == "softmax" and top_k > 1 and draw.chance(0.4):
        router["softmax_after_top_k"] = True
    router["expert_bias"] = has_bias = draw.chance(0.5)
    draw.facts["bias"] = int(has_bias)
    draw.add(*_fields("model.moe.router", **router))
    if groups:
        draw.add(*_fields("model.moe.router", n_group=4, topk_group=2, group_score=draw.word("max", "top2")))
    draw.maybe(0.2, "model.moe.router.routed_scaling_factor=2.5")
    draw.maybe(0.15, "model.moe.router.logit_bias=true")
    return has_bias


def _balance(draw: _Draw, *, has_bias: bool) -> None:
    global_batch = "sequence" if draw.facts.get("indexer") else "global-batch"  # it leaves no data-parallel ranks
    kind = draw.word("none", "sequence", "sequence", "micro-batch", global_batch)
    prefix = "model.moe.balance"
    draw.add(f"{prefix}.aux_loss={kind}", f"{prefix}.aux_loss_coef={0 if kind == 'none' else 0.01}")
    draw.facts |= {"global-batch": int(kind == "global-batch"), "micro-batch": int(kind == "micro-batch")}
    draw.maybe(0.4, f"{prefix}.z_loss_coef=0.001")
    if has_bias:
        draw.maybe(0.2, f"{prefix}.bias_rule=quantile")
    if draw.chance(0.15):
        padded = draw.chance(0.4)
        draw.facts |= {"capacity": 1, "padded": int(padded)}
        factor = draw.word("1.0", "1.1")
        draw.add(f"{prefix}.capacity_factor={factor}", *([f"{prefix}.pad_to_capacity=true"] * padded))


def _layout(draw: _Draw, ranks: int) -> None:
    """Everything that one process does not have."""
    draw.facts["ranks"] = ranks
    pipeline = _factor(draw, ranks, 0.3)
    can_share_rows = not draw.facts.get("indexer")
    tensor = _factor(draw, ranks // pipeline, 0.3) if can_share_rows else 1
    context = _factor(draw, ranks // pipeline // tensor, 0.3) if can_share_rows else 1
    if draw.facts.get("global-batch"):
        context = ranks // pipeline // tensor
    data = ranks // pipeline // tensor // context
    if tensor > 1:
        draw.add(f"parallel.tensor={tensor}")
    if context > 1:
        method = draw.word("auto", "all-gather", "ulysses")
        draw.add(*_fields("parallel", context=context, context_method=method))
    _shard(draw, data * context)
    if pipeline > 1:
        _pipeline(draw, pipeline)
    if draw.facts["moe"]:
        _expert_ranks(draw, ranks // pipeline)
        _overlap(draw)
    _memory(draw)


def _factor(draw: _Draw, ranks: int, share: float) -> int:
    """A divisor of the ranks, above 1 in this share of draws."""
    if ranks == 1 or not draw.chance(share):
        return 1
    return draw.any(*(size for size in range(2, ranks + 1) if ranks % size == 0 and size < 8))


def _shard(draw: _Draw, copies: int) -> None:
    if copies == 1:
        return
    kind = draw.word("none", "optimizer", "optimizer", "full", "full")
    setting = [f"parallel.shard={kind}"]
    if kind != "none" and copies == 4 and draw.chance(0.3):
        setting.append("parallel.shard_size=2")
    if kind == "full":
        setting += _fields("parallel", reshard=draw.word("forward", "backward"), prefetch=draw.any(0, 1, 2))
    draw.add(*setting)
    draw.facts["full"] = int(kind == "full")
    if kind == "full" and draw.facts.get("float8"):
        draw.maybe(0.5, "float8.gather=true")
    draw.maybe(0.04, "parallel.reduce=bf16")


def _pipeline(draw: _Draw, ranks: int) -> None:
    whole = ("gpipe", "1f1b", "interleaved")
    split = () if draw.facts.get("full") else ("zb-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v")
    schedule = draw.word(*whole, *split)
    stages = {"gpipe": 1, "1f1b": 1, "zb-1f1b": 1}.get(schedule, 2)
    short = ranks * stages - 2 - draw.facts["layers"]  # the embedding and the head are stages too
    if short > 0 and draw.facts["moe"] and draw.chance(0.5):
        draw.add(f"model.layers={draw.facts['layers'] + short}")
    elif short > 0:
        schedule, stages = ("1f1b", 1) if draw.facts.get("full") else (draw.word("1f1b", "zb-1f1b", "gpipe"), 1)
    draw.add(f"parallel.pipeline={ranks}", *_fields("pipeline", schedule=schedule, stages_per_rank=stages))
    draw.facts["passes"] = int(schedule in ("interleaved", "dualpipe-v") and not draw.facts.get("full"))


def _expert_ranks(draw: _Draw, ranks: int) -> None:
    """How ranks share experts, and how tokens reach them."""
    experts = draw.facts["experts"]
    expert = draw.any(*(size for size in range(1, ranks + 1) if ranks % size == 0 and experts % size == 0), ranks)
    expert = expert if experts % expert == 0 else 1
    expert_tensor = _factor(draw, ranks // expert, 0.3)
    if expert == expert_tensor == 1:
        return
    sizes = {"expert": expert, "expert_tensor": expert_tensor}
    draw.add(*_fields("parallel", **{name: size for name, size in sizes.items() if size > 1}))
    method = draw.word("auto", *(name for name in DISPATCHERS if name != "symmetric"))  # that one needs GPUs
    method = "auto" if draw.facts.get("padded") else method
    stage = draw.any(0, 1) if method == "all-to-all" else draw.any(0, 1, 2, 3)
    factor = ["dispatch.row_capacity_factor=1.0"] if stage == 2 and draw.chance(0.4) else []
    draw.add(f"dispatch.method={method}", f"dispatch.sync_free={stage}", *factor)
    if expert > 1:
        _between_expert_ranks(draw, method)


def _between_expert_ranks(draw: _Draw, method: str) -> None:
    """Rows in 8 bits, and replicas of experts."""
    if draw.facts.get("float8-experts"):
        draw.maybe(0.5, "float8.dispatch=blockwise")
    if method != "hierarchical" and not draw.facts.get("padded") and draw.chance(0.3):
        bounded = ("dispatch.balance=bounded", "dispatch.balance_rows=4", "dispatch.balance_tolerance=0.02")
        auto = ("dispatch.balance=auto", "dispatch.balance_rows=4")
        draw.add(*draw.numbers.choice([bounded, auto, ("dispatch.balance=exact",)]))


def _overlap(draw: _Draw) -> None:
    kinds = ["shared"] if draw.facts.get("shared") else []
    if draw.facts.get("passes"):
        kinds += ["passes"] * 2
    if kinds and draw.chance(0.5):
        draw.facts["overlap"] = 1
        draw.add(f"dispatch.overlap={draw.word(*kinds)}")


def _memory(draw: _Draw) -> None:
    """Recomputation and offload."""
    facts = draw.facts
    missing = {
        "latent-up": not facts.get("latent"),
        "shared-expert": not facts.get("shared"),
        "dense": not facts["dense"],
        "expert-activation": not facts["moe"],
        "moe": not facts["moe"] or facts.get("overlap"),
        "layer": facts.get("overlap"),
    }
    if draw.chance(0.35):
        there = [name for name in RECOMPUTABLE if not missing.get(name)]
        names = draw.numbers.sample(there, draw.any(1, 1, 2, min(3, len(there))))
        where = []
        if facts["layers"] > 1 and draw.chance(0.2):
            where = [f"recompute.layers=[{draw.any(*range(facts['layers']))}]"]
        draw.add(f"recompute.modules={json.dumps(names)}", *where)
    if draw.chance(0.15):
        there = [name for name in OFFLOADABLE if not missing.get(name)]
        draw.add(f"offload.activations={json.dumps(draw.numbers.sample(there, 1))}")
    on_host = draw.maybe(0.12, "offload.optimizer=true")
    if facts["ranks"] == 1:  # a rule: sums on the host are not summed over ranks
        draw.maybe(0.3, "offload.gradients=true", *([] if on_host else ["offload.optimizer=true"]))


def _precision(draw: _Draw) -> None:
    """What GPUs compute in: mostly bfloat16, and products in 8 bits by all recipes."""
    if any(setting[0] == "optimizer.method=muon" for setting in draw.settings):
        return
    is_float8 = any(setting[0].startswith("float8.") for setting in draw.settings)
    if not is_float8:
        is_float8 = draw.maybe(0.15, f"float8.dense={draw.word(*RECIPES)}")
        is_float8 |= bool(draw.facts["moe"]) and draw.maybe(0.15, f"float8.experts={draw.word(*RECIPES)}")
    if BF16 not in draw.settings and (is_float8 or draw.chance(0.75)):
        draw.add("training.precision=bf16")
