"""Random compositions of models, layouts and options beside one process (penstock/prove), counted.

python -m benchmarks.composition --seconds 1200 --log composition.jsonl --output benchmarks/results/composition.json

Each draw is a line of the log; a record that finds a log goes on behind it, and counts all draws of the log. With
--again it plays the faults of the log once more, on the code as it is now, and the record says what they were. With
--processes N, N others draw beside each other, of a seed and with a log each, which join the log in the end. With
--device cuda ranks are GPUs; with --graphs too, captured graphs run beside eager passes. The exit code is 1 if a draw
is not explained.
"""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from penstock.parallel.launch.process import count_gpus
from penstock.prove.composition import Composition, composition_of
from penstock.prove.play import BOUNDS
from penstock.prove.proof import GPU_BOUNDS, LOW_BOUNDS, REPLAYS, Prover, Verdict, is_low, outcomes
from penstock.prove.ranks import Children
from penstock.train.run_folder import temporary_folder

SEED = 29

_PACKAGE_FILE = re.compile(r"/\S*/penstock/")  # in a traceback, wherever the package lies

CAUSES = {
    "rounding": "differs as much",
    "float32": "float32 agrees",
    "distance": "from float32 the two are",
    "other_rounding": "norms that round otherwise",
    "clamp": "the limit of the clamp",
    "quantile": "a quantile lies",
    "keys": "the indexer chose",
    "equal_tokens": "equal to others",
    "capacity": "dropped other slots",
    "router": "chose other experts",
}
"""Why a tie is no fault (penstock/prove/proof.py): the first of these whose words are in its text."""

Line = dict[str, Any]


def main() -> int:
    options = record.parser(
        __doc__,
        seconds=1200.0,
        seed=SEED,
        processes=(1, "that draw; each starts the ranks of its draws"),
        log=Path("composition.jsonl"),
        again=False,
        device="cpu",
        graphs=False,
    ).parse_args()
    options.log.touch()
    if options.processes > 1:
        draw_beside(options.log, options.seed, options.seconds, options.processes)
        options.seconds = 0.0
    ranks = Children(options.device)
    plays = options.again or options.seconds
    gpus = count_gpus() if options.device == "cuda" and plays else 0
    try:
        with temporary_folder("prove") as folder:
            prover = Prover(ranks, folder, gpus, REPLAYS if options.graphs else 0)
            if options.again:
                play_again(prover, options.log)
            if options.seconds:
                play_more(prover, options.log, options.seed, options.seconds)
    finally:
        ranks.close()
    numbers = total(read(options.log))
    print(numbers, flush=True)
    record.write(options, numbers)
    return 1 if numbers["faults"] else 0


def read(log: Path) -> list[Line]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def write(log: Path, lines: Sequence[Line]) -> None:
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def draw_beside(log: Path, seed: int, seconds: float, processes: int) -> None:
    """Let processes draw on this machine's CPU, and add their lines to the log; theirs stay, and are gone on with."""
    logs = {seed + number: log.with_suffix(f".{number}{log.suffix}") for number in range(processes)}
    command = [sys.executable, "-m", "benchmarks.composition", "--seconds", str(seconds)]
    drawing = [subprocess.Popen([*command, "--seed", f"{seed}", "--log", str(log)]) for seed, log in logs.items()]
    for process in drawing:
        process.wait()
    before = [line for line in read(log) if line["seed"] not in logs]
    write(log, before + [line for part in logs.values() for line in read(part)])


def play_more(prover: Prover, log: Path, seed: int, seconds: float) -> None:
    """Draw for a time, behind the draws of this seed in the log."""
    first = 1 + max((line["number"] for line in read(log) if line["seed"] == seed), default=-1)
    last = time.monotonic()
    end = last + seconds
    with log.open("a", buffering=1) as lines:
        for number, verdict in outcomes(prover, seed, first):
            now = time.monotonic()
            facts = {"seed": seed, "number": number, "seconds": now - last, **as_line(verdict)}
            lines.write(json.dumps(facts | ({"steps": prover.replays} if prover.replays else {})) + "\n")
            last = now
            if verdict.kind == "fault":
                print(f"{number}: {verdict.text[-1000:]}\n  {verdict.composition.command}", flush=True)
            if now > end:
                return


