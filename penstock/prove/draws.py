"""Random compositions: a model, and a layout that trains it.

A composition is a list of settings. A setting is one or several overrides that mean something together, such as a
pipeline with its schedule and stages. Settings of the model, batch, data and optimizer hold for one process too;
settings of the layout do not. Values are drawn so that rules refuse few; which are legal is for the rules to say.

On GPUs models are wider and rows longer, because kernels are made for that, and the layout chooses kernels and captured
graphs as well; the one process computes the definitions of all kernels.
"""

import random
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from penstock.base.errors import PenstockError
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.model import LatentAttention
from penstock.config.parallel import DISPATCHERS, OFFLOADABLE, RECOMPUTABLE
from penstock.config.run import Run

Setting = tuple[str, ...]

PRESET = "debug"

Device = Literal["cpu", "cuda"]

SCALES: Mapping[Device, int] = MappingProxyType({"cpu": 1, "cuda": 8})
"""Factor of widths and positions of all models."""

DEFINITIONS = ("kernels.all=reference", "kernels.attention=math")
"""Of the one process on a GPU; a CPU has no other kernels."""

OF_LAYOUT = ("parallel", "dispatch", "pipeline", "recompute", "offload", "kernels", "graphs")
"""Sections that one process does not have. The others are the model's."""

IN_ORDER = "training.deterministic=true"
"""Goes with `graphs.capture`, whose replays must give the bits of eager passes. One process does not need it."""

MODELS_SHARE = 6
"""Layouts that are drawn for one model, whose single process trains once."""

RANKS: Mapping[int, int] = MappingProxyType({1: 4, 2: 50, 4: 40, 8: 6})
"""How many of a hundred draws have so many ranks."""

BF16: Setting = ("training.precision=bf16",)

BACKENDS = ("triton", "cudnn", "flash", "efficient")
"""Of attention on a GPU in 16 bits."""

RECIPES = ("blockwise", "blockwise-square", "tensorwise", "rowwise")
"""Of 8-bit products that every GPU with 8 bits has."""


def base_of(device: Device) -> tuple[str, ...]:
    """The overrides of PRESET that all compositions have.

    AdamW with a small epsilon makes full steps of gradients that are zero but for rounding.
    """
    scale = SCALES[device]
    return (
        *("data.source=synthetic-learnable", "data.shuffle=false", f"model.vocab_size={64 * scale}", "model.layers=2"),
        *(f"model.hidden_size={32 * scale}", f"model.intermediate_size={48 * scale}"),
        *(f"model.initializer_range={0.1 / scale**0.5:.2g}", f"model.moe.moe_intermediate_size={16 * scale}"),
        f"model.moe.shared_expert_intermediate_size={16 * scale}",
        *(f"training.sequence_length={16 * scale}", "training.global_batch=4", "training.micro_batch=1"),
        *("optimizer.epsilon=1e-3", "schedule.warmup_steps=0", "evaluation.rows=0", "checkpoint.enabled=false"),
        f"device={device}",
    )


FEWER_BITS = (
    *("training.precision=", "parallel.reduce=", "float8."),
    *("optimizer.moment_dtype=", "optimizer.store_param_remainders="),
)
"""Beginnings of overrides by which something is rounded to fewer bits."""


@dataclass(frozen=True)
class Composition:
    """A model and a layout."""

    ranks: int
    settings: tuple[Setting, ...]
    device: Device = "cpu"

    @property
    def overrides(self) -> tuple[str, ...]:
        """All overrides of the base."""
        return tuple(override for setting in self.settings for override in setting)

    @property
    def alone(self) -> tuple[str, ...]:
        """Those that hold for one process too, and the definitions of its kernels."""
        definitions = DEFINITIONS if self.device == "cuda" else ()
        return (*(one for one in self.overrides if not is_of_layout(one)), *definitions)

    @property
    def command(self) -> str:
        """The command that plays it."""
        device = [] if self.device == "cpu" else ["--device", self.device]
        return shlex.join(["penstock", "prove", *device, "--processes", str(self.ranks), *self.overrides])

    @property
    def capture(self) -> str:
        """What graphs hold; empty for eager passes."""
        found = [one for one in self.overrides if one.startswith("graphs.capture=")]
        return found[-1].partition("=")[2].replace("none", "") if found else ""

    @property
    def run(self) -> Run:
        """The run of its ranks. Raises a ConfigError."""
        return load_run(PRESET, base_of(self.device) + self.overrides)

    def eager(self) -> "Composition":
        """The same without graphs."""
        kept = [tuple(one for one in setting if not one.startswith("graphs.")) for setting in self.settings]
        return replace(self, settings=tuple(setting for setting in kept if setting))

    def plus(self, *overrides: str) -> "Composition":
        """The same with one setting more."""
        return replace(self, settings=(*self.settings, overrides))


