"""Faults at random steps of a tiny run: what is saved, what is printed, and whether the printed command goes on.

python -m benchmarks.data_faults --draws 100 --disk --output benchmarks/results/data-faults.json

Each draw trains on JSON Lines in this process, with a fault of its kind: a record that cannot be read, a data file that
is cut or removed after a step, a disk that is full (`--disk`, which mounts a small file system and so needs root), a
metrics file, a TensorBoard or an output that cannot be written any more. A draw is right if

    1. the run ends with one line of error, or goes on without TensorBoard;
    2. every complete step is saved, or on a full disk an older checkpoint is whole;
    3. the printed command ends the run, after the file is put back or space is free;
    4. its last loss is that of a run without the fault, or with `data.corrupt=skip` from its begin.
"""

import errno
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks import record
from penstock.cli.main import PIPE_CLOSED
from penstock.config.load import dump_toml
from penstock.train.checkpoint import CheckpointStore
from penstock.train.metrics import MetricsFile
from penstock.train.observer import StepReport
from penstock.train.sinks import TensorBoard
from tests.cli.answers import Printed, outcome
from tests.train.tiny_run import TRAINING, tiny_run

STEPS, FILES, DOCUMENTS = 8, 3, 12  # each document is read in one step at most; 32 of 36 are read
OPTIONS = ("data.source=jsonl", 'data.files="text"', "data.validation_share=0")
OPTIONS += ("evaluation.rows=0", "evaluation.every=0")
SKIP = "data.corrupt=skip"
SEED = 47
DISK_BYTES = 4 << 20
"""Several checkpoints of the tiny run."""

RECORDS: dict[str, Callable[[random.Random], str]] = {
    "null": lambda _: '{"text": null}',
    "wrong type": lambda draw: json.dumps({"text": draw.choice([7, [1], {"a": 1}, True])}),
    "no field": lambda _: '{"body": "x"}',
    "no JSON": lambda draw: '{"text": "abc'[: draw.randint(1, 12)],
}
SINKS = ("metrics closed", "TensorBoard fails", "output closed")
FULL_DISK = "full disk"
KINDS = (*RECORDS, "cut file", "removed file", *SINKS)


@dataclass
class Draw:
    """What happened in a draw."""

    kind: str
    seed: int
    why: str = ""  # empty if all was right
    lost: int = 0  # complete steps that were not saved
    is_reached: bool = True  # False if the fault was in a document that no step read


@dataclass
class Fault:
    """A fault after a step, and its end."""

    step: int
    begin: Callable[[], object]
    end: Callable[[], object]
    made: int = field(default=0)  # complete steps

    def stepped(self, real: Callable[[MetricsFile, StepReport], None]) -> Callable[[MetricsFile, StepReport], None]:
        """Write the line of a step as `real` does, and then begin if it is due."""

        def stepped(metrics: MetricsFile, report: StepReport) -> None:
            self.made = report.step
            real(metrics, report)
            if report.step == self.step:
                self.begin()

        return stepped


def play(kind: str, seed: int) -> Draw:
    """Train with a fault, follow the printed command, and compare. The present folder is empty."""
    draw, found = random.Random(f"{kind} {seed}"), Draw(kind, seed)
    write_text(draw)
    checkpoint = {"every": draw.choice([0, 1, 3]), "keep": 2, "asynchronous": draw.random() < 0.5}
    run = tiny_run(Path("runs"), training=TRAINING.model_copy(update={"steps": STEPS}))
    run = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update=checkpoint)})
    Path("tiny.toml").write_text(dump_toml(run), encoding="utf-8")
    options = (*OPTIONS, f"record.tensorboard={str(kind == 'TensorBoard fails').lower()}", "model.vocab_size=257")
    if kind in RECORDS:
        file = draw.choice(sorted(Path("text").iterdir()))
        lines = file.read_text(encoding="utf-8").splitlines()
        lines[draw.randrange(1, DOCUMENTS)] = RECORDS[kind](draw)  # the first line is read before the run
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with faulty(kind, draw) as fault, patch.object(MetricsFile, "stepped", fault.stepped(MetricsFile.stepped)):
        code, out, err = outcome("train", "tiny.toml", *options)
    fault.end()
    newest = CheckpointStore(Path("runs/tiny/checkpoints"), 0, asynchronous=False).latest() or 0
    found.lost = fault.made - newest
    if code == 0 and kind in (*RECORDS, "cut file", "removed file"):
        found.is_reached = False
        return found
    found.why = wrong_end(kind, code, out, err, fault.made, newest)
    if not found.why:
        resume = shlex.split(err.splitlines()[-1])[2:] if code == 2 else ["train", "runs/tiny", "--resume"]
        skips = SKIP in resume
        code, _, err = outcome(*resume)
        loss, wanted = last_loss("tiny"), reference(options, skips=skips)
        if (code, loss) != (0, wanted):
            found.why = f"{shlex.join(resume)} ends with {code}, loss {loss} instead of {wanted}; {err}"
    return found


