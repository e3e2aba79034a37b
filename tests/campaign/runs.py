"""Small runs in processes that are forks of this one, which must have no threads; and what they have computed."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.load import dump_toml
from penstock.config.run import Checkpoint, Evaluation
from penstock.train import run_folder
from penstock.train.manifest import FACTS, read_manifest
from penstock.train.run_folder import RunFolder
from tests import warm
from tests.train.tiny_run import TRAINING, tiny_run

STEPS, EVERY = 30, 2
FIGURES = (
    *("step", "loss", "mtp_losses", "gradient_norm", "learning_rate", "tokens_seen", "auxiliary_loss", "layers"),
    *("dropped_slots", "rows_left_out", "records_skipped", "evaluation_loss", "evaluation_bits_per_byte"),
)
"""Those of a line of metrics.jsonl that are the same in every run; the others are times, memory and power."""

START = ("train", "tiny.toml", "--name", "tiny")
RESUME = ("train", "runs/tiny", "--resume")
TWO_RANKS = ("parallel.expert=2", "--processes", "2")
LONGEST_SECONDS = 600.0  # a busy machine may take many times as long as an idle one


@dataclass(frozen=True)
class Reference:
    """A run that nothing has disturbed."""

    words: tuple[str, ...]  # of its ranks
    result: Any
    seconds: float  # until its end


def make_folder(folder: Path) -> None:
    """Write the configuration of the runs into a new folder."""
    folder.mkdir()
    run = tiny_run(
        Path("runs"),
        training=TRAINING.model_copy(update={"steps": STEPS}),
        checkpoint=Checkpoint(every=EVERY, keep=3, asynchronous=True),
        evaluation=Evaluation(every=5, rows=3),
    )
    (folder / "tiny.toml").write_text(dump_toml(run))


def begin(folder: Path, words: Sequence[str], prepare: Callable[[], object] = lambda: None) -> int:
    """Begin a command in a fork, the first of a session of its own; returns its number. Its output is in out.txt."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    os.chdir(folder)
    output = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    try:
        vars(run_folder)["STALE_SECONDS"] = 0.0  # no other process makes a folder here
        prepare()
        code = warm.penstock(list(words))
    except BaseException:  # noqa: BLE001 - a fork must not go on behind its caller
        import traceback

        traceback.print_exc()
        code = 99
    os._exit(code)


def end_of(process: int, seconds: float = LONGEST_SECONDS) -> int:
    """Exit code of a fork, negative for a signal. Asserts that it ends in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    kill_all(process)
    raise AssertionError(f"a command has not ended after {seconds:.0f} s")


def kill_all(process: int) -> None:
    """Kill every process of a session, at once."""
    os.killpg(process, signal.SIGKILL)


def output(folder: Path) -> str:
    """What the last command has printed."""
    return (folder / "out.txt").read_text()


def result_of(folder: Path) -> Any:
    """What a run has computed: figures of every step, and the last checkpoint with all random states."""
    run = RunFolder(folder / "runs/tiny")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    figures = [{name: line.get(name) for name in FIGURES} for line in lines]
    place = run.checkpoints / f"step-{STEPS:06d}"
    facts = json.loads((place / FACTS).read_text())
    tensors = {name: checksum for name, checksum in read_manifest(place).files.items() if name != FACTS}
    return {"figures": figures, "facts": facts, "tensors": tensors}


def reference(folder: Path, words: tuple[str, ...] = ()) -> Reference:
    """Run to the end, without a fault."""
    make_folder(folder)
    started = time.monotonic()
    assert end_of(begin(folder, (*START, *words))) == 0, output(folder)
    return Reference(words, result_of(folder), time.monotonic() - started)


def go_on(folder: Path, wanted: Reference, prepare: Callable[[], object] = lambda: None) -> int:
    """Begin the next attempt of a run: its start, or its continuation."""
    words = RESUME if (folder / "runs/tiny/config.toml").exists() else START
    given = wanted.words if words == START else tuple(word for word in wanted.words if not word.startswith("parallel"))
    return begin(folder, (*words, *given), prepare)


def finish(folder: Path, wanted: Reference) -> None:
    """Run to the end without a further fault, and compare."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while (code := end_of(go_on(folder, wanted))) != 0:  # ranks of a killed launcher may still hold the folder
        assert code == 2 and "is in use" in output(folder) and time.monotonic() < deadline, output(folder)
    found = result_of(folder)
    for name, value in wanted.result.items():
        assert found[name] == value, f"{name} differ in {folder}"
    left = [path.name for path in (folder / "runs").rglob(".*") if path.name != ".lock"]
    assert not left, f"left behind: {left}"


def wait_for_moment(folder: Path, process: int, draw: random.Random, wanted: Reference, saves: int = 0) -> None:
    """Wait for a random moment of a run: often while it trains, else any, its start included.

    With `saves` the run has made so many checkpoints by then, unless it has ended.
    """
    if not saves and draw.random() < 0.3:
        time.sleep(draw.uniform(0.0, 1.1) * wanted.seconds)
        return
    least = _saved(folder) + EVERY * (saves or draw.randint(1, 4))
    while min(least, STEPS) > _saved(folder) and not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.001)
    time.sleep(draw.uniform(0.0, 0.05))


def _saved(folder: Path) -> int:
    """The step of the newest checkpoint."""
    names = (path.name for path in (folder / "runs/tiny/checkpoints").glob("step-??????"))
    return max((int(name.removeprefix("step-")) for name in names), default=0)
