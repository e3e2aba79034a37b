"""What there is to choose among kernels, and which sizes decide: the questions that `choose` answers, as data.

A question is one operator, except that the experts' products are three questions. Times are measured in finer parts
(the gate-up and the down product, a norm alone and with its residual sum), and the sum of its parts decides a question.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Literal

Direction = Literal["both", "forward", "input_gradient", "weight_gradient"]
"""Both passes of an operator, or one of the experts' products."""

PRODUCTS: tuple[Direction, ...] = ("forward", "input_gradient", "weight_gradient")
"""The experts' products, by their fields in `penstock.kernels.expert_kernels.ExpertKernels`."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes that decide how fast operators are, of one micro-batch on one rank.

    Attributes:
        tokens: in a micro-batch.
        hidden: width of the residual stream.
        experts: that this rank holds; 0 for a dense model, as `top_k` and `ffn`.
        expert_groups: groups of the router; 1 for none.
        top_k: experts of a token.
        ffn: width of one expert.
        dense_ffn: width of the network that most layers have for every token (shared expert or dense); 0 for none.
        attention: `mla` or `gqa`.
        heads: query heads.
        head_dim: width of a query head.
        rotary_dim: part of it that is rotated.
        value_dim: width of a value head.
    """

    tokens: int
    hidden: int
    experts: int
    expert_groups: int
    top_k: int
    ffn: int
    dense_ffn: int
    attention: Literal["mla", "gqa"]
    heads: int
    head_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True)
class Part:
    """What is measured as one thing.

    Attributes:
        op: name in measurements.
        direction: `forward`, `backward`, or one of `PRODUCTS`.
    """

    op: str
    direction: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """One thing to choose.

    Attributes:
        op: operator, from `penstock.kernels.backends.FIELDS`.
        direction: what of it.
        knobs: fields of the section `kernels` that answer it, the nearest first.
        parts: whose times decide.
    """

    op: str
    direction: Direction = "both"
    knobs: tuple[str, ...]
    parts: tuple[Part, ...]


def _passes(*ops: str) -> tuple[Part, ...]:
    return tuple(Part(op, direction) for op in ops for direction in ("forward", "backward"))


QUESTIONS: tuple[Question, ...] = (
    Question(op="route", knobs=("route",), parts=_passes("route")),
    # The order of rows is integers, which have no gradient.
    Question(op="permute", knobs=("permute",), parts=(Part("order_rows", "forward"), *_passes("unpermute"))),
    *(
        Question(
            op="experts",
            direction=product,
            knobs=(f"experts_{product}", "experts"),
            parts=(Part("gate_up", product), Part("down", product)),
        )
        for product in PRODUCTS
    ),
    Question(op="swiglu", knobs=("swiglu",), parts=_passes("swiglu")),
    Question(op="norm", knobs=("norm",), parts=_passes("rms_norm", "add_rms_norm")),
    Question(op="rope", knobs=("rope",), parts=_passes("rotate", "mla_heads")),
)

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
    }
)
"""Which of the sizes say how long a part takes."""

_ONLY_WITH = {"rotate": "gqa", "mla_heads": "mla"}
"""Parts that only models with this attention have."""


def shape_of(op: str, shapes: Shapes) -> dict[str, int]:
    """The sizes by which a part is measured and looked up."""
    sizes = asdict(shapes)
    return {name: sizes[name] for name in PART_SIZES[op]}


def has(op: str, shapes: Shapes) -> bool:
    """Whether the model has a part at all."""
    return _ONLY_WITH.get(op, shapes.attention) == shapes.attention and all(shape_of(op, shapes).values())
