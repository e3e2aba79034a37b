"""The job of a synthetic trace: sizes, faults, and the operators of a layer with their times on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from typing import Any, Literal

import numpy as np

MATMUL_FLOPS_PER_US = 3.7e8
MEMORY_BYTES_PER_US = 2.6e6
GEMM = "nvjet_tst_192x128_64x5_1x2_h_bz_NNT"
GROUPED = "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<GroupedGemm> >"
POINTWISE = "triton_poi_fused_mul_silu_3"
TOPK = "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>"


@dataclass(frozen=True, kw_only=True)
class Job:
    """The training job, and its faults.

    Attributes:
        dispatch: how rows travel: NCCL's all-to-all, our kernels, or DeepEP's.
        metadata: where the metadata of collectives are: at the kernel, at `record_param_comms`, or nowhere.
        has_sequence: sequence numbers are part of that.
        is_even: every rank sends as many rows to every other.
        slow_rank: whose attention takes `slow` times as long, or all that it computes if `slows_all`.
        hot_rank: whose experts are chosen `hot` times as often.
        offsets_us: how far each rank's clock is ahead.
        missing: (rank, place) of collectives whose kernel is not in the file.
        stall_us: the host does something else before every layer.
        shared: width of the experts that every token passes; 0 if there are none.
        bound: size of the experts' buffers as a multiple of their mean rows; 0 is exactly the rows that they get.
    """

    ranks: int = 4
    steps: int = 2
    layers: int = 3
    tokens: int = 1536
    hidden: int = 1024
    expert_hidden: int = 768
    experts: int = 16
    top_k: int = 4
    dispatch: Literal["all_to_all", "symmetric", "deep_ep"] = "all_to_all"
    metadata: Literal["kernel", "launch", "none"] = "kernel"
    has_sequence: bool = True
    is_even: bool = False
    seed: int = 11
    slow_rank: int | None = None
    slow: float = 1.3
    slows_all: bool = False
    hot_rank: int | None = None
    hot: float = 2.2
    offsets_us: tuple[float, ...] = ()
    missing: tuple[tuple[int, int], ...] = ()
    stall_us: float = 0.0
    shared: int = 0
    bound: float = 0.0


V2_LITE = Job(ranks=4, layers=6, tokens=8192, hidden=2048, expert_hidden=1408, experts=64, top_k=6, shared=2816)
"""In the proportions of DeepSeek-V2-Lite at two rows of 4,096 tokens on each of four H200, with fewer layers."""


@dataclass(frozen=True, kw_only=True)
class Work:
    span: str
    op: str
    kernel: str
    us: Sequence[float]
    dims: Sequence[list[Any]]


def rows_sent(job: Job, random: np.random.Generator) -> np.ndarray:
    slots = job.tokens * job.top_k
    if job.is_even:
        return np.full((job.ranks, job.ranks), slots // job.ranks)
    share_D = np.ones(job.ranks)
    if job.hot_rank is not None:
        share_D[job.hot_rank] = job.hot
    return random.multinomial(slots, share_D / share_D.sum(), size=job.ranks)


def distinct(job: Job) -> float:
    """Tokens over rows, if each token goes once to each rank that has one of its experts, all chosen as often."""
    elsewhere = comb(job.experts - job.experts // job.ranks, job.top_k) / comb(job.experts, job.top_k)
    return (1 - elsewhere) * job.ranks / job.top_k


def matmul(job: Job, span: str, op: str, kernel: str, sizes: tuple[int, int, int], factor: float = 1.0) -> Work:
    """A matrix product of the same size on every rank; only attention is slow on the slow one."""
    rows, inner, columns = sizes
    us = 2 * rows * inner * columns / MATMUL_FLOPS_PER_US * factor + 2.1
    is_slow = span == "attention" and not job.slows_all
    slow = [job.slow if is_slow and rank == job.slow_rank else 1.0 for rank in range(job.ranks)]
    return Work(
        span=span,
        op=op,
        kernel=kernel,
        us=[round(us * one, 3) for one in slow],
        dims=[[[rows, inner], [inner, columns]]] * job.ranks,
    )


def attention(job: Job) -> list[Work]:
    flash = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4> >"
    attend = "aten::_scaled_dot_product_flash_attention"
    return [
        matmul(job, "attention", "aten::mm", GEMM, (job.tokens, job.hidden, 3 * job.hidden)),
        matmul(job, "attention", attend, flash, (job.tokens, 2 * job.hidden, job.tokens), 1.4),
        matmul(job, "attention", "aten::mm", GEMM, (job.tokens, job.hidden, job.hidden)),
        matmul(job, "route", "aten::mm", GEMM, (job.tokens, job.hidden, job.experts)),
        matmul(job, "route", "aten::topk", TOPK, (1, 1, 1)),
    ]


def experts(job: Job, rows_D: np.ndarray) -> list[Work]:
    own, hidden, inner = job.experts // job.ranks, job.hidden, job.expert_hidden
    rows = [int(n) for n in rows_D]
    room = [int(job.bound * job.tokens * job.top_k)] * job.ranks if job.bound else rows
    sizes = ((hidden, 2 * inner), (inner, hidden))
    up, down = (
        Work(
            span="experts",
            op="aten::_grouped_mm",
            kernel=GROUPED,
            us=[round(2 * n * a * b / MATMUL_FLOPS_PER_US + 3.9, 3) for n in rows],
            dims=[[[n, a], [own, a, b], [own]] for n in room],
        )
        for a, b in sizes
    )
    us = [round(6 * n * inner / MEMORY_BYTES_PER_US + 1.7, 3) for n in rows]
    dims = [[[n, inner], [n, inner]] for n in rows]
    return [up, Work(span="experts", op="aten::mul", kernel=POINTWISE, us=us, dims=dims), down]


def shared(job: Job) -> list[Work]:
    if not job.shared:
        return []
    sizes = ((job.tokens, job.hidden, 2 * job.shared), (job.tokens, job.shared, job.hidden))
    return [matmul(job, "shared", "aten::mm", GEMM, one) for one in sizes]


def unpermute(job: Job) -> Work:
    us = round(2 * job.tokens * job.hidden * (job.top_k + 1) / MEMORY_BYTES_PER_US, 3)
    dims = [[[job.tokens, job.hidden], [], [job.tokens * job.top_k]]] * job.ranks
    kernel = "void at::native::indexFuncLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>"
    return Work(span="combine", op="aten::index_add_", kernel=kernel, us=[us] * job.ranks, dims=dims)


COMMUNICATION = ("nccl", "deep_ep", "push_rows", "take_rows", "return_rows", "sum_ranks", "wait_kernel")


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A collective: time from the last arrival to the end, each rank's wait for the last, bytes of the larger side."""

    group: str
    seq: int
    name: str
    pure_us: float
    wait_us: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def last(self) -> int | None:
        """The last rank; None if no rank waited."""
        return self.wait_us.index(0.0) if max(self.wait_us) else None


