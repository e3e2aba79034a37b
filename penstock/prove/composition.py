"""A composition: a model, and a layout that trains it.

A composition is a list of settings. A setting is one or several overrides that mean something together, such as a
pipeline with its schedule and stages. Settings of the model, batch, data and optimizer hold for one process too;
settings of the layout do not. Which are legal is for the rules to say.

Three settings are no fields of a run. They say what happens around its steps:

    prove.labels=some               rows lose their labels, whichever rank reads them
    prove.weights=imported, saved   the run begins with weights of another one, exported and imported, or its checkpoint
    prove.then=4 parallel.expert=4  half of the steps, a checkpoint, and the rest on so many ranks in another layout

Models are small ones of every family: what a preset says, with the sizes of other draws.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import getitem
from types import MappingProxyType
from typing import Any, Literal

from penstock.base.errors import PenstockError
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.model import LatentAttention, Model
from penstock.config.run import Run
from penstock.config.schema import differences, leaves

Setting = tuple[str, ...]

PRESET = "debug"

Device = Literal["cpu", "cuda"]

SCALES: Mapping[Device, int] = MappingProxyType({"cpu": 1, "cuda": 8})  # of widths and positions
DEFINITIONS = ("kernels.all=reference", "kernels.attention=math")  # of the one process on a GPU

OF_LAYOUT = ("parallel", "dispatch", "pipeline", "recompute", "offload", "kernels", "graphs")
"""Sections that one process does not have. The others are the model's."""

LABELS, THEN, WEIGHTS = "prove.labels=some", "prove.then=", ("prove.weights=imported", "prove.weights=saved")

_BETWEEN_RANKS = (THEN, "float8.gather=", "float8.dispatch=")
"""Beginnings of other overrides that one process does not have."""

IN_ORDER = "training.deterministic=true"
"""Goes with `graphs.capture`, whose replays must give the bits of eager passes. One process does not need it."""

BF16: Setting = ("training.precision=bf16",)


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
        *("optimizer.epsilon=1e-3", "optimizer.learning_rate=1e-2", "training.steps=2", "schedule.warmup_steps=0"),
        *("schedule.decay=constant", "evaluation.rows=0", "checkpoint.enabled=false", "graphs.capture=none"),
        f"device={device}",
    )


FEWER_BITS = (
    *("training.precision=", "parallel.reduce=", "float8."),
    *("optimizer.moment_dtype=", "optimizer.store_param_remainders="),
)
"""Beginnings of overrides by which something is rounded to fewer bits."""

EPSILON = "model.rms_norm_eps="
JOLTED, LOW_JOLTED, LOW_JOLTED_DOWN = 1.0001e-6, 1.5e-6, 0.5e-6
"""Epsilons of norms instead of 1e-6, which change their outputs by less than float32 and bfloat16 round."""


@dataclass(frozen=True)
class Composition:
    """A model and a layout."""

    ranks: int
    settings: tuple[Setting, ...]
    device: Device = "cpu"

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(override for setting in self.settings for override in setting)

    @property
    def alone(self) -> tuple[str, ...]:
        """Those of one process, which reads a row at a time unless losses depend on the rows of a micro-batch."""
        definitions = DEFINITIONS if self.device == "cuda" else ()
        kept = [override for override in self.overrides if not is_of_layout(override)]
        if not reads_micro_batches(self.run):
            kept = [setting for setting in kept if not setting.startswith("training.micro_batch=")]
        return (*kept, *definitions)

    @property
    def then(self) -> "Composition | None":
        """The layout in which the second half of the steps runs; None if it is the same."""
        layouts = [override for override in self.overrides if override.startswith(THEN)]
        if not layouts:
            return None
        ranks, *overrides = layouts[-1].removeprefix(THEN).split()
        kept = tuple((override,) for override in self.overrides if not is_of_layout(override))
        return replace(self, ranks=int(ranks), settings=(*kept, *((word,) for word in overrides)))

    @property
    def command(self) -> str:
        device = [] if self.device == "cpu" else ["--device", self.device]
        return shlex.join(["penstock", "prove", *device, "--processes", str(self.ranks), *self.overrides])

    @property
    def capture(self) -> str:
        """What graphs hold; empty for eager passes."""
        captures = [override for override in self.overrides if override.startswith("graphs.capture=")]
        return captures[-1].partition("=")[2].replace("none", "") if captures else ""

    @cached_property
    def run(self) -> Run:
        """The run of its ranks. Raises a ConfigError."""
        return load_run(PRESET, base_of(self.device) + of_run(self.overrides))

    def without(self, *beginnings: str) -> "Composition":
        """The same without the overrides that begin so."""
        kept = [tuple(word for word in setting if not word.startswith(beginnings)) for setting in self.settings]
        return replace(self, settings=tuple(setting for setting in kept if setting))

    def eager(self) -> "Composition":
        return self.without("graphs.")

    def plus(self, *overrides: str) -> "Composition":
        """The same with one setting more."""
        return replace(self, settings=(*self.settings, overrides))


def is_of_layout(override: str) -> bool:
    """Whether one process lacks it."""
    return override.partition(".")[0] in OF_LAYOUT or override == IN_ORDER or override.startswith(_BETWEEN_RANKS)