def is_of_layout(override: str) -> bool:
    """Whether one process lacks it."""
    return override.partition(".")[0] in OF_LAYOUT or override == IN_ORDER


def composition_of(ranks: int, overrides: Sequence[str], device: Device = "cpu") -> Composition:
    """A composition of overrides, each a setting."""
    return Composition(ranks, tuple((one,) for one in overrides), device)


def refusal(composition: Composition) -> str | None:
    """The line with which rules refuse a composition, or why it need not equal one process; else None."""
    try:
        run = composition.run
        grid = grid_of(run, composition.ranks)
    except PenstockError as error:
        return str(error)
    balance = None if run.model.moe is None else run.model.moe.balance
    if balance is not None and balance.aux_loss == "global-batch" and balance.aux_loss_coef and grid.data > 1:
        return "model.moe.balance.aux_loss global-batch depends on the number of data-parallel ranks by definition"
    cut = [grid.tensor] if (run.float8.dense, run.float8.head) != ("none", "none") else []
    cut += [grid.expert_tensor] if run.float8.experts != "none" else []
    if max(cut, default=1) > 1:
        return "tensor parallelism cuts the blocks that float8 quantizes, in rows as short as these"
    return None


def with_another_clamp(composition: Composition) -> Composition | None:
    """The composition with a slightly higher limit of clamped activations; None if nothing is clamped."""
    moe = composition.run.model.moe
    if moe is None or moe.clamped is None:
        return None
    return composition.plus(f"model.moe.clamped.limit={moe.clamped.limit * 1.001:.6g}")


def with_all_keys(composition: Composition) -> Composition | None:
    """The composition with an indexer that chooses every key; None if there is no indexer."""
    run = composition.run
    attention = run.model.attention
    if not isinstance(attention, LatentAttention) or attention.indexer is None:
        return None
    return composition.plus(f"model.attention.indexer.index_topk={run.training.sequence_length}")


def with_steps_of_bias(composition: Composition) -> Composition | None:
    """The composition whose routers' bias moves by a fixed step; None if it does not move by quantiles."""
    moe = composition.run.model.moe
    if moe is None or moe.balance.bias_rule != "quantile":
        return None
    return composition.plus("model.moe.balance.bias_rule=sign")


def in_float32(composition: Composition) -> Composition | None:
    """The composition with nothing rounded to fewer bits; None on GPUs, whose kernels need 16 bits."""
    if composition.device != "cpu":
        return None
    kept = [tuple(one for one in setting if not one.startswith(FEWER_BITS)) for setting in composition.settings]
    return replace(composition, settings=tuple(setting for setting in kept if setting))


def draw(seed: int, number: int, gpus: int = 0) -> Composition:
    """The composition of this number; `MODELS_SHARE` neighbours have the same model. `gpus` 0 is for CPU ranks."""
    device: Device = "cuda" if gpus else "cpu"
    model = _Draw(random.Random(f"{seed} {number // MODELS_SHARE} model"), SCALES[device])
    _model(model)
    if gpus:
        model.numbers = random.Random(f"{seed} {number // MODELS_SHARE} precision")
        _precision(model)
    layout = _Draw(random.Random(f"{seed} {number} layout"), SCALES[device])
    layout.facts = dict(model.facts)
    shares = {ranks: share for ranks, share in RANKS.items() if not gpus or ranks <= gpus}
    ranks = layout.numbers.choices([*shares], [*shares.values()])[0]
    _layout(layout, ranks)
    if not gpus:
        return Composition(ranks, tuple(model.settings + layout.settings))
    layout.numbers = random.Random(f"{seed} {number} kernels")
    in_float32 = BF16 not in model.settings
    if not (in_float32 and layout.facts.get("indexer")):
        layout.maybe(0.4, f"kernels.all={layout.word('triton', 'triton', 'triton' if in_float32 else 'torch')}")
    layout.maybe(0.3, f"kernels.attention={'efficient' if in_float32 else layout.word(*BACKENDS)}")
    drawn = Composition(ranks, tuple(model.settings + layout.settings), device)
    return (_with_graphs(drawn, layout.numbers) if layout.chance(0.25) else None) or drawn


