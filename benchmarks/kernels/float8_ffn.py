"""Whole networks in 8 bits beside the same in 16, forward and backward, as training runs them on one GPU.

    python -m benchmarks.kernels.float8_ffn --output float8_ffn.json
    python -m benchmarks.kernels.float8_ffn --only "V2-Lite"
    TRITON_INTERPRET=1 python -m benchmarks.kernels.float8_ffn --tiny          # on a CPU: does it run?

In a step hardly anything is quantized alone: the norm, SwiGLU and dispatch leave 8 bits behind them. So here is what
`benchmarks.kernels.float8_products` leaves out: the experts (`penstock.kernels.expert_ffn` and that of
`penstock.kernels.float8`), and dense products behind a norm (`benchmarks.kernels.float8_networks`).

Experts are those of one rank of DeepSeek-V2-Lite and Qwen3-30B-A3B on 4 GPUs, and of a layer as wide as DeepSeek-V3's
with 64 experts on 8. Rows come as the symmetric dispatcher brings them (`gathered`: all ranks' tokens, an index, its
inverse and some room) or in the experts' order (`in place`), evenly or skewed. With `rows in 8 bits` they come packed,
as dispatch sends them; otherwise the network quantizes them, and that counts. Weights are quantized once an optimizer
step: `copies` says how long it takes, nothing else counts it.

Each result is held against float32 before anything is timed. All times are of replayed graphs
(`benchmarks.kernels.measure`), medians over turns; TFLOP/s are of forward and backward together. What was measured is
printed and written as soon as it is there.
"""

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels import float8_networks
from benchmarks.kernels.float8_layers import FORM, RECIPES
from benchmarks.kernels.float8_networks import PLAIN, Network, dense_network, measure, normal
from benchmarks.kernels.grouped_gemm import SHARES, Share, skewed_counts
from benchmarks.kernels.measure import DEVICE, ON_GPU, Ways, burn, replay_in_turns
from penstock.kernels import expert_ffn as in_16_bits
from penstock.kernels import reference
from penstock.kernels.float8 import expert_ffn as in_8_bits
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import BLOCKWISE, Recipe, as_quantized
from penstock.kernels.float8.triton_operators import TRITON
from penstock.kernels.permute import order_local_rows

TOP_K = {"V3 8 experts": 8, "V2-Lite EP4": 6, "Qwen3 EP4": 8, "tiny": 2}
"""Experts that a token chooses, of all ranks'; of the shares that are measured."""

TINY = Share("tiny", experts=3, rows_each=30, hidden=128, ffn=128, tokens=60)

ROOM = 1.05
"""Places over the rows that came, as in a layer whose shapes must not depend on the routing."""


@dataclass(frozen=True)
class Matrices:
    """A rank's experts: weights, their copies in 8 bits, and sums of gradients."""

    gate_up_eFD: Tensor
    down_eDF: Tensor
    copies: in_8_bits.ExpertCopies
    sums: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rows:
    """What a dispatcher brings; fields as those of `penstock.moe.dispatch.contract.ExpertRows`."""

    x_ND: Tensor
    counts_e: Tensor
    weights_R: Tensor
    index_R: Tensor | None = None
    places_NK: Tensor | None = None
    only_last: bool = False


def main() -> None:
    options = record.parser(
        __doc__,
        rounds=(6, "turns that each way takes"),
        only=("", "networks whose name contains this"),
        tiny=(False, "small networks, to see that it runs"),
    ).parse_args()
    if ON_GPU:
        burn(seconds=2.0)
    rows: list[dict[str, Any]] = []
    copies: list[dict[str, Any]] = []
    for network in networks(options.only, options.rounds, copies, tiny=options.tiny):
        rows.append(measure(network, options.rounds))
        record.show(rows[-1])
        record.write(options, {"rows": rows, "copies": copies}, triton=triton.__version__)
        del network


def networks(only: str, rounds: int, copies: list[dict[str, Any]], *, tiny: bool) -> Iterator[Network]:
    """Networks whose name is asked for: of experts, and dense ones; the memory of each is free before the next."""
    for share in [TINY] if tiny else [share for share in SHARES if share.name in TOP_K]:
        yield from experts_of(share, only, rounds, copies)
    for shape in float8_networks.TINY if tiny else float8_networks.DENSE:
        if only in shape[0]:
            free()
            yield dense_network(*shape)


