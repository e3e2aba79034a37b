"""Folders of runs made by hand: a configuration, metrics of steps that were never made, and traces with known times."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.base.spans import ACTIONS
from penstock.config.load import RUN_FILE, dump_toml, load_run
from penstock.layout.actions import Action, Playback, Schedule, even_costs, play
from penstock.layout.schedules import schedule
from tests.trace.synthetic import Job, make
from tests.trace.tiny import operator, ran, span, trace_of, write

PASS_US = 900.0
PHASES = {"data": 0.002, "optimizer": 0.02, "forward": 0.1, "backward": 0.12, "reduce": 0.01}


def metrics_line(step: int, *, layers: int = 3, mfu: float | None = 0.4) -> dict[str, Any]:
    """A line of metrics.jsonl: the loss falls, everything else stays."""
    line: dict[str, Any] = {
        "step": step,
        "loss": 2 + 9 / step,
        "mtp_losses": [],
        "gradient_norm": 1 + 4 / step,
        "learning_rate": 1e-3,
        "tokens_seen": 512 * step,
        "tokens_per_second_per_device": 2048.0,
        "step_seconds": 0.25,
        "phase_seconds": PHASES if step > 1 else None,
        "model_flops_utilization": mfu,
        "peak_memory_bytes": 9_000_000_000,
        "layers": [{"layer": layer, "max_over_mean": 1 + layer / 10} for layer in range(1, layers + 1)],
    }
    return line | ({"evaluation_loss": 2.5 + 9 / step} if step % 5 == 0 else {})


def run_folder(
    path: Path, *overrides: str, steps: int = 12, device: str | None = None, mfu: float | None = 0.4
) -> Path:
    path.mkdir(parents=True)
    run = load_run("debug", overrides)
    (path / RUN_FILE).write_text(dump_toml(run))
    speed = run.tokens_per_step / 0.25
    lines = [metrics_line(step, mfu=mfu) | {"tokens_per_second_per_device": speed} for step in range(1, steps + 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if device is not None:
        start = {"time": "2026-01-01T00:00:00+00:00", "command": "penstock train debug", "device": device}
        start |= {"torch": "2.11", "cuda": "13.0" if "NVIDIA" in device else None}
        (path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return path


def with_world(folder: Path, world: int) -> Path:
    """The same run as if so many ranks had made it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["tokens_per_second_per_device"] /= world
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@cache
def exchanging() -> Job:
    """Four ranks, of which one has more rows, and another one's clock is ahead."""
    return Job(hot_rank=2, offsets_us=(0.0, 340.0, -90.0, 0.0))


def traced_folder(path: Path, *overrides: str) -> Path:
    folder = with_world(run_folder(path, "parallel.expert=4", "training.global_batch=16", *overrides), 4)
    make(exchanging()).write(folder / "profile")
    return folder


@dataclass(frozen=True, kw_only=True)
class Piped:
    schedule: Schedule
    offsets_us: Sequence[float]

    @property
    def playback(self) -> Playback:
        """When each pass really was, in microseconds from the first."""
        costs = even_costs(self.schedule.stages, (PASS_US, PASS_US, PASS_US), send=50.0)
        return play(self.schedule, costs)

    def write(self, folder: Path) -> Path:
        for rank in range(self.schedule.ranks):
            trace = trace_of(*self._events(rank), rank=rank)
            trace["distributedInfo"]["world_size"] = self.schedule.ranks
            for one in trace["traceEvents"]:
                one["ts"] += self.offsets_us[rank]
            write(folder / f"rank-{rank}.json", trace)
        return folder

    def _events(self, rank: int) -> list[dict[str, Any]]:
        """A step: the host launches all passes within a millisecond, the device does them when it can."""
        playback, events = self.playback, [span("step 7", 0.0, 900.0)]
        mine = [one for one in playback.events if one.rank == rank]
        receive = {"Collective name": "recv", "Process Group Name": "3", "Group size": 2, "dtype": "BFloat16"}
        for number, one in enumerate(mine):
            host, start = 10.0 + 5 * number, 1000 + one.start
            # A receive waits on the device from the end of the pass before.
            begin = 1000 + max([0.0, *(other.end for other in mine if other.end <= one.start)])
            events += [
                span(ACTIONS[one.action.kind].format(one.action.stage, one.action.micro_batch), host, 4.5),
                *ran("ncclDevKernel_SendRecv(args)", host + 0.5, begin, max(start - begin, 0.5), **receive),
                *ran("gemm_kernel", host + 2.6, start, one.end - one.start),
            ]
        # All ranks leave the sum of norms together.
        begin, ranks = 1000 + max(one.end for one in mine), list(range(self.schedule.ranks))
        about = {"Collective name": "allreduce", "Process Group Name": "0", "Seq": 4, "Group size": len(ranks)}
        about |= {"Process Group Ranks": str(ranks), "In msg nelems": 1, "Out msg nelems": 1, "dtype": "Float"}
        name, lasts = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", playback.span + 2000 - begin
        return events + ran(name, 880.0, begin, lasts, **about)


def piped(ranks: int = 2, offsets_us: Sequence[float] = (0.0, 700.0)) -> Piped:
    plan = schedule("interleaved", ranks=ranks, stages_per_rank=2, micro_batches=2 * ranks)
    return Piped(schedule=plan, offsets_us=offsets_us)


def piped_folder(path: Path) -> Path:
    overrides = ("parallel.pipeline=2", "pipeline.stages_per_rank=2", "pipeline.schedule=interleaved")
    folder = with_world(run_folder(path, *overrides, "training.micro_batch=2", "training.global_batch=8"), 2)
    piped().write(folder / "profile")
    return folder


def host_trace(rank: int = 0, sum_us: float = 30) -> dict[str, Any]:
    """A step on a CPU: a product within a linear layer, and a sum over ranks on a thread of its own."""
    events = [
        span("step 3", 0, 1000),
        span("micro-batch 0", 5, 700),
        span("layer 1", 10, 400),
        span("attention", 20, 300),
        operator("aten::linear", 30, 200, **{"Input Dims": [[8, 4], [4, 4]]}),
        operator("aten::addmm", 50, 120, **{"Input Dims": [[8, 4], [4, 4]]}),
        span("optimizer", 800, 150),
        operator("aten::_fused_adamw_", 810, 100),
        span("gloo:all_reduce", 790 - sum_us, sum_us) | {"tid": 99},
    ]
    return trace_of(*events, rank=rank) | {"deviceProperties": []}


def host_folder(path: Path, ranks: int = 1) -> Path:
    overrides = ("training.global_batch=8", *([f"parallel.expert={ranks}"] if ranks > 1 else []))
    folder = with_world(run_folder(path, *overrides, device="AMD EPYC", mfu=None), ranks)
    for rank in range(ranks):
        write(folder / "profile" / f"rank-{rank}.json.gz", host_trace(rank))
    return folder


def pass_name(action: Action) -> str:
    return ACTIONS[action.kind].format(action.stage, action.micro_batch).replace(" gradient", "")
