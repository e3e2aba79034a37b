"""Attention over packed documents, windows, chunks and with sinks: our kernel beside torch's paths, in one run.

    python -m benchmarks.kernels.attention_masked --output attention-masked.json
    python -m benchmarks.kernels.attention_masked --tiny       # on a CPU: errors of torch's path

Torch's path is that of a run with `kernels.attention=cudnn` or `efficient`: a boolean mask. (Until commit `5fd35956`
windows were blocks of queries with their keys, docs/decisions/0140.) Masks and bounds are made before the clock starts,
as a run makes them once for all layers. Lengths of documents are log-normal; their mean is an eighth of a row.

TFLOP/s count pairs of a query and a key that it sees: 2 products forward and 5 backward. Memory is the most that both
passes hold beside their inputs. Errors are as in `benchmarks.kernels.attention`.
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import record
from benchmarks.kernels.attention import NAMES, Attention, Shape, decibels, draw, medians, passes
from penstock.kernels.attention import causal_attention
from penstock.kernels.attention_bounds import AttentionBounds, first_keys
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.bounded_attention import bounded_attention
from penstock.models.model_inputs import attention_mask

SPREAD = 1.0  # standard deviation of the logarithm of a document's length


@dataclass(frozen=True, kw_only=True)
class Case(Shape):
    """Heads, and the keys that a query sees."""

    documents: int = 0  # mean length; 0: a row is one document
    window: AttentionWindow | None = None
    has_sinks: bool = False


@dataclass(frozen=True, kw_only=True)
class Masks:
    """The inputs beside queries, keys and values."""

    documents_BS: Tensor | None
    allowed_BSS: Tensor | None
    bounds: AttentionBounds
    sinks_H: Tensor | None


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
    options = parse_arguments()
    torch.manual_seed(0)
    judged = [replace(case, S=320, documents=case.documents and 40) for case in JUDGED] if options.tiny else JUDGED
    numbers: dict[str, Any] = {
        "errors": {case.name: print_errors(case, has_flex=options.flex) for case in judged},
        "times": {},
    }
    for case in () if options.tiny else CASES:
        if options.only in case.name:
            numbers["times"][case.name] = print_times(case, options.rounds, has_flex=options.flex)
    record.write(options, numbers)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each candidate")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, which compiles for each case")
    parser.add_argument("--only", default="", help="time cases whose names have this part")
    parser.add_argument("--tiny", action="store_true", help="errors only, of small shapes, on a CPU")
    record.add_arguments(parser)
    return parser.parse_args()


def packed(case: Case, device: str) -> Tensor | None:
    """Documents of each row by number, int64."""
    if not case.documents:
        return None
    mean = torch.log(torch.tensor(float(case.documents))) - SPREAD**2 / 2
    generator = torch.Generator().manual_seed(case.S)
    lengths = torch.empty(case.B, 256).log_normal_(mean.item(), SPREAD, generator=generator).long() + 1
    assert lengths.sum(1).min() >= case.S, "the documents fill the rows"
    place_BS = torch.arange(case.S).expand(case.B, -1).contiguous()
    return torch.searchsorted(lengths.cumsum(1), place_BS, right=True).to(device)


def masks_of(case: Case, device: str) -> Masks:
    documents_BS = packed(case, device)
    first_BS = first_keys(documents_BS, case.window, case.S, torch.device(device))
    sinks_H = torch.randn(case.H, device=device, dtype=torch.bfloat16) if case.has_sinks else None
    return Masks(
        documents_BS=documents_BS,
        allowed_BSS=attention_mask(documents_BS),
        bounds=AttentionBounds.of(first_BS, case.S, case.window),
        sinks_H=sinks_H,
    )


def pairs_of(case: Case, masks: Masks) -> int:
    """Pairs of a query and a key that it sees, in all rows of one head."""
    first_BQ = masks.bounds.first_BQ
    seen = int((torch.arange(case.S, device=first_BQ.device) + 1 - first_BQ).sum())
    return seen * (case.B // first_BQ.shape[0])


def by_torch(case: Case, masks: Masks, backend: str) -> Attention:
    """Attention of a run without our kernel."""
    scale, sinks_H = case.N**-0.5, masks.sinks_H
    seen = masks.allowed_BSS if case.window is None else masks.bounds.seen_BQK().expand(case.B, -1, -1)
    return partial(causal_attention, scale=scale, allowed_BSS=seen, backend=backend, sinks_H=sinks_H)


def ours(case: Case, masks: Masks) -> Attention:
    """Attention by our kernel."""
    return partial(bounded_attention, bounds=masks.bounds, scale=case.N**-0.5, sinks_H=masks.sinks_H)


def by_flex(case: Case, masks: Masks) -> Attention:
    """FlexAttention compiled, with a block mask; a sink scales its output by the sum of its softmax."""
    first_BQ, is_shared = masks.bounds.first_BQ, masks.bounds.first_BQ.shape[0] == 1

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_BQ[0 if is_shared else row, query]) & (key <= query)

    rows = first_BQ.shape[0]
    block_mask = create_block_mask(is_seen, rows, None, case.S, case.S, device=str(first_BQ.device))
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(*heads: Tensor) -> Tensor:
        q_BHSN, k_BGSN, v_BGSM = (x.transpose(1, 2) for x in heads)
        how = {"block_mask": block_mask, "scale": case.N**-0.5, "enable_gqa": case.H != case.G}
        if masks.sinks_H is None:
            return compiled(q_BHSN, k_BGSN, v_BGSM, **how).transpose(1, 2)
        o_BHSM, log_sums_BHS = compiled(q_BHSN, k_BGSN, v_BGSM, return_lse=True, **how)
        share_BHS = torch.sigmoid(log_sums_BHS - masks.sinks_H.float()[:, None])
        return (o_BHSM * share_BHS[..., None]).to(o_BHSM.dtype).transpose(1, 2)

    return attend


def rivals_for(case: Case, masks: Masks, *, has_flex: bool = False) -> dict[str, Attention]:
    """Candidates that run here, torch's first."""
    if not torch.cuda.is_available():
        return {"auto": by_torch(case, masks, "auto")}
    return {
        "cudnn": by_torch(case, masks, "cudnn"),
        "efficient": by_torch(case, masks, "efficient"),
        **({"flex": by_flex(case, masks)} if has_flex else {}),
        "triton": ours(case, masks),
    }


