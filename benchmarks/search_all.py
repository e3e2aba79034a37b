"""Every preset searched on clusters of every packaged chip, and random layouts projected: none may end in a traceback.

    nice python -m benchmarks.search_all --output benchmarks/results/search-all.json

One worker process takes the cases one after another, so that a search costs its own time and not the start of torch. A
worker that dies leaves the last line of its traceback as the answer of its case, and a new one goes on. The file is
written as cases end; a later call goes on with the cases that it and the files of `--known` lack. The order is a walk
through all presets, chips and sizes, so that any few dozen cases in a row have each of them. Needs no GPU.

`--layouts N` projects N random layouts of each preset and cluster as `penstock plan --layout` does, instead of
searching: legal ones, ones that do not fit, and ones that are refused by name. They are drawn anew with the same seed.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from penstock.base.errors import PenstockError
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS
from penstock.config.run import Run
from penstock.layout.schedules import SCHEDULES
from penstock.plan.asked_layout import rows_to_share, with_layout
from penstock.plan.hardware_file import known_hardware, parse_cluster
from penstock.plan.project import project
from penstock.plan.projection import Projection
from penstock.plan.search import search
from penstock.plan.search_request import SearchRequest
from penstock.plan.what_if import answer_to
from penstock.tune.kernels import commit_of_code

DEVICES = (8, 16, 32, 64, 72, 128, 256, 512, 1000, 1024, 2048)
LAYOUT_DEVICES = (8, 64, 1000)

WRITTEN = 5.0  # seconds after which a file of layouts is written again; searches are written one by one

Case = dict[str, str]
Row = dict[str, Any]


def cases(options: argparse.Namespace) -> list[Case]:
    """What is asked: in each round every preset once, on a chip and a size that follow those of the preset before."""
    sizes = options.devices or (LAYOUT_DEVICES if options.layouts else DEVICES)
    chips, models = options.chips or known_hardware(), options.models or list(PRESETS)
    clusters = [
        f"{sizes[(at // len(chips) + at % len(chips)) % len(sizes)]}x{chips[at % len(chips)]}"
        for at in range(len(sizes) * len(chips))
    ]
    pairs = [
        {"model": model, "on": clusters[(turn + number) % len(clusters)]}
        for turn in range(len(clusters))
        for number, model in enumerate(models)
    ]
    if not options.layouts:
        return pairs
    return [{**pair, "layout": layout} for pair in pairs for layout in _layouts(pair, options.layouts)]


def _layouts(pair: Case, count: int) -> Iterator[str]:
    """Random layouts; most axes divide the cluster, and many layouts are illegal in another way."""
    draw = random.Random(f"{pair['model']} on {pair['on']}")
    world = int(pair["on"].partition("x")[0])
    model = load_run(pair["model"]).model
    experts = 1 if model.moe is None else model.moe.experts
    for _ in range(count):
        pp = draw.choice([size for size in range(1, model.layers + 3) if world % size == 0])
        rest = world // pp
        tp = draw.choice([size for size in (1, 1, 2, 4, 8) if rest % size == 0])
        cp = draw.choice([size for size in (1, 1, 2, 4) if rest % (tp * size) == 0])
        ep = draw.choice([size for size in range(1, experts + 1) if experts % size == 0 and rest % size == 0])
        etp = draw.choice([size for size in (1, 1, 2, 4) if rest % (ep * size) == 0])
        parts = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp, "micro_batch": draw.choice((1, 1, 2, 4))}
        if pp > 1:
            name = draw.choice(sorted(SCHEDULES))
            shape = SCHEDULES[name]
            most = shape.most or max(shape.fewest, -(-model.layers // pp) + 1)
            parts |= {"schedule": name, "vpp": draw.randint(shape.fewest, most)}
        parts["recompute"] = draw.choice(("none", "none", "norm", "moe", "layer"))
        parts["shard"] = draw.choice(("auto", "auto", "none", "optimizer", "full"))
        yield ",".join(f"{name}={value}" for name, value in parts.items())


def answered(case: Case) -> Row:
    """A case and its answer, with the seconds that it took."""
    begin = time.perf_counter()
    try:
        answer = _layout(case) if "layout" in case else _search(case)
    except PenstockError as error:
        answer = {"refused": str(error).splitlines()[0]}
    return {**case, "seconds": round(time.perf_counter() - begin, 2), **answer}


def _search(case: Case) -> Row:
    run, cluster = load_run(case["model"]), parse_cluster(case["on"])
    rows = rows_to_share(run.training.global_batch, cluster.devices)
    plan = search(SearchRequest(run=run, cluster=cluster, global_batch=rows))
    if plan.candidates:
        return {"considered": plan.considered, "gap": round(plan.gap, 3), **_figures(plan.candidates[0])}
    nearest = plan.refused[0] if plan.refused else None
    return {"considered": plan.considered, "nothing": "" if nearest is None else f"{nearest.rule}: {nearest.reason}"}


def _layout(case: Case) -> Row:
    cluster = parse_cluster(case["on"])
    run: Run = load_run(case["model"])
    choices = dict(part.split("=") for part in case["layout"].split(","))
    asked = with_layout(run, choices, cluster.devices, run.tokens_per_step)
    answer = answer_to(asked, cluster, project)
    return _figures(answer) if isinstance(answer, Projection) else {"refused": f"{answer.rule}: {answer.reason}"}


def _figures(found: Projection) -> Row:
    return {
        "step_seconds": round(found.time.step_seconds, 2),
        "tokens_per_second": round(found.time.tokens_per_second_per_device, 1),
        "model_flops_utilization": round(found.time.model_flops_utilization, 3),
        "memory_bytes": found.memory.total,
        "fits": found.fits,
        "best": str(found.layout),
    }


def work() -> None:
    """Answer cases from standard input, a line of JSON each."""
    for line in sys.stdin:
        print(json.dumps(answered(json.loads(line))), flush=True)


def rows_of(waiting: Sequence[Case]) -> Iterator[Row]:
    """Answers in the order of the cases, from one worker after another."""
    left = list(waiting)
    while left:
        command = [sys.executable, "-m", "benchmarks.search_all", "--worker"]
        # A traceback may be longer than a pipe holds.
        with (
            tempfile.TemporaryFile("w+") as told,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, text=True) as worker,
        ):
            assert worker.stdin is not None and worker.stdout is not None, "both are pipes"
            while left:
                worker.stdin.write(json.dumps(left[0]) + "\n")
                worker.stdin.flush()
                if not (line := worker.stdout.readline()):
                    break
                yield json.loads(line)
                del left[0]
            else:
                return
            worker.wait()
            told.seek(0)
            lines = told.read().strip().splitlines() or [f"exit {worker.returncode}"]
            yield {**left.pop(0), "traceback": lines[-1].rpartition("]: ")[2]}


def main() -> None:
    """See the top of the file."""
    options = record.parser(
        __doc__,
        parts=True,
        worker=(False, "answer cases from standard input"),
        models=([str], "presets; all without it"),
        chips=([str], "all without it"),
        devices=[int],
        layouts=(0, "project so many random layouts of each instead"),
        seconds=(math.inf, "begin no case after these"),
        known=([Path], "leave out cases of these files"),
    ).parse_args()
    if options.worker:
        work()
        return
    if options.join:
        _join(options)
        return
    begin = written = time.perf_counter()
    numbers = _recorded(options.output)
    what = "layouts" if options.layouts else "searches"
    numbers[what] = [row for row in numbers[what] if "traceback" not in row]
    known = {json.dumps(_case(row)) for path in options.known for row in _recorded(path)[what]}
    own = {json.dumps(_case(row)) for row in numbers[what]}
    asked = [case for case in cases(options) if json.dumps(case) not in known]
    waiting = [case for case in record.part_of(options, asked) if json.dumps(case) not in own]
    commit = options.commit or commit_of_code()
    for number, row in enumerate(rows_of(waiting), start=1):
        numbers[what].append({**row, "commit": commit})
        print(json.dumps(row), flush=True)
        now = time.perf_counter()
        is_last = number == len(waiting) or now - begin > options.seconds
        if is_last or now - written > WRITTEN or not options.layouts:
            record.write(options, {**numbers, "tracebacks": _tracebacks(numbers)}, cpus=os.cpu_count())
            written = now
        if is_last:
            break
    if failed := _tracebacks(numbers):
        sys.exit(f"{failed} cases ended in a traceback")


def _join(options: argparse.Namespace) -> None:
    """Write the cases of several files, of one in two files that of the later, each with the torch of its machine."""
    parts = record.parts_of(options)
    numbers: dict[str, list[Row]] = {}
    for what in ("searches", "layouts"):
        rows = {
            json.dumps(_case(row)): {"torch": part["environment"]["torch"]} | row
            for part in parts
            for row in part["numbers"][what]
        }
        numbers[what] = sorted(rows.values(), key=lambda row: (row["model"], row["on"], row.get("layout", "")))
    record.write_joined(options, parts, {"cases": len(cases(options)), "tracebacks": _tracebacks(numbers), **numbers})


def _case(row: Row) -> Case:
    return {name: row[name] for name in ("model", "on", "layout") if name in row}


def _recorded(output: Path | None) -> dict[str, list[Row]]:
    if output is None or not output.exists():
        return {"searches": [], "layouts": []}
    numbers = json.loads(output.read_text(encoding="utf-8"))["numbers"]
    return {name: numbers[name] for name in ("searches", "layouts")}


def _tracebacks(numbers: dict[str, list[Row]]) -> int:
    return sum("traceback" in row for rows in numbers.values() for row in rows)


if __name__ == "__main__":
    main()
