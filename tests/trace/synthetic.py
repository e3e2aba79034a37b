"""Traces of a training that never ran, with the truth about them.

Every rank has a host that launches, and streams that run what was launched once its time has come. Operators are met
in the order of a step; for a collective all ranks' kernels begin when their own rank gets there, and end together,
`pure_us` after the last came. So waiting, order and imbalance are known by construction. The timeline is counted from
the events that were written, by a sweep over their ends that shares nothing with the product.

    make(Job(slow_rank=1, offsets_us=(0.0, 80.0, -310.0, 0.0))).write(folder)

The files look like those of `torch.profiler` (Kineto): the same categories, names and arguments. What goes wrong in a
`Job` is switched on by its fields. Times are microseconds with three decimals.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.trace.events import Trace
from tests.trace import synthetic_job as parts
from tests.trace.synthetic_job import GEMM, MEMORY_BYTES_PER_US, Job, Meeting, Truth, Work, matmul
from tests.trace.tiny import read

Event = dict[str, Any]

BEGIN_US = 7_400_000_000.0
LINK_BYTES_PER_US = 1.7e5
LATENCY_US = 17.5
LAUNCH_US = 3.2
MAIN, EXCHANGE, GRADIENTS = 7, 16, 24
WORLD, EXPERT_GROUP = "0", "11"
NCCL = "ncclDevKernel_{}(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True)
class Traces:
    """What a job leaves: one file's content for each rank, and the truth."""

    files: tuple[dict[str, Any], ...]
    truth: Truth

    def ranks(self, **more: Any) -> dict[int, Trace]:
        """The traces as they are read, with more entries beside the events."""
        return {rank: read(content | more) for rank, content in enumerate(self.files)}

    def write(self, folder: Path) -> Path:
        """Write `rank{r}_trace.json.gz` for each rank and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank, content in enumerate(self.files):
            text = json.dumps(content, separators=(",", ":")).encode()
            (folder / f"rank{rank}_trace.json.gz").write_bytes(gzip.compress(text, compresslevel=1, mtime=0))
        return folder


@dataclass
class _Rank:
    host_us: float = 0.0
    streams: dict[int, float] = field(default_factory=lambda: {MAIN: 0.0, EXCHANGE: 0.0, GRADIENTS: 0.0})
    events: list[Event] = field(default_factory=list)
    launches: int = 0

    def add(self, category: str, name: str, begin_us: float, us: float, **args: Any) -> Event:
        event = {"ph": "X", "cat": category, "name": name, "ts": begin_us, "dur": us, "args": args}
        self.events.append(event)
        return event


def make(job: Job) -> Traces:
    run = _Run(job)
    for step in range(job.steps):
        run.step(step)
    return Traces(tuple(run.content(rank) for rank in range(job.ranks)), run.truth())


class _Run:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.ranks = [_Rank() for _ in range(job.ranks)]
        self.random = np.random.default_rng(job.seed)
        self.meetings: list[Meeting] = []
        self.kernels: list[list[Event]] = []
        self.rows: list[list[tuple[int, ...]]] = []
        self.thread = 0

    # ---------------------------------------------------------------------------------------------------- a step

    def step(self, step: int) -> None:
        job = self.job
        self.rows.append([])
        with self.span(f"ProfilerStep#{step + 5}"):
            layers = [self.forward(layer) for layer in range(job.layers)]
            with self.span("loss"):
                self.compute(matmul(job, "loss", "aten::mm", GEMM, (job.tokens, job.hidden, 16 * job.hidden)))
            self.thread = 1
            with self.span("backward"):
                for sent_SD, works in reversed(layers):
                    self.backward(sent_SD, works)
            self.thread = 0
            with self.span("optimizer"):
                self.optimizer()
            self.wait_for_device("cudaDeviceSynchronize")

    def forward(self, layer: int) -> tuple[np.ndarray, list[Work]]:
        """One layer; returns the rows from each rank to each, and the work that backward repeats."""
        job = self.job
        for rank in self.ranks:
            rank.host_us += job.stall_us
        sent_SD = parts.rows_sent(job, self.random)
        self.rows[-1].append(tuple(int(n) for n in sent_SD.sum(axis=0)))
        before, inside = parts.attention(job), parts.experts(job, sent_SD.sum(axis=0))
        after = [parts.unpermute(job), *parts.shared(job)]
        for span in ("attention", "route"):
            with self.span(span):
                for work in (one for one in before if one.span == span):
                    self.compute(work)
                if span == "route":
                    self.count_on_host()
        with self.span("dispatch"):
            self.exchange("dispatch", sent_SD)
        with self.span("experts"):
            for work in inside:
                self.compute(work)
        with self.span("combine"):
            self.exchange("combine", sent_SD.T)
            self.compute(after[0])
        for work in after[1:]:
            with self.span(work.span):
                self.compute(work)
        return sent_SD, [*before, *inside, *after]

    def backward(self, sent_SD: np.ndarray, works: list[Work]) -> None:
        """Backward of a layer: the gradients of combine travel like rows, those of dispatch return."""
        for work in reversed([one for one in works if one.span in ("combine", "shared")]):
            self.compute(work, 2.0 if work.span == "shared" else 1.0)
        self.exchange("dispatch", sent_SD)
        for work in reversed([one for one in works if one.span == "experts"]):
            self.compute(work, 2.0)
        self.exchange("combine", sent_SD.T)
        for work in reversed([one for one in works if one.span not in ("experts", "combine", "shared")]):
            self.compute(work, 2.2)
        size = 3 * self.job.hidden * self.job.hidden * self.job.ranks
        self.collective(WORLD, "_reduce_scatter_base", GRADIENTS, (size, size // self.job.ranks))

    def optimizer(self) -> None:
        job = self.job
        size = 3 * job.hidden * job.hidden * job.layers
        for rank in self.ranks:
            rank.streams[MAIN] = max(rank.streams.values())
        kernel = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >"
        us = [round(16 * size / MEMORY_BYTES_PER_US, 3)] * job.ranks
        dims = [[[[size]]]] * job.ranks
        self.compute(Work(span="optimizer", op="aten::_fused_adamw_", kernel=kernel, us=us, dims=dims))
        self.collective(WORLD, "_allgather_base", MAIN, (size, size * job.ranks))

    # ------------------------------------------------------------------------------------------------- operators

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A region that the program named, on the host and, as Kineto draws it, on the device."""
        begins = [(rank.host_us, len(rank.events)) for rank in self.ranks]
        yield
        for rank, (begin, first) in zip(self.ranks, begins, strict=True):
            run = [e for e in rank.events[first:] if e["cat"] == "kernel" and e["args"]["stream"] == MAIN]
            rank.add("user_annotation", name, begin, rank.host_us - begin)["tid"] = 900
            if run:
                end = max(event["ts"] + event["dur"] for event in run)
                rank.add("gpu_user_annotation", name, run[0]["ts"], end - run[0]["ts"])["tid"] = MAIN

    def compute(self, work: Work, factor: float = 1.0) -> None:
        for number, rank in enumerate(self.ranks):
            slow = self.job.slow if self.job.slows_all and number == self.job.slow_rank else 1.0
            us = round(work.us[number] * factor * slow, 3)
            kinds = ["c10::BFloat16"] * len(work.dims[number])
            self.launch(rank, work.op, work.kernel, us, **{"Input Dims": work.dims[number], "Input type": kinds})

    def launch(
        self, rank: _Rank, op: str, kernel: str, us: float, stream: int = MAIN, category: str = "kernel", **args: Any
    ) -> Event:
        """An operator, its launch and its kernel. Times of the stream follow; the caller may lengthen the kernel."""
        rank.launches += 1
        identity = {"External id": rank.launches + 40}
        begin = rank.host_us
        thread = 900 + self.thread
        if op:
            rank.add("cpu_op", op, begin, 2.4 + LAUNCH_US, **identity, **args)["tid"] = thread
        runtime = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}
        link = {**identity, "correlation": rank.launches + 7000}
        rank.add("cuda_runtime", runtime[category], begin + 1.2, LAUNCH_US, **link)["tid"] = thread
        rank.host_us = begin + 6.4
        start = round(max(rank.streams[stream] + 0.8, rank.host_us), 3)
        event = rank.add(category, kernel, start, us, **link, stream=stream, device=0)
        event["tid"] = stream
        rank.streams[stream] = start + us
        return event

    def wait_for_device(self, call: str, stream: int | None = None) -> None:
        for rank in self.ranks:
            end = max(rank.streams.values()) if stream is None else rank.streams[stream]
            us = max(1.0, round(end + 2.5 - rank.host_us, 3))
            rank.add("cuda_runtime", call, rank.host_us, us, correlation=0)["tid"] = 900 + self.thread
            rank.host_us = round(rank.host_us + us + 4.0, 3)

    def count_on_host(self) -> None:
        """Counters are cleared; if rows travel by all-to-all the host must know their numbers."""
        for rank in self.ranks:
            self.launch(rank, "aten::zero_", "Memset (Device)", 1.4, category="gpu_memset", bytes=4 * self.job.experts)
        if self.job.dispatch == "all_to_all" and not self.job.is_even:
            for rank in self.ranks:
                self.launch(rank, "aten::copy_", "Memcpy DtoH (Device -> Pinned)", 2.2, category="gpu_memcpy")
            self.wait_for_device("cudaStreamSynchronize", MAIN)

    # ----------------------------------------------------------------------------------------------- exchanges

    def exchange(self, direction: str, sent_SD: np.ndarray) -> None:
        """Rows between ranks; row s, column d of `sent_SD` is what s sends to d."""
        row = 2 * self.job.hidden
        if self.job.dispatch == "all_to_all":
            name = "all_to_all" if self.job.is_even else "all_to_allv"
            self.collective(EXPERT_GROUP, name, EXCHANGE, (0, 0), sent_SD)
            return
        sent = sent_SD.sum(axis=1) * parts.distinct(self.job)
        us = [LATENCY_US + float(n) * row / LINK_BYTES_PER_US for n in sent]
        if self.job.dispatch == "deep_ep":
            name = f"void deep_ep::intranode::{direction}<{self.job.ranks}, 768, 8192>(int4*, float*, int*, int)"
            self.meet(name, EXCHANGE, max(us))
            return
        push, take = ("push_rows", "take_rows") if direction == "dispatch" else ("return_rows", "sum_ranks")
        for rank, own in zip(self.ranks, us, strict=True):
            rank.streams[EXCHANGE] = rank.streams[MAIN]
            self.launch(rank, "", f"{push}_kernel", round(own, 3), EXCHANGE)
        if direction == "dispatch":
            self.meet("wait_kernel", MAIN, 4.4)
        self.meet(f"{take}_kernel", MAIN, max(us) + 3.3)

    def meet(self, name: str, stream: int, pure_us: float) -> None:
        """A kernel on every rank that ends when all ranks' parts are there, without any library's metadata."""
        events = [self._ready(rank, stream, "", name) for rank in self.ranks]
        self._end_together(events, stream, pure_us)
        self.meetings.append(_meeting("", len(self.meetings), name, events, [0] * len(events)))

    def collective(
        self, group: str, name: str, stream: int, sizes: tuple[int, int], sent_SD: np.ndarray | None = None
    ) -> None:
        """A collective of NCCL over all ranks, with what the profiler writes down about it."""
        job, seq = self.job, sum(1 for one in self.meetings if one.group == group)
        moved = max(sizes) * (job.ranks - 1) / job.ranks  # elements of 2 bytes over the slowest link
        if sent_SD is not None:
            moved = job.hidden * float(max(sent_SD.sum(axis=0).max(), sent_SD.sum(axis=1).max()))
        pure = LATENCY_US + 2 * moved / LINK_BYTES_PER_US
        kernel = {"_reduce_scatter_base": "ReduceScatter_Sum_bf16_RING_LL", "_allgather_base": "AllGather_RING_LL"}
        events, sent = [], []
        for number, rank in enumerate(self.ranks):
            about = _about(job, group, name, sizes) | ({"Seq": seq + 300} if job.has_sequence else {})
            if sent_SD is not None:
                about |= _splits(job, sent_SD, number)
            op, called = f"c10d::{name.removesuffix('v')}_", NCCL.format(kernel.get(name, "SendRecv"))
            event = self._ready(rank, stream, op, called)
            if job.metadata == "kernel":
                event["args"] |= about
            if job.metadata != "none":
                at = {"External id": event["args"]["External id"]}
                comms = rank.add("cpu_op", "record_param_comms", rank.host_us - 5.9, 4.1, **at, **about)
                comms["tid"] = 900 + self.thread
            events.append(event)
            sent.append(2 * max(about["In msg nelems"], about["Out msg nelems"]))
        self._end_together(events, stream, pure)
        self.kernels.append(events)
        self.meetings.append(_meeting(group, seq + 300 * job.has_sequence, name, events, sent))

    def _ready(self, rank: _Rank, stream: int, op: str, kernel: str) -> Event:
        """Launch on a stream that first waits for the main one."""
        rank.streams[stream] = max(rank.streams[stream], rank.streams[MAIN])
        return self.launch(rank, op, kernel, 0.0, stream)

    def _end_together(self, events: list[Event], stream: int, pure_us: float) -> None:
        end = round(max(event["ts"] for event in events) + pure_us, 3)
        for rank, event in zip(self.ranks, events, strict=True):
            event["dur"] = round(end - event["ts"], 3)
            rank.streams[stream] = end
            if stream != GRADIENTS:
                rank.streams[MAIN] = end

    # ------------------------------------------------------------------------------------------------ what is left

    def written(self, rank: int) -> list[Event]:
        """Events of a rank that are in its file."""
        lost = [id(self.kernels[place][rank]) for one, place in self.job.missing if one == rank]
        return [event for event in self.ranks[rank].events if id(event) not in lost]

    def content(self, rank: int) -> dict[str, Any]:
        job = self.job
        ahead = job.offsets_us[rank] if job.offsets_us else 0.0
        events = [_placed(event, rank, BEGIN_US + ahead) for event in self.written(rank)]
        ranks = list(range(job.ranks))
        groups = [{"pg_name": name, "pg_size": job.ranks, "ranks": ranks} for name in (WORLD, EXPERT_GROUP)]
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132, "totalGlobalMem": 150_000_000_000}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": job.ranks, "pg_config": groups},
            "record_shapes": 1,
            "displayTimeUnit": "ms",
            "traceEvents": sorted(events, key=lambda event: event["ts"]),
        }

    def truth(self) -> Truth:
        job = self.job
        return Truth(
            timelines=tuple(parts.timeline(self.written(rank)) for rank in range(job.ranks)),
            meetings=tuple(self.meetings),
            rows=tuple(tuple(layers) for layers in self.rows),
            offsets_us=job.offsets_us or (0.0,) * job.ranks,
        )


