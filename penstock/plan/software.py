"""Other trainers, as far as a projection of their runs differs from ours: an assumption, never a part of a run.

A run is projected from our own operators. `--software megatron` projects the same layout as another program runs it:

    dispatch     rows as counted, sent by NCCL's all-to-all or by DeepEP and its kin, instead of our kernels
    kernels      seconds of products, experts, attention and memory-bound work over ours on the same chip
    host         launches over ours, less those that graphs capture
    overlap      share of dispatch that the backward pass of another micro-batch hides; gradient sums behind backward
    attention    context-parallel ranks pass keys around behind their products, and keep their own only
    state        bytes of gradients between the passes of a step, and of moments

`--software megatron,dispatch=all-to-all,captured=1` changes fields of a known one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from penstock.base.errors import PenstockError, did_you_mean
from penstock.config.model import GroupedQueryAttention
from penstock.config.run import Run

Library = Literal["own", "all-to-all", "deep-ep"]
"""What sends tokens: the run's dispatcher, a collective, or a library that sends each token once to each node."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A trainer; factors are seconds over ours.

    Attributes:
        dispatch: what sends tokens to experts.
        waits: whether the host reads row counts in each layer.
        products: dense products.
        experts: grouped products.
        attention: of both passes.
        moved: kernels that compute little.
        casts: kernels that round to 8 bits; more than 1 where amax, rounding and transposition read the numbers again.
        clamped: activation and biases of clamped experts (gpt-oss), as separate operators.
        launch: host time of an operator.
        captured: share of the operators that graphs launch.
        hidden: share of the transfers of a pair of passes that its compute hides (`dispatch.overlap=passes`).
        ring: context-parallel ranks pass keys around, hidden behind attention.
        sums_overlap: sums of gradients run behind the last backward pass, new weights behind the first forward pass.
        gathers: how often in a step FSDP gathers weights and reduces gradients; 0 for each micro-batch.
        gradient_bytes: of one value, between the passes of a step.
        moment_bytes: of one value of the optimizer.
        source: of these figures.
    """

    name: str = "own"
    dispatch: Library = "own"
    waits: bool = True
    products: float = 1.0
    experts: float = 1.0
    attention: float = 1.0
    moved: float = 1.0
    casts: float = 1.0
    clamped: float = 1.0
    launch: float = 1.0
    captured: float = 0.0
    hidden: float | None = None
    ring: bool = False
    sums_overlap: bool = False
    gathers: int = 0
    gradient_bytes: int = 4
    moment_bytes: int = 4
    source: str = ""

    @property
    def launch_share(self) -> float:
        """Host time of all operators over ours."""
        return self.launch * (1 - self.captured)

    def __str__(self) -> str:
        told = [f"{name} {vars(self)[name]}" for name in _FIELDS if vars(self)[name] != vars(OWN)[name]]
        return f"{self.name}: {', '.join(told)}"


OWN = Software()

_FIELDS = tuple(field.name for field in fields(Software) if field.name not in ("name", "source"))
"""Those that an option may change."""

_MEGATRON = Software(
    name="megatron",
    dispatch="deep-ep",
    clamped=12.0,
    launch=1.15,
    hidden=0.5,
    ring=True,
    sums_overlap=True,
    gradient_bytes=2,
    moment_bytes=2,
    source="fitted to published runs of Megatron Bridge 25.09 to 26.04; bf16 gradients and moments of its recipes",
)
SOFTWARE: Mapping[str, Software] = MappingProxyType(
    {
        one.name: one
        for one in (
            OWN,
            _MEGATRON,
            replace(
                _MEGATRON,
                name="megatron-26.06",
                waits=False,
                products=0.8,
                experts=0.7,
                attention=0.8,
                moved=0.6,
                casts=0.6,
                clamped=4.0,
                captured=1.0,
                source="fitted to published runs of Megatron Bridge 26.06 on Blackwell, captured whole",
            ),
            Software(
                name="automodel",
                dispatch="deep-ep",
                clamped=5.0,
                ring=True,
                gathers=1,
                gradient_bytes=2,
                source="fitted to published runs of NeMo AutoModel on H100; weights gathered once in a step",
            ),
            Software(
                name="torchtitan",
                dispatch="all-to-all",
                products=1.55,
                experts=1.55,
                attention=1.55,
                moved=1.55,
                ring=True,
                source="measured beside ours on one H200",
            ),
            Software(
                name="primus",
                dispatch="deep-ep",
                products=1.1,
                experts=1.15,
                attention=1.1,
                ring=True,
                sums_overlap=True,
                gradient_bytes=2,
                source="fitted to published runs of Primus on MI355X",
            ),
            Software(
                name="deepseek",
                dispatch="deep-ep",
                hidden=0.95,
                sums_overlap=True,
                source="DualPipe hides dispatch almost whole (arXiv 2412.19437)",
            ),
        )
    }
)
"""Known trainers. What is fitted is fitted to one half of benchmarks/published_runs.toml, and checked on the other."""


def parse_software(text: str) -> Software:
    """A known trainer with some fields changed: `megatron,dispatch=all-to-all,captured=1`."""
    name, *changes = (part.strip() for part in text.split(","))
    if name not in SOFTWARE:
        raise PenstockError(
            "--software knows no such trainer", got=name, allowed=", ".join(SOFTWARE), fix=did_you_mean(name, SOFTWARE)
        )
    software = SOFTWARE[name]
    for change in changes:
        software = replace(software, **_field(change))
    return software


def _field(change: str) -> dict[str, Any]:
    """One field of a change `captured=1`."""
    name, _, value = (word.strip() for word in change.partition("="))
    try:
        match name:
            case "dispatch" if value in get_args(Library):
                return {name: value}
            case "waits" | "ring" | "sums_overlap" if value in ("true", "false"):
                return {name: value == "true"}
            case "gathers" | "gradient_bytes" | "moment_bytes" if value.isdecimal():
                return {name: int(value)}
            case (
                "products" | "experts" | "attention" | "moved" | "casts" | "clamped" | "launch" | "captured" | "hidden"
            ) if float(value) >= 0:
                return {name: float(value)}
    except ValueError:
        pass
    raise PenstockError("--software has no such field, or not with this value", got=change, allowed=", ".join(_FIELDS))


def as_run_by(software: Software, run: Run) -> Run:
    """The run with the parts that only our program has replaced: rows are sent as counted."""
    if software.dispatch == "own":
        return run
    dispatch = {"method": "all-to-all", "sync_free": 0 if software.waits else 1}
    return run.model_copy(update={"dispatch": run.dispatch.model_copy(update=dispatch)})


def passes_keys(software: Software, run: Run) -> bool:
    """Whether context-parallel ranks of the run pass their keys around."""
    attention = run.model.attention
    has_window = isinstance(attention, GroupedQueryAttention) and attention.local is not None
    return software.ring and run.parallel.context > 1 and not has_window and not run.data.document_mask