def draw_graphs(seed: int, number: int, gpus: int) -> Composition:
    """The draw of this number with graphs, in bfloat16, and with as few micro-batches as its layout can have.

    Graphs need a GPU's kernels, which have 16 bits, and memory that stays: neither pipelines nor full sharding.
    """
    drawn = draw(seed, number, gpus).eager()
    left = ("training.global_batch=8", "training.micro_batch=", IN_ORDER, *BF16)
    left += ("kernels.all=torch", "kernels.attention=flash")
    left += ("parallel.pipeline=", "parallel.shard=full", "dispatch.overlap=passes")
    settings = tuple(one for one in drawn.settings if not one[0].startswith(left))
    eager = replace(drawn, settings=settings).plus(*BF16)
    eager = eager.plus("training.micro_batch=2", f"training.global_batch={2 * drawn.ranks}")
    captured = _with_graphs(eager, random.Random(f"{seed} {number} graphs"))
    return captured or eager.plus("graphs.capture=full", IN_ORDER)


def _with_graphs(drawn: Composition, numbers: random.Random) -> Composition | None:
    """The same with graphs of one kind or the other, if need be without offload and recomputation; None if illegal."""
    kinds = numbers.sample(("full", "partial"), 2)
    in_order = tuple(one for one in drawn.settings if one[0] != "kernels.attention=cudnn")
    on_device = tuple(one for one in in_order if not one[0].startswith(("offload.", "recompute.")))
    tries = [
        replace(drawn, settings=settings).plus(f"graphs.capture={kind}", IN_ORDER)
        for settings in (in_order, on_device)
        for kind in kinds
    ]
    return next((one for one in tries if refusal(one) is None), None)


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

    def maybe(self, share: float, *overrides: str) -> bool:
        """Add a setting in this share of draws."""
        is_added = self.chance(share)
        if is_added:
            self.add(*overrides)
        return is_added


def _model(draw: _Draw) -> None:
    """Everything that one process has too."""
    is_dense = draw.chance(0.06)
    layers = draw.any(1, 1, 2, 2, 2, 3, 4)
    first_dense = layers if is_dense else draw.any(*range(min(2, layers)))
    draw.add("model.family=plain", f"model.layers={layers}", f"model.dense_layers={first_dense}")
    draw.facts |= {"layers": layers, "dense": first_dense, "moe": int(not is_dense)}
    _attention(draw, layers)
    if is_dense:
        draw.add("model.moe=none")
    else:
        _experts(draw, layers - first_dense)
    if draw.chance(0.3):
        draw.facts["mtp"] = draw.any(1, 1, 2)
        draw.add(f"model.mtp_layers={draw.facts['mtp']}")
    draw.maybe(0.15, "model.tie_word_embeddings=true")
    if draw.chance(0.15) and not draw.facts.get("clamped"):  # it limits a gate, which relu2 lacks
        draw.add("model.hidden_act=relu2")
    draw.maybe(0.1, "model.zero_centred_norms=true")
    draw.maybe(0.25, "data.document_mask=true")
    draw.maybe(0.3, "training.z_loss_coef=0.001")
    draw.maybe(0.2, f"training.sequence_length={32 * draw.scale}")
    draw.maybe(0.15, "training.clip_norm=0.1")
    draw.maybe(0.2, "evaluation.rows=4")
    if draw.maybe(0.3, "training.micro_batch=2"):
        draw.facts["micro"] = 2
    if draw.chance(0.4) or draw.facts.get("micro"):
        draw.add("training.global_batch=8")
    if draw.maybe(0.1, "training.precision=bf16"):
        draw.maybe(0.3, "optimizer.store_param_remainders=true")
    _formats(draw, is_dense=is_dense)