def free() -> None:
    """Give back the memory of what is over, so that the largest network decides what is needed."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def experts_of(share: Share, only: str, rounds: int, copies: list[dict[str, Any]]) -> Iterator[Network]:
    """The networks of a share whose name is asked for; what the copies of its weights take is added to `copies`."""
    cases = {
        f"{share.name}, {'gathered' if gathered else 'in place'}{', skewed' if skewed else ''}": (gathered, skewed)
        for gathered in (True, False)
        for skewed in (False, True)
    }
    asked = {name: case for name, case in cases.items() if only in name}
    if not asked:
        return
    generator = torch.Generator(DEVICE).manual_seed(0)
    matrices = draw_matrices(share, generator)
    copies.append({"experts": share.name, "ms": time_of_copies(matrices, rounds)})
    for name, (gathered, skewed) in asked.items():
        free()
        rows = draw_rows(share, generator, skewed)
        yield network_of(name, rows if gathered else placed(rows), matrices, generator)
        del rows


def rule_of(recipe: Recipe) -> Float8Rule:
    """Experts by a recipe, by our kernels."""
    return Float8Rule(experts=recipe, forward=FORM, gradient=FORM, operators=TRITON)


def draw_matrices(share: Share, generator: torch.Generator) -> Matrices:
    """Weights that keep the size of what they multiply. All recipes cut weights alike, so one set of copies will do."""
    assert len({(recipe.weights, recipe.scaling) for recipe in RECIPES.values()}) == 1, "copies for each recipe"
    gate_up_eFD = normal(generator, share.experts, 2 * share.ffn, share.hidden) / share.hidden**0.5
    down_eDF = normal(generator, share.experts, share.hidden, share.ffn) / share.ffn**0.5
    copies = in_8_bits.copy_experts(gate_up_eFD, down_eDF, rule_of(BLOCKWISE))
    sums = torch.zeros(gate_up_eFD.shape, device=DEVICE), torch.zeros(down_eDF.shape, device=DEVICE)
    return Matrices(gate_up_eFD.requires_grad_(), down_eDF.requires_grad_(), copies, sums)


@torch.no_grad()
def time_of_copies(matrices: Matrices, rounds: int) -> float:
    """Milliseconds that an optimizer step takes to quantize both matrices for both passes, into the same memory."""

    def copy() -> Tensor:
        given = matrices.gate_up_eFD, matrices.down_eDF, rule_of(BLOCKWISE), matrices.copies
        return in_8_bits.copy_experts(*given).down.backward.values

    return replay_in_turns({"copy": copy}, rounds).milliseconds["copy"]


def draw_rows(share: Share, generator: torch.Generator, skewed: bool) -> Rows:
    """Rows of all ranks' tokens, and the places that their choices of our experts have.

    A token with more of our experts than it can choose loses some, so a few rows are missing from the share's count.
    """
    experts, tokens, top_k = share.experts, share.tokens, TOP_K[share.name]
    rows = experts * share.rows_each
    counts = skewed_counts(experts, rows) if skewed else [share.rows_each] * experts
    chosen_Ne = torch.zeros(tokens, experts, device=DEVICE)
    for expert, count in enumerate(counts):
        chosen_Ne[torch.randperm(tokens, generator=generator, device=DEVICE)[:count], expert] = 1
    is_chosen_NK, experts_NK = chosen_Ne.topk(min(top_k, experts))
    others_NK = experts_NK.new_full((tokens, top_k), experts)
    others_NK[:, : experts_NK.shape[1]] = torch.where(is_chosen_NK > 0, experts_NK, experts)
    weights_NK = torch.rand(tokens, top_k, generator=generator, device=DEVICE) + 0.1
    room = math.ceil(ROOM * rows)
    arrivals = order_local_rows(others_NK, weights_NK, range(experts), room)
    x_ND = normal(generator, tokens, share.hidden)
    weights_R = arrivals.weights_R.requires_grad_()
    return Rows(x_ND.requires_grad_(), arrivals.counts_e, weights_R, arrivals.index_R, arrivals.places_NK, True)


@torch.no_grad()
def placed(rows: Rows) -> Rows:
    """The same rows where the experts want them, without room for more."""
    assert rows.index_R is not None, "not in place yet"
    used = int(rows.counts_e.sum())
    x_RD = rows.x_ND[rows.index_R[:used]].requires_grad_()
    return Rows(x_RD, rows.counts_e, rows.weights_R[:used].clone().requires_grad_())


def network_of(name: str, rows: Rows, matrices: Matrices, generator: torch.Generator) -> Network:
    """The experts over these rows, in 16 bits and by each recipe."""
    used, hidden = int(rows.counts_e.sum()), rows.x_ND.shape[1]
    dy_RD = normal(generator, len(rows.weights_R), hidden)
    dy_RD[used:] = 0
    return Network(
        name=name,
        rows=used,
        flops=2.0 * used * (matrices.gate_up_eFD[0].numel() + matrices.down_eDF[0].numel()),
        leaves=(rows.x_ND, rows.weights_R, matrices.gate_up_eFD, matrices.down_eDF),
        sums=dict(zip(("gate-up", "down"), matrices.sums, strict=True)),
        dy=dy_RD,
        ways=ways_of(rows, matrices),
        exact=partial(exact, rows, matrices, dy_RD),
    )


def ways_of(rows: Rows, matrices: Matrices) -> Ways:
    """In 16 bits; by each recipe from rows in 16 bits, and from rows that came in 8."""
    given = (rows.x_ND, matrices.gate_up_eFD, matrices.down_eDF, rows.counts_e, rows.weights_R, rows.index_R)
    common = {"places_TK": rows.places_NK, "accumulate_into": matrices.sums, "only_last": rows.only_last}
    ways: Ways = {PLAIN: partial(in_16_bits.expert_ffn, *given, **common)}
    for recipe in RECIPES.values():
        ffn = partial(in_8_bits.expert_ffn, *given, float8=rule_of(recipe), copies=matrices.copies, **common)
        packed = TRITON.pack_rows(rows.x_ND.detach(), recipe, FORM)
        ways[recipe.name] = ffn
        came = as_quantized(packed, rows.x_ND.shape[1], recipe, FORM)
        ways[f"{recipe.name}, rows in 8 bits"] = partial(ffn, quantized=came)
    return ways


def exact(rows: Rows, matrices: Matrices, dy_RD: Tensor) -> list[Tensor]:
    """Output and gradients by the definition, in float32."""
    given = (rows.x_ND, matrices.gate_up_eFD, matrices.down_eDF)
    leaves = [leaf.detach().float().requires_grad_() for leaf in given]
    y_RD = reference.expert_ffn(*leaves, rows.counts_e, rows.weights_R.detach(), rows.index_R)
    gradients = torch.autograd.grad(y_RD, leaves, dy_RD.float())
    return [y_RD.detach()[: int(rows.counts_e.sum())], *gradients]


if __name__ == "__main__":
    main()
