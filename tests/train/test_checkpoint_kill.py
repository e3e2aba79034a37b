"""A process that is killed, in any phase or at any time, leaves only whole checkpoints."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.train.checkpoint import CheckpointStore
from tests.train.test_checkpoint import _assert_holds, _facts, _names, _parts, _tensors

ROOT = Path(__file__).resolve().parents[2]

SAVES_UNTIL_KILLED = """
import itertools, pathlib, sys
from penstock.train.checkpoint import CheckpointStore
from tests.train.test_checkpoint import _facts, _parts, _tensors
store = CheckpointStore(pathlib.Path(sys.argv[1]), keep=2, asynchronous=True)
for step in itertools.count(1):
    store.save(step, _parts(_tensors(step)), _facts(step))
"""

DIES_AT_EACH_PHASE = """
import os, pathlib, signal, sys
from penstock.train import checkpoint
from tests.train.test_checkpoint import _facts, _parts, _tensors
store = checkpoint.CheckpointStore(pathlib.Path(sys.argv[1]), keep=1, asynchronous=False)
store.save(1, _parts(_tensors(1)), _facts(1))
def die(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)
for phase in ("write_parts", "write_whole", "write_manifest", "sync", "CheckpointStore._publish"):
    if os.fork() == 0:
        owner, _, name = phase.rpartition(".")
        setattr(getattr(checkpoint, owner) if owner else checkpoint, name, die)
        store.save(2, _parts(_tensors(2)), _facts(2))
        os._exit(3)
    _, status = os.wait()
    assert os.WTERMSIG(status) == signal.SIGKILL, phase
    names = sorted(os.listdir(sys.argv[1]))
    assert len(names) == 2 and names[0].startswith(".step-000002.partial-") and names[1] == "step-000001", names
    checkpoint.CheckpointStore(pathlib.Path(sys.argv[1]), keep=1, asynchronous=False).load(1, _parts(_tensors(0)))
store.save(3, _parts(_tensors(3)), _facts(3))
assert os.listdir(sys.argv[1]) == ["step-000003"], "leftovers stay"
unfinished = checkpoint.CheckpointStore(pathlib.Path(sys.argv[1]), keep=1, asynchronous=True)
unfinished.save(4, _parts(_tensors(4)), _facts(4))
print("alive")
"""


def _python(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_process_killed_in_any_phase_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    process = _python(DIES_AT_EACH_PHASE, str(tmp_path))
    assert process.communicate(timeout=120)[0] == "alive\n"
    store = CheckpointStore(tmp_path, keep=0, asynchronous=False)
    assert store.steps() == [4], "a process that ends normally first completes its save"
    _assert_holds(store, 4)


@pytest.mark.slow
def test_a_process_killed_at_any_time_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    process = _python(SAVES_UNTIL_KILLED, str(tmp_path))
    deadline = time.monotonic() + 120
    while not any(tmp_path.glob("step-000003")) or not any(tmp_path.glob(".step-*.partial-*")):
        assert time.monotonic() < deadline, "the process does not save"
        assert process.poll() is None, "the process ended by itself"
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    store = CheckpointStore(tmp_path, keep=2, asynchronous=False)
    steps = store.steps()
    assert len(steps) >= 2
    for step in steps:
        _assert_holds(store, step)
    store.save(10**6, _parts(_tensors(10**6)), _facts(10**6))
    assert _names(tmp_path) == [f"step-{steps[-1]:06d}", "step-1000000"]