def of_run(overrides: Sequence[str]) -> tuple[str, ...]:
    """Those that are fields of a run."""
    return tuple(override for override in overrides if not override.startswith("prove."))


def reads_micro_batches(run: Run) -> bool:
    """Whether losses or rounding depend on which rows are a micro-batch."""
    balance = None if run.model.moe is None else run.model.moe.balance
    counts = balance is not None and bool(
        balance.capacity_factor or (balance.aux_loss_coef and balance.aux_loss in ("micro-batch", "global-batch"))
    )
    return counts or run.float8.is_used


def composition_of(ranks: int, overrides: Sequence[str], device: Device = "cpu") -> Composition:
    """A composition of overrides, each a setting."""
    return Composition(ranks, tuple((override,) for override in overrides), device)


def refusal(composition: Composition) -> str | None:
    """The line with which rules refuse a composition, or why it need not equal one process; else None."""
    if (unknown := next((override for override in composition.overrides if _is_unknown(override)), None)) is not None:
        return f"no such setting: {unknown}"
    try:
        then = composition.then
        if then is not None and (line := refusal(then)) is not None:
            return line
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


def _is_unknown(override: str) -> bool:
    known = override in (LABELS, *WEIGHTS) or re.fullmatch(rf"{THEN}\d+( \S+)*", override)
    return override.startswith("prove.") and not known


def neighbours(composition: Composition, *, is_low: bool) -> Iterator[tuple[str, str]]:
    """Overrides that move a jump of the model's functions a little, each with what a value there would have done."""
    run = composition.run
    moe, attention = run.model.moe, run.model.attention
    if run.qat.experts != "none":
        yield f"seed={run.seed + 1}", "a weight is between two numbers of 4 bits"
    if moe is not None and moe.clamped is not None:
        yield f"model.moe.clamped.limit={moe.clamped.limit * 1.001:.6g}", "a value is at the limit of the clamp"
    if moe is not None and moe.balance.bias_rule == "quantile":
        yield "model.moe.balance.bias_rule=sign", "a quantile lies between other scores"
    # Float32 hardly ever chooses other keys.
    if is_low and isinstance(attention, LatentAttention) and attention.indexer is not None:
        every_key = run.training.sequence_length
        yield f"model.attention.indexer.index_topk={every_key}", "the indexer chose other keys"
    if is_low and composition.device == "cuda":
        yield f"{EPSILON}{LOW_JOLTED_DOWN}", "with norms that round otherwise"


FAMILIES = (
    *("deepseek-v2", "deepseek-v3", "deepseek-v3.2", "kimi-linear-48b-a3b", "glm-4.5", "glm-4.5-air", "glm-5"),
    *("ernie-4.5-21b-a3b", "minimax-m2", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b"),
    *("olmoe-1b-7b", "llama4-scout", "llama4-maverick", "gpt-oss-20b", "llama3.1-8b", "qwen3-8b"),
)
"""Presets, one or two of a family."""

_WIDTHS = """
vocab_size 64, hidden_size 32, intermediate_size 48, attention.head_dim 8, attention.q_lora_rank 16,
attention.kv_lora_rank 16, attention.qk_nope_head_dim 8, attention.qk_rope_head_dim 8, attention.v_head_dim 8,
attention.indexer.index_head_dim 8, attention.indexer.index_topk 6, attention.local.size 6,
attention.local.temperature_floor 5, attention.rope.yarn.original_max_position_embeddings 8,
attention.rope.llama3.original_max_position_embeddings 8, linear_attention.key_head_dim 8,
linear_attention.value_head_dim 8, moe.moe_intermediate_size 16, moe.shared_expert_intermediate_size 16
"""
"""Of a CPU; a value of 0 in the preset stays."""

_COUNTS = """
layers 4, dense_layers 1, mtp_layers 1, attention.heads 4, attention.kv_heads 2, attention.indexer.index_n_heads 2,
linear_attention.key_heads 4, linear_attention.value_heads 4, moe.experts 8, moe.top_k 2, moe.router.n_group 4,
moe.router.topk_group 2
"""
"""Most of them: a preset's smaller values stay."""


def _table(text: str) -> dict[str, int]:
    return {path: int(value) for path, value in (entry.split() for entry in text.split(","))}


def family_overrides(preset: str, base: Model, scale: int, initializer_range: float) -> tuple[str, ...]:
    """What makes the small model of a preset from `base`."""
    model = load_run(preset).model
    widths, counts = _table(_WIDTHS), _table(_COUNTS)
    values: dict[str, Any] = {"initializer_range": initializer_range}
    for path, value in leaves(model).items():
        if path in widths and value:
            values[path] = widths[path] * scale
        elif path in counts:
            values[path] = min(value, counts[path])
    if model.moe is None:
        values["dense_layers"] = values["layers"]
    tree = model.model_dump()
    for path, value in values.items():
        *sections, last = path.split(".")
        reduce(getitem, sections, tree)[last] = value
    small = Model.model_validate(tree)
    return tuple(
        f"model.{difference.field}={difference.right}"
        for difference in differences(base, small)
        if difference.right is not None
    )