@dataclass(frozen=True, kw_only=True)
class Truth:
    timelines: tuple[dict[str, float], ...]
    meetings: tuple[Meeting, ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    offsets_us: tuple[float, ...]

    def times_last(self) -> dict[int, int]:
        lasts = [one.last for one in self.meetings if one.last is not None]
        return {rank: lasts.count(rank) for rank in sorted(set(lasts))}

    def caused_wait_us(self) -> dict[int, float]:
        cost: dict[int, float] = {}
        for one in self.meetings:
            if one.last is not None:
                cost[one.last] = cost.get(one.last, 0.0) + sum(one.wait_us)
        return cost


def timeline(events: list[dict[str, Any]]) -> dict[str, float]:
    """Total, busy, compute, communication, exposed and idle time of a rank, in microseconds, moment by moment."""
    ends = []
    for event in events:
        kind = _kind(event)
        if kind is not None:
            ends += [(event["ts"], kind, 1), (event["ts"] + event["dur"], kind, -1)]
    names = ("busy", "compute", "communication", "exposed_communication", "memcpy", "exposed_memcpy", "idle")
    sums = dict.fromkeys(names, 0.0)
    running = {"compute": 0, "communication": 0, "memcpy": 0}
    ends.sort(key=lambda end: end[0])
    for (begin, kind, change), (end, _, _) in pairwise(ends):
        running[kind] += change
        for name in _true_now(running):
            sums[name] += end - begin
    return {"total": ends[-1][0] - ends[0][0]} | sums


def _true_now(running: dict[str, int]) -> list[str]:
    names = [name for name, number in running.items() if number]
    if not names:
        return ["idle"]
    if names == ["communication"] or names == ["communication", "memcpy"]:
        names = [*names, "exposed_communication"]
    if names == ["memcpy"]:
        names = [*names, "exposed_memcpy"]
    return [*names, "busy"]


def _kind(event: dict[str, Any]) -> str | None:
    if event["cat"] == "gpu_memcpy":
        return "memcpy"
    if event["cat"] == "gpu_memset":
        return "compute"
    if event["cat"] != "kernel":
        return None
    return "communication" if any(name in event["name"] for name in COMMUNICATION) else "compute"