def wrong_end(kind: str, code: int, out: str, err: str, made: int, newest: int) -> str:
    """Why the end of a run with a fault is not what it should be; empty if it is."""
    lines = err.splitlines()
    expected = {"TensorBoard fails": 0, "output closed": PIPE_CLOSED}.get(kind, 2)
    if code != expected:
        return f"exit code {code}: {err}"
    if kind == "TensorBoard fails":
        return "" if "TensorBoard is off from here on" in out and newest == STEPS else f"not reported: {out}"
    if newest != made and kind != FULL_DISK:
        return f"step {made} was made, {newest} saved: {err}"
    if code != 2:
        return "" if not err else f"printed {err}"
    is_right = len(lines) == 3 and lines[0].startswith("error: ") and lines[2].startswith("next:  penstock train ")
    cure = "" if kind not in RECORDS or (SKIP in lines[0] and SKIP in lines[2]) else "no cure: "
    return cure + err if cure or not is_right else ""


def reference(options: tuple[str, ...], *, skips: bool) -> float | None:
    """The last loss of a run that nothing disturbed."""
    code, _, err = outcome("train", "tiny.toml", "--name", "undisturbed", *options, *([SKIP] if skips else []))
    assert code == 0, err
    return last_loss("undisturbed")


def last_loss(name: str) -> float | None:
    """Loss of the last step of a run; None if it did not make it."""
    lines = [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]
    return lines[-1]["loss"] if lines and lines[-1]["step"] == STEPS else None


def write_text(draw: random.Random) -> None:
    """Files of documents that are longer than a row of the tiny run."""
    Path("text").mkdir()
    for number in range(FILES):
        texts = ["".join(draw.choices("abcdefgh \n", k=draw.randint(20, 60))) for _ in range(DOCUMENTS)]
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        Path("text", f"{number}.jsonl").write_text(content, encoding="utf-8")


@contextmanager
def faulty(kind: str, draw: random.Random) -> Iterator[Fault]:
    """A fault of this kind, after a random step."""
    step = draw.randint(1, STEPS - 1)
    file = draw.choice(sorted(Path("text").iterdir()))
    content, size, filler = file.read_bytes(), draw.randrange(file.stat().st_size // 2), Path("filler")
    dead = OSError(errno.EIO, os.strerror(errno.EIO))
    patched = ExitStack()

    def fails(owner: Any, name: str, error: OSError) -> Callable[[], object]:
        return lambda: patched.enter_context(patch.object(owner, name, side_effect=error))

    def nothing() -> None: ...

    begin: Callable[[], object] = {
        "cut file": lambda: os.truncate(file, size),
        "removed file": file.unlink,
        FULL_DISK: lambda: fill(filler),
        "metrics closed": fails(MetricsFile, "_write", dead),
        "TensorBoard fails": fails(TensorBoard, "_write", dead),
        "output closed": fails(Printed, "write", BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))),
    }.get(kind, nothing)
    end = {
        "cut file": lambda: file.write_bytes(content),
        "removed file": lambda: file.write_bytes(content),
        FULL_DISK: lambda: filler.unlink(missing_ok=True),
    }.get(kind, nothing)
    with patched:
        yield Fault(step, begin, end)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def draws(count: int, seed: int, kinds: tuple[str, ...]) -> Iterator[Draw]:
    """So many draws whose fault was reached, all kinds in turn."""
    done = 0
    while done < count:
        kind = kinds[done % len(kinds)]
        with TemporaryDirectory(prefix="penstock-faults-") as folder, ExitStack() as stack:
            if kind == FULL_DISK:
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder], check=True)
                stack.callback(subprocess.run, ["umount", folder], check=True)
            with chdir(folder):
                found = play(kind, seed)
        seed += 1
        if found.is_reached:
            done += 1
            yield found


def main() -> int:
    """Play the draws and record them; the exit code is 1 if one was wrong."""
    options = record.parser(__doc__, draws=100, seed=SEED, disk=(False, "also fill disks, as root")).parse_args()
    begin, found = time.monotonic(), []
    for draw in draws(options.draws, options.seed, (*KINDS, *([FULL_DISK] if options.disk else []))):
        found.append(draw)
        if draw.why:
            print(f"{draw.kind}, seed {draw.seed}: {draw.why}", flush=True)
    numbers = {
        "draws": len(found),
        "kinds": dict(Counter(draw.kind for draw in found)),
        "wrong": [vars(draw) for draw in found if draw.why],
        "steps_lost_on_full_disks": [draw.lost for draw in found if draw.kind == FULL_DISK],
        "steps_lost_otherwise": sum(draw.lost for draw in found if draw.kind != FULL_DISK),
        "seconds": round(time.monotonic() - begin),
    }
    print(numbers, flush=True)
    record.write(options, numbers)
    return 1 if numbers["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
