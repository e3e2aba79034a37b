"""Twelve causes of lost time, each planted into the steps of two layouts; the doctor names it and no other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import TraceError
from penstock.trace.analysis import analyse_traces
from penstock.trace.load import decode_trace
from penstock.tune.doctor.diagnosis import Diagnosis, diagnose
from penstock.tune.doctor.evidence import Evidence, PowerFacts, RunFacts
from penstock.tune.doctor.from_trace import evidence_of
from tests.trace.tiny import event, read, span, text_of, trace_of

STEPS, KERNELS, LASTS_US = 6, 20, 400.0
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
HOT = RunFacts(power=PowerFacts(watts=695.0, limit_watts=700.0, clock_mhz=1400.0, limit_mhz=1980.0))


@dataclass
class _Rank:
    events: list[dict[str, Any]] = field(default_factory=list)
    host_us: float = 0.0
    device_us: float = 0.0
    launches: int = 0

    def launch(self, name: str, start_us: float, lasts_us: float, **args: Any) -> None:
        """A kernel and its launch, which takes 5 us of the host."""
        self.launches += 1
        self.events += [
            event("cuda_runtime", "cudaLaunchKernel", self.host_us, 5, correlation=self.launches),
            event("kernel", name, start_us, lasts_us, correlation=self.launches, **{"stream": 7, **args}),
        ]

    def stay(self, category: str, name: str) -> None:
        """5 ms of the host in something."""
        self.launches += 1
        self.events.append(event(category, name, self.host_us, 5000, correlation=1_000_000 + self.launches))
        self.host_us += 5000

    def compute(self, planted: str, *, is_slow: bool) -> None:
        lasts_us = {"graph missing": 100.0}.get(planted, LASTS_US * (1.5 if is_slow else 1.0))
        for number in range(KERNELS):
            start_us = max(self.device_us, self.host_us + 10)
            start_us += 5000 * (planted == "queued work" and number == 10)
            shown_us = lasts_us * (4 if planted == "overrun" and number == 5 else 1)
            self.launch("nvjet_sm90_tst_128x256", start_us, shown_us)
            self.device_us = start_us + lasts_us
            self.host_us += 600 if planted == "graph missing" else 10


HOST = {
    "data wait": ("user_annotation", LOADER),
    "garbage": ("python_function", "Python GC"),
    "allocator": ("cuda_runtime", "cudaMalloc"),
}


def recorded(planted: str, ranks: int) -> dict[int, dict[str, Any]]:
    """Steps of 20 kernels, 8 ms, which the host launches at once; with several ranks an all-reduce ends them."""
    every = [_Rank() for _ in range(ranks)]
    for step in range(STEPS):
        begun_us = [rank.host_us for rank in every]
        for number, rank in enumerate(every):
            if planted in HOST:
                rank.stay(*HOST[planted])
            rank.compute(planted, is_slow=planted == "slow rank" and number == 1)
        if ranks > 1:
            end_us = max(rank.device_us for rank in every) + (6000.0 if planted == "slow link" else 200.0)
            for rank in every:
                sent = {
                    "Collective name": "allreduce",
                    "In msg nelems": 1000,
                    "Out msg nelems": 1000,
                    "dtype": "BFloat16",
                }
                group = {"Group size": ranks, "Process Group Name": "0", "Process Group Ranks": str([*range(ranks)])}
                name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)"
                rank.launch(name, rank.device_us, end_us - rank.device_us, stream=20, **sent, **group)
                rank.device_us, rank.host_us = end_us, rank.host_us + 10
        for rank, begin_us in zip(every, begun_us, strict=True):
            ahead_us = 30_000.0 if planted == "backlog" else 0.0
            wait_us = max(0.0, rank.device_us - ahead_us - rank.host_us)
            if wait_us:
                rank.events.append(event("cuda_runtime", "cudaDeviceSynchronize", rank.host_us, wait_us))
            rank.host_us += wait_us + 20
            rank.events.append(span(f"ProfilerStep#{step}", begin_us, rank.host_us - begin_us))
    files = {}
    for number, rank in enumerate(every):
        for moved in rank.events:
            moved["ts"] += 3000.0 * number * (planted == "clock skew")
        files[number] = trace_of(*rank.events, rank=number)
        files[number]["distributedInfo"]["world_size"] = ranks
    return files


def examined(planted: str, ranks: int) -> tuple[Evidence, Diagnosis]:
    traces = {rank: read(content) for rank, content in recorded(planted, ranks).items()}
    evidence = evidence_of(analyse_traces(traces), HOT if planted == "throttled" else RunFacts())
    return evidence, diagnose(evidence)


FOUND: Mapping[str, tuple[str, list[str], str]] = {
    "nothing": ("compute", [], ""),
    "queued work": ("stall", [], ""),
    "throttled": ("power", ["power-holds-the-clock"], ""),
    "slow rank": ("compute", ["no-rank-is-late"], ""),
    "slow link": ("communication", [], ""),
    "data wait": ("data", ["rows-ahead"], ""),
    "garbage": ("host", ["garbage-between-steps"], ""),
    "allocator": ("host", ["memory-is-kept"], ""),
    "graph missing": ("host", ["launches-in-one-call"], ""),
    "clock skew": ("compute", [], ""),
    "backlog": ("compute", [], "cut steps by the launches of their events"),
    "overrun": ("compute", [], "last beyond the next of their stream"),
}
"""Bottleneck, first remedy, and what a note says."""
OF_RANKS = ("slow rank", "slow link", "clock skew")


@pytest.mark.parametrize(
    ("planted", "ranks"),
    [(planted, ranks) for planted in FOUND for ranks in ((2, 4) if planted in OF_RANKS else (1, 2))],
)
def test_a_planted_cause_is_named_and_no_other(planted: str, ranks: int) -> None:
    evidence, verdict = examined(planted, ranks)
    wall, first, noted = FOUND[planted]
    if (planted, ranks) == ("slow rank", 4):  # three of four ranks wait for it
        wall = "communication"
        assert "late: rank 1 (its computing)" in verdict.sentence
    assert verdict.bottleneck == wall
    assert [remedy.rule for remedy in verdict.remedies][: max(1, len(first))] == first
    assert [(late.rank, late.cause) for late in evidence.late] == ([(1, "compute")] if planted == "slow rank" else [])
    assert bool(noted) <= any(noted in note for note in verdict.notes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recording_that_was_cut_is_refused_as_such(ranks: int) -> None:
    for content in recorded("nothing", ranks).values():
        text = text_of(content)
        with pytest.raises(TraceError, match="or damaged"):
            decode_trace(text[: len(text) // 2], path=Path("rank-0.json"))
