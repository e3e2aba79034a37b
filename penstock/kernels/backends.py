"""Operators that have a choice of implementation, and the backends that implement them, as data.

A choice point is one operator, or one of the experts' three products. Times are measured in finer parts (a norm alone
and with its residual sum); the sum over the parts decides.

To add a library of kernels, add a row to `BACKENDS`, its package to `penstock.kernels.tuning.PACKAGES`, and its
name to the knobs in `penstock.config.run`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from penstock.kernels import expert_kernels, operators
from penstock.kernels.bounded_attention import bounded_attention
from penstock.kernels.delta_rule import delta_rule
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.expert_kernels import ExpertKernels
from penstock.kernels.float8 import operators as float8_reference
from penstock.kernels.float8 import triton_operators as float8_triton
from penstock.kernels.float8.operators import Float8Operators
from penstock.kernels.head_norms import gated_norm, unit_length
from penstock.kernels.norm import add_rms_norm, add_three, fan_out, rms_norm, rms_norm_beside
from penstock.kernels.operators import Operators
from penstock.kernels.permute import order_rows, unpermute
from penstock.kernels.replica_kernels import assign_replicas, plan_replicas
from penstock.kernels.rope import mla_heads, rotate
from penstock.kernels.short_convolution import short_convolution
from penstock.kernels.sparse_attention_launches import choose_keys, sparse_attention
from penstock.kernels.swiglu import swiglu
from penstock.kernels.topk import balance_loss, route
from penstock.kernels.tuning import TRITON_PACKAGE

TRITON = Operators(
    attention_backend="auto",
    bounded_attention=bounded_attention,
    route=route,
    balance_loss=balance_loss,
    order_rows=order_rows,
    plan_replicas=plan_replicas,
    assign_replicas=assign_replicas,
    unpermute=unpermute,
    expert_ffn=expert_ffn,
    expert_ffn_is_fused=True,
    saves_rows=True,
    swiglu=swiglu,
    rms_norm=rms_norm,
    rms_norm_beside=rms_norm_beside,
    add_rms_norm=add_rms_norm,
    add_three=add_three,
    fan_out=fan_out,
    rotate=rotate,
    delta_rule=delta_rule,
    short_convolution=short_convolution,
    unit_length=unit_length,
    gated_norm=gated_norm,
    choose_keys=choose_keys,
    sparse_attention=sparse_attention,
    mla_heads=mla_heads,
)


# Both passes of an operator, or one of the experts' products, which are fields of `expert_kernels.ExpertKernels`.
Direction = Literal["both", "forward", "input_gradient", "weight_gradient"]
PRODUCTS: tuple[Direction, ...] = ("forward", "input_gradient", "weight_gradient")


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of one micro-batch on one rank that decide how fast operators are.

    `experts` of this rank, `top_k` and `ffn` (width of one expert) are 0 for a dense model.
    """

    tokens: int
    hidden: int
    experts: int
    expert_groups: int  # of the router; 1 for none
    top_k: int
    ffn: int
    dense_ffn: int  # width of the network that most layers have for every token (shared or dense); 0 for none
    attention: Literal["mla", "gqa", "compressed"]
    linear_key_heads: int = 0  # of linear attention; 0 without
    linear_value_heads: int = 0
    linear_key_dim: int = 0
    linear_value_dim: int = 0
    linear_decays: int = 0  # of a value head: 1, or one for each key feature
    has_window: bool = False  # some layers see a window or a chunk
    index_heads: int = 0  # of the indexer of sparse attention; 0 without
    latent_dim: int = 0  # of keys and values; 0 without
    heads: int
    head_dim: int  # of a query
    rotary_dim: int  # rotated part of a query head
    value_dim: int


class TimedPart(NamedTuple):
    """One measured operator, by its name in measurements."""

    op: str
    direction: str  # `forward`, `backward`, or one of `PRODUCTS`


@dataclass(frozen=True)
class ChoicePoint:
    """One operator, or one product of the experts, that has a choice of backends."""

    op: str
    fields: tuple[str, ...]  # of `Operators`, that the operator sets
    parts: tuple[TimedPart, ...]  # the sum of their measured times decides
    direction: Direction = "both"

    @property
    def knobs(self) -> tuple[str, ...]:
        """Fields of the section `kernels` that decide it, the most specific first."""
        return (self.op,) if self.direction == "both" else (f"{self.op}_{self.direction}", self.op)


def _passes(*ops: str) -> tuple[TimedPart, ...]:
    return tuple(TimedPart(op, direction) for op in ops for direction in ("forward", "backward"))


_EXPERTS = ("expert_ffn", "expert_ffn_is_fused", "saves_rows")
_ROWS = ("order_rows", "plan_replicas", "assign_replicas", "unpermute")
_NORMS = ("rms_norm", "rms_norm_beside", "add_rms_norm", "add_three", "fan_out")

