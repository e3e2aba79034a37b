"""Attention over packed documents, windows, chunks and with sinks: our kernel beside torch's paths, in one run.

    python -m benchmarks.kernels.attention_masked --output attention-masked.json
    python -m benchmarks.kernels.attention_masked --tiny       # on a CPU: errors of torch's path

Torch's path is that of a run with `kernels.attention=cudnn` or `efficient`: a boolean mask. (Until commit `5fd35956`
windows were blocks of queries with their keys, docs/decisions/0140.) Masks and bounds are made before the clock starts,
as a run makes them once for all layers. Lengths of documents are log-normal; their mean is an eighth of a row.

TFLOP/s count pairs of a query and a key that it sees: 2 products forward and 5 backward. Memory is the peak of both
passes beside their inputs. Errors are as in `benchmarks.kernels.attention`.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.attention import Attention, Shape, draw, errors_of, passes, times_of
from benchmarks.kernels.measure import DEVICE, ON_GPU
from penstock.kernels.attention import causal_attention
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.bounded_attention import AttentionBounds, bounded_attention, first_keys
from penstock.models.model_inputs import attention_mask

SPREAD = 1.0  # standard deviation of the logarithm of a document's length


@dataclass(frozen=True, kw_only=True)
class Case(Shape):
    """Heads, and the keys that a query sees."""

    documents: int = 0  # mean length; 0: a row is one document
    window: AttentionWindow | None = None
    has_sinks: bool = False


_LATENT = {"H": 16, "G": 16, "N": 192}
_QWEN = {"H": 32, "G": 4}
_GPT = {"H": 64, "G": 8, "N": 64, "M": 64, "has_sinks": True}
_LLAMA = {"H": 40, "G": 8}
_WINDOW = AttentionWindow(kind="window", size=128)
_CHUNK = AttentionWindow(kind="chunk", size=8192)
CASES = (
    Case(name="V2-Lite, documents, 4096", B=4, S=4096, documents=512, **_LATENT),
    Case(name="V2-Lite, documents, 16384", B=1, S=16384, documents=2048, **_LATENT),
    Case(name="Qwen3-30B, documents, 4096", B=4, S=4096, documents=512, **_QWEN),
    Case(name="Qwen3-30B, documents, 16384", B=1, S=16384, documents=2048, **_QWEN),
    Case(name="gpt-oss, window, 4096", B=4, S=4096, window=_WINDOW, **_GPT),
    Case(name="gpt-oss, window, 16384", B=1, S=16384, window=_WINDOW, **_GPT),
    Case(name="gpt-oss, window and documents, 4096", B=4, S=4096, window=_WINDOW, documents=512, **_GPT),
    Case(name="gpt-oss, documents, 4096", B=4, S=4096, documents=512, **_GPT),
    Case(name="gpt-oss, one document, 4096", B=4, S=4096, **_GPT),
    Case(name="Llama-4, chunks, 16384", B=1, S=16384, window=_CHUNK, **_LLAMA),
    Case(name="Llama-4, chunks and documents, 16384", B=1, S=16384, window=_CHUNK, documents=2048, **_LLAMA),
)
JUDGED = (
    Case(name="192 and 128 wide, documents", B=2, S=2000, H=4, G=4, N=192, documents=250),
    Case(name="shared keys, window, sinks", B=2, S=2000, H=8, G=2, N=64, M=64, window=_WINDOW, has_sinks=True),
    Case(name="shared keys, documents", B=2, S=2000, H=8, G=2, documents=250),
)


def main() -> None:
    options = record.parser(
        __doc__,
        rounds=(10, "timed steps of each candidate"),
        only=("", "time cases whose names have this part"),
        tiny=(False, "errors only, of small shapes, on a CPU"),
    ).parse_args()
    torch.manual_seed(0)
    errors, times = {}, {}
    for case in JUDGED:
        masked = Masked(replace(case, S=320, documents=case.documents and 40) if options.tiny else case)
        errors[case.name] = errors_of(masked.case, masked.rivals(), masked.in_float32)
    for case in () if options.tiny else CASES:
        if options.only in case.name:
            masked = Masked(case)
            times[case.name] = times_of(case, masked.rivals(), masked.pairs(), options.rounds)
            torch_ms = min(way["ms"] for name, way in times[case.name].items() if name != "triton")
            for name, way in times[case.name].items():
                way["speed_of_torch"] = torch_ms / way["ms"]
                record.show({"case": case.name, "way": name, **way})
    record.write(options, {"errors": errors, "times": times})


def packed(case: Case) -> Tensor | None:
    """Documents of each row by number, int64."""
    if not case.documents:
        return None
    mean = torch.log(torch.tensor(float(case.documents))) - SPREAD**2 / 2
    generator = torch.Generator().manual_seed(case.S)
    lengths = torch.empty(case.B, 256).log_normal_(mean.item(), SPREAD, generator=generator).long() + 1
    assert lengths.sum(1).min() >= case.S, "the documents fill the rows"
    position_BS = torch.arange(case.S).expand(case.B, -1).contiguous()
    return torch.searchsorted(lengths.cumsum(1), position_BS, right=True).to(DEVICE)


class Masked:
    """The inputs of a case beside queries, keys and values."""

    def __init__(self, case: Case) -> None:
        self.case, documents_BS = case, packed(case)
        self.allowed_BSS = attention_mask(documents_BS)
        self.bounds = AttentionBounds.of(first_keys(documents_BS, case.window, case.S, DEVICE), case.S, case.window)
        self.sinks_H = torch.randn(case.H, device=DEVICE, dtype=torch.bfloat16) if case.has_sinks else None

    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, in all rows of one head."""
        first_BQ = self.bounds.first_BQ
        seen = int((torch.arange(self.case.S, device=DEVICE) + 1 - first_BQ).sum())
        return seen * (self.case.B // first_BQ.shape[0])

    def by_torch(self, backend: str) -> Attention:
        """Attention of a run without our kernel."""
        seen = self.allowed_BSS
        if self.case.window is not None:
            seen = self.bounds.seen_BQK().expand(self.case.B, -1, -1)
        how = {"scale": self.case.N**-0.5, "sinks_H": self.sinks_H}
        return partial(causal_attention, allowed_BSS=seen, backend=backend, **how)

    def rivals(self) -> dict[str, Attention]:
        """Candidates that run here, torch's first, without those that torch refuses."""
        if not ON_GPU:
            return {"auto": self.by_torch("auto")}
        ours = partial(bounded_attention, bounds=self.bounds, scale=self.case.N**-0.5, sinks_H=self.sinks_H)
        running, inputs = {}, draw(self.case)
        for name, rival in {
            "cudnn": self.by_torch("cudnn"),
            "efficient": self.by_torch("efficient"),
            "triton": ours,
        }.items():
            try:
                passes(rival, inputs)
            except RuntimeError as error:
                print(f"{name}: {str(error).splitlines()[0][:100]}")
                continue
            running[name] = rival
        return running

    def in_float32(self, *heads: Tensor) -> Tensor:
        """All scores in memory."""
        position_S = torch.arange(self.case.S, device=DEVICE)
        seen_BSS = (position_S >= self.bounds.first_BQ[:, :, None]) & (position_S <= position_S[:, None])
        allowed_BSS = seen_BSS.expand(self.case.B, -1, -1)
        sinks_H = None if self.sinks_H is None else self.sinks_H.float()
        how = {"scale": self.case.N**-0.5, "sinks_H": sinks_H}
        return causal_attention(*heads, allowed_BSS=allowed_BSS, backend="math", **how)


if __name__ == "__main__":
    main()
