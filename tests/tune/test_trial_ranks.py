"""Ranks of trials beside the processes of a launch: what the first process sees of ranks that end, fail and hang."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from penstock.base.errors import LOST
from penstock.tune.trial_ranks import RunningRanks, run_ranks

WORLD = 2

RANK = """#!/usr/bin/env python3
import os, signal, sys, time
what, rank = sys.argv[sys.argv.index("penstock") + 1], os.environ["RANK"]
print("launch", os.environ["TORCHELASTIC_RUN_ID"], "rank", rank, flush=True)
if what == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
mark = os.path.join(os.path.dirname(os.path.abspath(__file__)), "has-refused")
if what == "refused" and rank == "1":
    print("error: no such thing", flush=True); open(mark, "w").close(); sys.exit(2)
if what == "refused":
    while not os.path.exists(mark): time.sleep(0.01)  # only then is a rank lost
    print("error: another rank has ended"); sys.exit(75)
if what in ("hang", "killed", "hang-for-ever"):
    time.sleep(600)
"""
"""A stand-in for Python that does not import anything."""

SEARCH = """
import json, sys, time
from pathlib import Path
from penstock.base.errors import ConfigError
from penstock.parallel.launch.environment import read_environment
from penstock.parallel.launch.rendezvous import Rendezvous
from penstock.tune import trial_ranks
folder = Path({folder!r})
python, trial_ranks.sys.executable = sys.executable, str(folder / "python")
environment = read_environment()

def watch():
    return "too long" if time.monotonic() > begin + 1.0 else None

with Rendezvous(environment) as meeting:
    meeting.open(1.0)
    if environment.rank > 0:
        sys.exit(trial_ranks.follow(meeting, folder))
    with trial_ranks.Director(meeting) as director:
        for what in {what!r}:
            if what == "raise":
                raise ConfigError("the plan fails")
            begin = time.monotonic()
            log = folder / (what + ".log")
            ask = watch if what == "hang" else lambda: None
            code = trial_ranks.run_ranks(director, [what], {world}, log, watch=ask)
            (folder / (what + ".json")).write_text(json.dumps([code, log.read_text()]))
        director.dismiss(0)
"""


@pytest.fixture
def store() -> TCPStore:
    """The store of a launcher."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def searching(folder: Path, store: TCPStore, *what: str) -> list["subprocess.Popen[str]"]:
    """The processes of a launch, which run a command for each word."""
    stand_in = folder / "python"
    stand_in.write_text(RANK, encoding="utf-8")
    stand_in.chmod(0o755)
    code = SEARCH.format(folder=str(folder), what=what, world=WORLD)
    place = {"WORLD_SIZE": f"{WORLD}", "LOCAL_WORLD_SIZE": f"{WORLD}", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "one"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **place, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]


def ended(processes: list["subprocess.Popen[str]"]) -> tuple[list[int], str]:
    """Exit codes, and what was said."""
    said = [process.communicate()[1] for process in processes]
    return [process.returncode for process in processes], "".join(said)


def found(folder: Path, what: str) -> Any:
    """Code and log of a command."""
    return json.loads((folder / f"{what}.json").read_text(encoding="utf-8"))


def test_ranks_of_all_processes_end_before_the_next_trial_begins(tmp_path: Path, store: TCPStore) -> None:
    codes, said = ended(searching(tmp_path, store, "ends", "killed", "hang", "refused", "raise"))
    assert codes[1] == 2, f"all processes end with the code of the first: {said}"
    code, log = found(tmp_path, "ends")
    assert (code, log.split()[-2:]) == (0, ["rank", "0"])
    code, log = found(tmp_path, "killed")
    assert code == -signal.SIGKILL
    assert "was ended by SIGKILL" in log
    assert found(tmp_path, "hang")[0] == "too long"
    code, log = found(tmp_path, "refused")
    assert code == 2
    first, other = log.index("error: no such thing"), log.find("error: another rank has ended")
    assert other in (-1, *range(first, len(log))), f"the cause comes before ranks that only lost it: {log}"
    launches = {line.split()[1] for line in log.splitlines() if line.startswith("launch")}
    assert len(launches) == 1 and "one" not in launches, "a trial is a launch of its own"


def test_a_process_whose_search_was_killed_ends_with_its_rank(tmp_path: Path, store: TCPStore) -> None:
    first, other = searching(tmp_path, store, "hang-for-ever")
    while not (tmp_path / "hang-for-ever.log").exists():
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    del store
    other.terminate()
    assert other.wait() in (-signal.SIGTERM, 128 + signal.SIGTERM, LOST)


class StartInterrupted:
    """Starts a rank that runs until it is ended; SIGTERM comes when it runs and the caller does not have it yet."""

    def __init__(self) -> None:
        self.ended = False

    def start(self, arguments: Sequence[str], processes: int, output: Path) -> RunningRanks:
        os.kill(os.getpid(), signal.SIGTERM)
        return self

    def poll(self) -> int | None:
        return None

    def end(self) -> None:
        self.ended = True


def test_a_rank_that_is_being_started_when_the_search_is_stopped_is_ended(tmp_path: Path) -> None:
    before, starter = signal.getsignal(signal.SIGTERM), StartInterrupted()
    with pytest.raises(SystemExit) as raised:
        run_ranks(starter, ["train"], 1, tmp_path / "log")
    assert (raised.value.code, starter.ended) == (128 + signal.SIGTERM, True)
    assert signal.getsignal(signal.SIGTERM) == before
