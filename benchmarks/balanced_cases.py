"""Workloads W0 to W9 of balanced dispatch: routings that a seed makes from (workload, step) alone.

The choices of all tokens are drawn at once and then divided among the ranks, so every layout sees one logical routing.

    W0  slots take the experts in turn: equal loads                       overhead of the machinery
    W1  E/8 random experts have 4 times the weight                        heat of experts
    W2  all experts of rank 0 together have twice the even share          heat of a rank
    W3  the hot experts of W1, dealt to the ranks in turn                 must copy nothing
    W4  ranks have 0.5 to 1.5 times the mean tokens, W1's choices         ragged input
    W5  rank 0 gets no rows, and one expert of each other rank gets none  empty groups, bound of the slots
    W6  W2 with another hot rank in each step                             stale plans
    W7  W0, and W2 in every tenth step                                    amortization
    W8  log-normal popularity; the sigma that gives a load of `maxvio`    sweep
    W9  ids of a recorded router, from a file with a checksum             reality

W9 are the choices of a small model with 64 experts after 60 steps on a CPU (`record_routing` of commit `7e946971`).

`maxvio` is the load of the fullest expert over the mean, minus 1. On two ranks W2 cannot give rank 0 twice the share
unless all rows go there: it has 1.6 times the share.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from penstock.moe.balance import even_stride

NAMES = ("W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W9")
RECORDED = Path(__file__).with_name("routing.json")


def all_choices(name: str, step: int, tokens: int, experts: int, top_k: int, ranks: int, maxvio: float = 1.0) -> Tensor:
    """Int64 expert ids of all tokens of all ranks, tokens x top_k; the K experts of a token differ."""
    if name == "W9":
        return _recorded(step, tokens, experts, top_k)
    hot_rank = step % ranks if name == "W6" else 0
    if name == "W0" or (name == "W7" and step % 10):
        slots_TK = torch.arange(tokens * top_k).view(tokens, top_k)
        return slots_TK * even_stride(experts) % experts
    generator = torch.Generator().manual_seed(NAMES.index(name) * 1_000_003 + step)
    noise_TE = -torch.empty(tokens, experts).exponential_(generator=generator).log()  # Gumbel: top-k draws by weight
    per_rank = experts // ranks
    rank_E = torch.arange(experts) // per_rank
    if name in ("W1", "W3", "W4"):
        weight_E = _hot_experts(experts, ranks, generator, spread=name == "W3")
    elif name in ("W2", "W6", "W7"):
        share = min(2.0 / ranks, 0.8)

        def heat(factor: float) -> float:
            chosen = _draw(noise_TE, torch.where(rank_E == hot_rank, factor, 1.0), top_k)
            return float((rank_E[chosen] == hot_rank).float().mean())

        weight_E = torch.where(rank_E == hot_rank, _bisect(heat, share, 1.0, 1e4), 1.0)
    elif name == "W5":
        is_dead_E = (rank_E == 0) | (torch.arange(experts) % per_rank == 0) & torch.tensor(per_rank > 1)
        weight_E = torch.where(is_dead_E, 0.0, 1.0)
        assert int((weight_E > 0).sum()) >= top_k, f"{name} needs {top_k} experts with rows"
    else:
        order_E = torch.randn(experts, generator=generator)

        def violation(sigma: float) -> float:
            loads_E = _draw(noise_TE, (order_E * sigma).exp(), top_k).flatten().bincount(minlength=experts).float()
            return float(loads_E.max() / loads_E.mean()) - 1

        weight_E = (order_E * _bisect(violation, maxvio, 1e-3, 16.0)).exp()
    return _draw(noise_TE, weight_E, top_k)


def tokens_of(name: str, step: int, tokens: int, ranks: int) -> list[int]:
    """Tokens of each rank; `tokens` are those of all."""
    if name != "W4" or ranks == 1:
        return [tokens // ranks] * ranks
    generator = torch.Generator().manual_seed(step)
    half = tokens // ranks // 2
    more = torch.randint(-half, half + 1, (ranks // 2,), generator=generator).tolist()
    return [tokens // ranks + sign * extra for extra in more for sign in (1, -1)]


def imbalance(experts_TK: Tensor, experts: int, ranks: int) -> float:
    """Rows of the fullest rank over the even share."""
    loads = experts_TK.flatten().bincount(minlength=experts).view(ranks, -1).sum(1)
    return float(loads.max() * ranks / loads.sum())


def _draw(noise_TE: Tensor, weight_E: Tensor, top_k: int) -> Tensor:
    return (noise_TE + weight_E.log()).topk(top_k).indices


def _hot_experts(experts: int, ranks: int, generator: torch.Generator, *, spread: bool) -> Tensor:
    hot = max(1, experts // 8)
    chosen = torch.randperm(experts, generator=generator)[:hot]
    if spread:  # the n-th hot expert on rank n % ranks; a remainder would make ranks hot
        hot = max(hot // ranks, 1) * ranks
        number = torch.arange(hot)
        chosen = number % ranks * (experts // ranks) + number // ranks
    return torch.ones(experts).index_fill(0, chosen, 4.0)


def _bisect(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Geometric bisection of a growing function."""
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return high


def _recorded(step: int, tokens: int, experts: int, top_k: int, path: Path = RECORDED) -> Tensor:
    """Ids of a recorded router, repeated if it saw fewer tokens; with fewer experts than it had, neighbours are one."""
    file = json.loads(path.read_text())
    packed = bytes.fromhex(file["ids"])
    assert hashlib.sha256(packed).hexdigest() == file["sha256"], f"{path.name} is damaged"
    ids_LTK = torch.frombuffer(bytearray(packed), dtype=torch.uint8).view(*file["shape"]).long()
    ids_TK = ids_LTK[step % len(ids_LTK)]
    rows = torch.arange(tokens) % len(ids_TK)
    # More choices than the recorded router made: neighbours of the chosen experts.
    wide_TK = torch.cat([(ids_TK + shift) % file["experts"] for shift in range(-(-top_k // ids_TK.shape[1]))], 1)
    chosen_TK = wide_TK[rows, :top_k]
    if experts < file["experts"]:
        chosen_TK = chosen_TK * experts // file["experts"]
    return _without_repeats(chosen_TK, experts)


def _without_repeats(ids_TK: Tensor, experts: int) -> Tensor:
    """Each repeated choice of a token becomes the next expert that it did not choose."""
    ids_TK = ids_TK.clone()
    for k in range(1, ids_TK.shape[1]):
        while (repeated := (ids_TK[:, :k] == ids_TK[:, k : k + 1]).any(1)).any():
            ids_TK[repeated, k] = (ids_TK[repeated, k] + 1) % experts
    return ids_TK