def _formats(draw: _Draw, *, is_dense: bool) -> None:
    """Formats of products and moments, or Muon, whose step would enlarge their rounding."""
    is_low = draw.maybe(0.05, f"optimizer.moment_dtype={draw.word('bf16', 'int8')}")
    is_low |= draw.maybe(0.04, "float8.dense=blockwise")
    is_low |= not is_dense and draw.maybe(0.04, "float8.experts=blockwise")
    if not is_low and BF16 not in draw.settings and draw.chance(0.16):
        draw.add("optimizer.method=muon", "optimizer.muon.precision=fp32")
        draw.maybe(0.3, "optimizer.muon.qk_clip=0.05")
    else:
        draw.maybe(0.04, "float8.head=blockwise")


def _attention(draw: _Draw, layers: int) -> None:
    """Latent attention, grouped queries with what families add, or linear attention between."""
    if draw.chance(0.4):
        draw.facts["latent"] = 1
        widths = [f"{name}={8 * draw.scale}" for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        draw.add(*(f"model.attention.{size}" for size in (f"kv_lora_rank={16 * draw.scale}", *widths)))
        has_query = draw.maybe(0.4, f"model.attention.q_lora_rank={16 * draw.scale}")
        if has_query and draw.chance(0.25):
            draw.facts["indexer"] = 1
            sizes = f"index_n_heads=2, index_head_dim={8 * draw.scale}, index_topk={6 * draw.scale}"
            draw.add(f"model.attention.indexer={{{sizes}}}")
        else:
            draw.maybe(0.2, "model.attention.sinks=true")
        return
    heads = draw.any(1, 2, 4)
    draw.add(
        *("model.attention.kind=gqa", "model.attention.heads=4", f"model.attention.head_dim={8 * draw.scale}"),
        f"model.attention.kv_heads={heads}",
    )
    kind = draw.word("none", "none", "head", "projection", "rotated-head")
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
    if draw.chance(0.2):
        kind, values = draw.numbers.choice((("gdn", 4), ("gdn", 8), ("kda", 4)))
        last = f"full_every=2, full_last={str(draw.chance(0.5)).lower()}"
        sizes = f"key_heads=4, value_heads={values}, key_head_dim={8 * draw.scale}, value_head_dim={8 * draw.scale}"
        draw.add(f'model.linear_attention={{kind="{kind}", {sizes}, {last}}}')


def _experts(draw: _Draw, layers: int) -> None:
    """Experts, router, balance."""
    experts = draw.any(4, 8, 8, 8, 6)
    groups = experts == 8 and draw.chance(0.25)
    top_k = draw.any(1, 2, 2, 2, 3) if not groups else 2
    draw.facts["experts"] = experts
    draw.add(f"model.moe.experts={experts}", f"model.moe.top_k={top_k}")
    if layers > 1:
        draw.maybe(0.15, "model.moe.moe_layer_freq=2")
    if draw.chance(0.5):
        draw.facts["shared"] = 1
        draw.maybe(0.25, "model.moe.shared_expert_gate=true")
    else:
        draw.add("model.moe.shared_expert_intermediate_size=0")
    score = draw.word("softmax", "sigmoid", "sqrt-softplus")
    router = [f"scoring_func={score}", f"norm_topk_prob={str(top_k > 1 and draw.chance(0.5)).lower()}"]
    if score == "softmax" and top_k > 1 and draw.chance(0.4):
        router += ["softmax_after_top_k=true"]
    has_bias = draw.chance(0.5)
    router += [f"expert_bias={str(has_bias).lower()}"]
    draw.add(*(f"model.moe.router.{one}" for one in router))
    if groups:
        score = draw.word("max", "top2")
        draw.add(*(f"model.moe.router.{one}" for one in ("n_group=4", "topk_group=2", f"group_score={score}")))
    draw.maybe(0.2, "model.moe.router.routed_scaling_factor=2.5")
    draw.maybe(0.15, "model.moe.router.logit_bias=true")
    draw.maybe(0.15, "model.moe.router.apply_probs_on_input=true") or draw.maybe(0.2, "model.moe.bias=true")
    if draw.chance(0.2):
        draw.facts["clamped"], offset = 1, draw.any(0, 1)
        draw.add(f"model.moe.clamped={{alpha=1.702, limit=0.5, up_offset={offset}}}")
        if draw.chance(0.5) and draw.facts.get("shared"):
            draw.add("model.moe.clamp_shared=true")
    draw.maybe(0.15, "model.moe.router.num_hash_layers=1")
    _balance(draw, has_bias=has_bias and not groups and top_k < experts)


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
        draw.add(f"{prefix}.capacity_factor=1.0", *([f"{prefix}.pad_to_capacity=true"] if padded else []))


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
        draw.add(f"parallel.context={context}", f"parallel.context_method={method}")
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
    return draw.any(*(size for size in (2, 4) if ranks % size == 0 and size <= ranks))


def _shard(draw: _Draw, copies: int) -> None:
    if copies == 1:
        return
    kind = draw.word("none", "optimizer", "optimizer", "full", "full")
    setting = [f"parallel.shard={kind}"]
    if kind != "none" and copies == 4 and draw.chance(0.3):
        setting.append("parallel.shard_size=2")
    if kind == "full":
        setting += [f"parallel.reshard={draw.word('forward', 'backward')}", f"parallel.prefetch={draw.any(0, 1, 2)}"]
    draw.add(*setting)
    draw.facts["full"] = int(kind == "full")
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
    draw.add(f"parallel.pipeline={ranks}", f"pipeline.schedule={schedule}", f"pipeline.stages_per_rank={stages}")
    draw.facts["passes"] = int(schedule in ("interleaved", "dualpipe-v") and not draw.facts.get("full"))


def _expert_ranks(draw: _Draw, ranks: int) -> None:
    """How ranks share experts, and how tokens reach them."""
    experts = draw.facts["experts"]
    expert = draw.any(*(size for size in (1, 2, 4, 8) if ranks % size == 0 and experts % size == 0), ranks)
    expert = expert if experts % expert == 0 else 1
    expert_tensor = _factor(draw, ranks // expert, 0.3)
    if expert == expert_tensor == 1:
        return
    sizes = [f"parallel.expert={expert}"] if expert > 1 else []
    draw.add(*sizes, *([f"parallel.expert_tensor={expert_tensor}"] if expert_tensor > 1 else []))
    method = draw.word("auto", *(name for name in DISPATCHERS if name != "symmetric"))  # that one needs GPUs
    method = "auto" if draw.facts.get("padded") else method
    stage = draw.any(0, 1) if method == "all-to-all" else draw.any(0, 1, 2, 3)
    factor = ["dispatch.row_capacity_factor=1.0"] if stage == 2 and draw.chance(0.4) else []
    draw.add(f"dispatch.method={method}", f"dispatch.sync_free={stage}", *factor)
    if expert > 1 and method != "hierarchical" and not draw.facts.get("padded") and draw.chance(0.3):
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
        draw.add(f"recompute.modules={_listed(names)}", *where)
    if draw.chance(0.15):
        there = [name for name in OFFLOADABLE if not missing.get(name)]
        draw.add(f"offload.activations={_listed(draw.numbers.sample(there, 1))}")
    on_host = draw.maybe(0.12, "offload.optimizer=true")
    if facts["ranks"] == 1:  # a rule: sums on the host are not summed over ranks
        draw.maybe(0.3, "offload.gradients=true", *([] if on_host else ["offload.optimizer=true"]))


def _precision(draw: _Draw) -> None:
    """What GPUs compute in: mostly bfloat16, and products in 8 bits by all recipes."""
    if any(one[0] == "optimizer.method=muon" for one in draw.settings):
        return
    is_float8 = any(one[0].startswith("float8.") for one in draw.settings)
    if not is_float8:
        is_float8 = draw.maybe(0.15, f"float8.dense={draw.word(*RECIPES)}")
        is_float8 |= bool(draw.facts["moe"]) and draw.maybe(0.15, f"float8.experts={draw.word(*RECIPES)}")
    if BF16 not in draw.settings and (is_float8 or draw.chance(0.75)):
        draw.add("training.precision=bf16")


def _listed(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"