CHOICE_POINTS: tuple[ChoicePoint, ...] = (
    ChoicePoint("route", ("route", "balance_loss"), _passes("route")),
    # The order of rows is integers, which have no gradient.
    ChoicePoint("permute", _ROWS, (TimedPart("order_rows", "forward"), *_passes("unpermute"))),
    *(
        ChoicePoint("experts", _EXPERTS, (TimedPart("gate_up", product), TimedPart("down", product)), product)
        for product in PRODUCTS
    ),
    ChoicePoint("swiglu", ("swiglu",), _passes("swiglu")),
    ChoicePoint("norm", _NORMS, _passes("rms_norm", "add_rms_norm")),
    ChoicePoint("rope", ("rotate", "mla_heads"), _passes("rotate", "mla_heads")),
    ChoicePoint("delta", ("delta_rule", "short_convolution", "unit_length", "gated_norm"), _passes("delta_rule")),
    ChoicePoint("sparse", ("choose_keys", "sparse_attention"), ()),  # by memory, not by time
)

# Operators that have a choice, and the fields of `Operators` that each one sets.
FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType({point.op: point.fields for point in CHOICE_POINTS})

# Sizes that the time of a part depends on.
PART_SIZES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "route": ("tokens", "experts", "top_k"),
        "order_rows": ("tokens", "experts", "top_k"),
        "unpermute": ("tokens", "top_k", "hidden"),
        "gate_up": ("tokens", "top_k", "experts", "hidden", "ffn"),
        "down": ("tokens", "top_k", "experts", "hidden", "ffn"),
        "swiglu": ("tokens", "dense_ffn"),
        "rms_norm": ("tokens", "hidden"),
        "add_rms_norm": ("tokens", "hidden"),
        "rotate": ("tokens", "heads", "head_dim"),
        "mla_heads": ("tokens", "heads", "head_dim", "rotary_dim", "value_dim"),
        "delta_rule": (
            *("tokens", "linear_key_heads", "linear_value_heads"),
            *("linear_key_dim", "linear_value_dim", "linear_decays"),
        ),
    }
)

_ONLY_WITH = {"rotate": "gqa", "mla_heads": "mla"}  # parts that only models with this attention have


def shape_of(op: str, shapes: Shapes) -> dict[str, int]:
    """The sizes by which a part is measured and looked up."""
    sizes = vars(shapes)
    return {name: sizes[name] for name in PART_SIZES[op]}


def has(op: str, shapes: Shapes) -> bool:
    return _ONLY_WITH.get(op, shapes.attention) == shapes.attention and all(shape_of(op, shapes).values())


@dataclass(frozen=True)
class Backend:
    """One library of kernels."""

    ops: tuple[str, ...]  # operators that it implements, from `FIELDS`
    operators: Operators  # fields of operators that are not in `ops` are not read
    expert_kernels: ExpertKernels
    package: str = ""  # that must be installed besides PyTorch; empty for none
    gpu_only: bool = False


# By name; the first that can run is taken where nothing is measured.
BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        "triton": Backend(tuple(FIELDS), TRITON, expert_kernels.TRITON, package=TRITON_PACKAGE, gpu_only=True),
        "torch": Backend(("experts", "swiglu", "norm", "delta"), operators.TORCH, expert_kernels.TORCH),
        "reference": Backend(tuple(FIELDS), operators.REFERENCE, expert_kernels.REFERENCE),
    }
)

FLOAT8: Mapping[str, Float8Operators] = MappingProxyType(
    {"triton": float8_triton.TRITON, "torch": float8_triton.WITH_TORCH, "reference": float8_reference.REFERENCE}
)


def experts_of(products: Mapping[str, str]) -> dict[str, Any]:
    """The experts' fields of `Operators` for products on these backends, by product.

    One backend for all three products gives that backend's own network. A mixture runs in the autograd function of
    `penstock.kernels.expert_ffn`; its other parts (SwiGLU, the sum over a token's rows) are Triton's if one of the
    products is.
    """
    names = {products[product] for product in PRODUCTS}
    if len(names) == 1:
        source = vars(BACKENDS[names.pop()].operators)
        return {field: source[field] for field in FIELDS["experts"]}
    frame = next(name for name in BACKENDS if name in names)  # triton is the first one
    kernels = BACKENDS[frame].expert_kernels
    parts = {product: vars(BACKENDS[products[product]].expert_kernels)[product] for product in PRODUCTS}
    # The first product writes the saved rows and the frame's SwiGLU reads them: both must support that.
    kernels = replace(kernels, **parts, saves_rows=kernels.saves_rows and products["forward"] == frame)
    ffn = partial(expert_ffn, kernels=kernels)
    return {"expert_ffn": ffn, "expert_ffn_is_fused": True, "saves_rows": kernels.saves_rows}