def play_again(prover: Prover, log: Path) -> None:
    """Play the faults of the log again, and write what they are now."""
    lines = read(log)
    for line in lines:
        if line["kind"] == "fault":
            line |= {"was": line["text"][-300:], **as_line(prover.judge(composition_in(line)))}
            write(log, lines)


def composition_in(line: Mapping[str, Any]) -> Composition:
    return composition_of(line["ranks"], line["overrides"], line.get("device", "cpu"))


def as_line(outcome: Verdict) -> Line:
    """An outcome as it is in the log."""
    composition = outcome.composition
    figures = {name: float(f"{value:.1e}") for name, value in outcome.figures.items() if value < float("inf")}
    return {
        "kind": outcome.kind,
        "ranks": composition.ranks,
        "device": composition.device,
        "overrides": composition.overrides,
        "text": _PACKAGE_FILE.sub("penstock/", outcome.text),
        "figures": figures,
        "margin": outcome.margin if outcome.margin < float("inf") else None,
    }


def total(lines: Sequence[Line]) -> Line:
    """Counts of a log; what was played is counted by setting. Graphs beside eager passes are counted apart."""
    replays = [line for line in lines if line.get("steps")]
    if replays:
        graphs = total([line | {"steps": 0} for line in replays])
        kept = ("draws", "equal", "refused", "faults", "refusals", "settings")
        rest = total([line for line in lines if not line.get("steps")])
        return rest | {"graphs": {"steps": replays[0]["steps"], **{name: graphs[name] for name in kept}}}
    of_kind: dict[str, list[Line]] = {kind: [] for kind in ("equal", "tie", "refused", "fault")}
    by_width: dict[str, list[Line]] = {"float32": [], "16_bits": [], "8_bits": []}
    for line in lines:
        of_kind[line["kind"]].append(line)
        if line["kind"] == "equal":
            in_8_bits = any(override.startswith("float8.") for override in line["overrides"])
            by_width["8_bits" if in_8_bits else "16_bits" if is_low(composition_in(line)) else "float32"].append(line)
    played = [line for line in lines if line["kind"] != "refused"]
    settings = Counter(axis(override) for line in played for override in line["overrides"])
    on_gpus = any(line.get("device") == "cuda" for line in lines)
    return {
        "draws": len(lines),
        **{kind: len(of_kind[kind]) for kind in ("equal", "tie", "refused")},
        "faults": [
            {"ranks": line["ranks"], "overrides": line["overrides"], "text": line["text"][-300:]}
            for line in of_kind["fault"]
        ],
        "were_faults": [
            {"was": line["was"], "is": line["kind"], "text": line["text"]} for line in lines if "was" in line
        ],
        "seconds": round(sum(line["seconds"] for line in lines)),
        "bounds": {"float32": BOUNDS, "fewer_bits": GPU_BOUNDS if on_gpus else LOW_BOUNDS},
        "largest": {width: largest(agreed) for width, agreed in by_width.items()},
        "ties": [line["text"] for line in of_kind["tie"]],
        "causes": dict(Counter(cause(line["text"]) for line in of_kind["tie"]).most_common()),
        "refusals": dict(Counter(line["text"].partition(";")[0] for line in of_kind["refused"])),
        "ranks": {str(ranks): count for ranks, count in sorted(Counter(line["ranks"] for line in played).items())},
        "settings": dict(sorted(settings.items())),
    }


def cause(text: str) -> str:
    """Why a tie is no fault."""
    return next(name for name, words in CAUSES.items() if words in text)


def largest(lines: Sequence[Line]) -> dict[str, float]:
    """The largest difference of each figure."""
    figures = {name: [line["figures"][name] for line in lines if name in line["figures"]] for name in BOUNDS}
    return {name.replace(" ", "_"): max(values) for name, values in figures.items() if values}


def axis(override: str) -> str:
    """A setting by which draws are counted: short values stay."""
    path, _, value = override.partition("=")
    return override if len(value) <= 14 else path


if __name__ == "__main__":
    sys.exit(main())