def _placed(event: Event, rank: int, begin_us: float) -> Event:
    """An event as the file has it: with its process and thread, on its rank's clock."""
    is_device = event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
    return event | {"pid": rank if is_device else 3000 + rank, "ts": round(begin_us + event["ts"], 3)}


def _meeting(group: str, seq: int, name: str, events: list[Event], sizes: list[int]) -> Meeting:
    latest = max(event["ts"] for event in events)
    waits = tuple(round(latest - event["ts"], 3) for event in events)
    pure = min(event["dur"] for event in events)
    return Meeting(group=group, seq=seq, name=name, pure_us=pure, wait_us=waits, sizes=tuple(sizes))


def _about(job: Job, group: str, name: str, sizes: tuple[int, int]) -> dict[str, Any]:
    about = {"Collective name": name, "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]"}
    about |= {"Process Group Name": group, "Process Group Ranks": str(list(range(job.ranks)))}
    return about | {"Group size": job.ranks, "In msg nelems": sizes[0], "Out msg nelems": sizes[1]}


def _splits(job: Job, sent_SD: np.ndarray, rank: int) -> dict[str, Any]:
    """Sizes of an all-to-all: in numbers of the whole message, in rows of each part."""
    sent, received = sent_SD[rank].tolist(), sent_SD[:, rank].tolist()
    sizes = {"In msg nelems": sum(sent) * job.hidden, "Out msg nelems": sum(received) * job.hidden}
    return sizes if job.is_even else sizes | {"In split size": str(sent), "Out split size": str(received)}
