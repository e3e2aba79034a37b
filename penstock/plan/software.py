"""Other trainers, as far as a projection of their runs differs from ours: an assumption, never a part of a run.

A run is projected from our own operators. `--software megatron` projects the same layout as another program runs it;
`--software megatron,dispatch=all-to-all,captured=1` changes fields of a known trainer.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import inf
from types import MappingProxyType
from typing import Any, Literal, get_args

from penstock.base.errors import PenstockError, did_you_mean
from penstock.config.model import GroupedQueryAttention
from penstock.config.run import Run, with_values

Library = Literal["own", "all-to-all", "deep-ep"]
"""What sends tokens: the run's dispatcher, a collective, or a library that sends each token once to each node."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """A trainer; factors are seconds over ours."""

    name: str = "own"
    dispatch: Library = "own"
    waits: bool = True  # the host reads row counts in each layer
    products: float = 1.0  # dense
    experts: float = 1.0  # grouped products
    attention: float = 1.0  # of both passes
    one_by_one: bool = False  # products of 16-bit experts are launched one after the other
    moved: float = 1.0  # kernels that compute little
    casts: float = 1.0  # kernels that round to 8 bits; above 1 where amax, rounding and transposition read again
    clamped: float = 1.0  # activation and biases of clamped experts (gpt-oss), as separate operators
    launch: float = 1.0  # host time of an operator
    stage_seconds: float = 0.0  # host time of a pass of a pipeline's stage beside its operators
    captured: float = 0.0  # share of the operators that graphs launch
    hidden: float | None = None  # share of a pair's transfers that its compute hides (`dispatch.overlap=passes`)
    weights_hidden: float | None = None  # share of FSDP's transfers that compute hides
    tensor_hidden: float = 0.0  # share of the exchanges of tensor parallelism that products hide
    ring: bool = False  # context-parallel ranks pass keys around, hidden behind attention
    sums_overlap: bool = False  # sums of gradients run behind the last backward pass, new weights behind the first one
    gathers: int = 0  # how often in a step FSDP gathers weights and reduces gradients; 0 for each micro-batch
    gradient_bytes: int = 4  # of one value, between the passes of a step
    moment_bytes: int = 4  # of one value of the optimizer; fewer if the run says so
    source: str = ""

    @property
    def launch_share(self) -> float:
        """Host time of all operators over ours."""
        return self.launch * (1 - self.captured)

    def __str__(self) -> str:
        changed = [f"{name} {vars(self)[name]}" for name in _FIELDS if vars(self)[name] != vars(OWN)[name]]
        return f"{self.name}: {', '.join(changed)}"


OWN = Software()

_FIELDS = tuple(field.name for field in fields(Software) if field.name not in ("name", "source"))
"""Those that an option may change."""

_SHARES = ("captured", "hidden", "weights_hidden", "tensor_hidden")  # those that are at most 1


def _parsed(text: str, known: Mapping[str, Software]) -> Software:
    """A known trainer with some fields changed: `megatron,dispatch=all-to-all,captured=1`."""
    name, *changes = (part.strip() for part in text.split(","))
    if name not in known:
        raise PenstockError(
            "--software knows no such trainer", got=name, allowed=", ".join(known), fix=did_you_mean(name, known)
        )
    return replace(known[name], **{field: value for change in changes for field, value in _field(change).items()})


def _field(change: str) -> dict[str, Any]:
    """One field of a change `captured=1`."""
    name, _, value = (word.strip() for word in change.partition("="))
    default = vars(OWN)[name] if name in _FIELDS else ""
    with suppress(ValueError):
        if name == "dispatch" and value in get_args(Library):
            return {name: value}
        if isinstance(default, bool) and value in ("true", "false"):
            return {name: value == "true"}
        if type(default) is int and value.isdecimal():
            return {name: int(value)}
        largest = 1.0 if name in _SHARES else inf
        if (default is None or isinstance(default, float)) and 0 <= float(value) <= largest:
            return {name: float(value)}
    raise PenstockError("--software has no such field, or not with this value", got=change, allowed=", ".join(_FIELDS))


def _known() -> Mapping[str, Software]:
    known = {OWN.name: OWN}
    for name, (text, source) in _TRAINERS.items():
        known[name] = replace(_parsed(text, known), name=name, source=source)
    return MappingProxyType(known)


_TRAINERS = {
    "megatron": (
        "own,dispatch=deep-ep,clamped=12,launch=0.94,stage_seconds=7e-4,hidden=0.5,weights_hidden=0.9,tensor_hidden=0.7,ring=true,sums_overlap=true,gradient_bytes=2,"
        "moment_bytes=2",
        "fitted to published runs of Megatron Bridge 25.09 to 26.04; bf16 gradients and moments of its recipes",
    ),
    "megatron-26.06": (
        "megatron,waits=false,products=0.8,experts=0.7,attention=0.8,moved=0.53,casts=0.53,clamped=4,captured=1",
        "fitted to published runs of Megatron Bridge 26.06 on Blackwell, captured whole",
    ),
    "automodel": (
        "own,dispatch=deep-ep,launch=0.82,clamped=5,ring=true,gathers=1,gradient_bytes=2",
        "fitted to published runs of NeMo AutoModel on H100; weights gathered once in a step",
    ),
    "torchtitan": (
        "own,dispatch=all-to-all,products=1.55,experts=1.55,attention=1.55,moved=1.55,ring=true",
        "measured beside ours on one H200",
    ),
    "primus": (
        "own,dispatch=deep-ep,one_by_one=true,launch=1.15,stage_seconds=7e-4,ring=true,sums_overlap=true,gradient_bytes=2",
        "fitted to published runs of Primus on MI355X",
    ),
    "deepseek": (
        "own,dispatch=deep-ep,launch=0.82,hidden=0.95,sums_overlap=true",
        "DualPipe hides dispatch almost whole (arXiv 2412.19437)",
    ),
}

SOFTWARE = _known()
"""Known trainers. What is fitted is fitted to one half of benchmarks/published_runs.toml, and checked on the other."""


def parse_software(text: str) -> Software:
    """The trainer of an option. Raises a PenstockError if it has no such name or field."""
    return _parsed(text, SOFTWARE)


def as_run_by(software: Software, run: Run) -> Run:
    """The run with the parts that only our program has replaced: rows are sent as counted."""
    if software.dispatch == "own":
        return run
    return with_values(run, dispatch={"method": "all-to-all", "sync_free": 0 if software.waits else 1})


def dispatcher_of(software: Software, dispatcher: str) -> str:
    """Name of what sends tokens in a run that our program would send by `dispatcher`."""
    return software.dispatch if dispatcher == "all-to-all" and software.dispatch != "own" else dispatcher


def passes_keys(software: Software, run: Run) -> bool:
    """Whether context-parallel ranks of the run pass their keys around."""
    attention = run.model.attention
    has_window = isinstance(attention, GroupedQueryAttention) and attention.local is not None
    return software.ring and run.parallel.context > 1 and not has_window and not run.data.document_mask