def running(rivals: dict[str, Attention], inputs: list[Tensor]) -> dict[str, Attention]:
    """Those that torch does not refuse."""
    found = {}
    for name, rival in rivals.items():
        try:
            passes(rival, inputs)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0][:100]}")
            continue
        found[name] = rival
    return found


def in_float32(case: Case, masks: Masks, q_BSHN: Tensor, k_BSGN: Tensor, v_BSGM: Tensor) -> Tensor:
    """All scores in memory."""
    place_S = torch.arange(case.S, device=q_BSHN.device)
    seen_BSS = (place_S >= masks.bounds.first_BQ[:, :, None]) & (place_S <= place_S[:, None])
    allowed_BSS = seen_BSS.expand(case.B, -1, -1)
    sinks_H = None if masks.sinks_H is None else masks.sinks_H.float()
    return causal_attention(
        q_BSHN, k_BSGN, v_BSGM, scale=case.N**-0.5, allowed_BSS=allowed_BSS, backend="math", sinks_H=sinks_H
    )


def print_errors(case: Case, *, has_flex: bool) -> dict[str, dict[str, float]]:
    """Decibels of every candidate."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs, masks = draw(case, device), masks_of(case, device)
    expected = passes(partial(in_float32, case, masks), [x.float() for x in inputs])
    print(f"{'dB, ' + case.name:40}" + "".join(f"{name:>8}" for name in NAMES))
    found = {}
    for name, rival in running(rivals_for(case, masks, has_flex=has_flex), inputs).items():
        got = passes(rival, inputs)
        found[name] = {part: decibels(*pair) for part, *pair in zip(NAMES, got, expected, strict=True)}
        print(f"{name:40}" + "".join(f"{value:8.1f}" for value in found[name].values()), flush=True)
    return found


def print_times(case: Case, rounds: int, *, has_flex: bool) -> dict[str, dict[str, float]]:
    """Milliseconds, TFLOP/s and memory of both passes of every candidate, and the speed of each over torch's best."""
    masks, inputs = masks_of(case, "cuda"), draw(case, "cuda")
    rivals, flops = running(rivals_for(case, masks, has_flex=has_flex), inputs), pairs_of(case, masks) * case.H * 2e-9
    widths = {"forward": case.N + case.M, "backward": 3 * case.N + 2 * case.M}
    print(f"{case.name:40}{'fwd ms':>9}{'bwd ms':>9}{'TFLOP/s':>9}{'TFLOP/s':>9}{'GB':>7}{'speed':>8}")
    found: dict[str, dict[str, float]] = {}
    for name, pair in medians(rivals, inputs, rounds).items():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        passes(rivals[name], inputs)
        times = dict(zip(widths, pair, strict=True))
        found[name] = {f"{direction}_ms": time for direction, time in times.items()}
        found[name] |= {f"{direction}_tflops": flops * widths[direction] / time for direction, time in times.items()}
        found[name]["peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    best = min(sum(medians_of(one)) for name, one in found.items() if name != "triton")
    for name, one in found.items():
        one["speed_of_torch"] = best / sum(medians_of(one))
        numbers = "".join(f"{one[f'{what}']:9.3f}" for what in ("forward_ms", "backward_ms"))
        numbers += "".join(f"{one[f'{direction}_tflops']:9.0f}" for direction in widths)
        print(f"{name:40}{numbers}{one['peak_gb']:7.2f}{one['speed_of_torch']:8.2f}", flush=True)
    return found


def medians_of(times: dict[str, float]) -> tuple[float, float]:
    return times["forward_ms"], times["backward_ms"]


if __name__ == "__main__":
    main()
