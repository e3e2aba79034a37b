"""Files are opened without waiting, and written whole or not at all."""

import errno
import os
import signal
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path
from types import FrameType
from unittest.mock import Mock

import pytest

from penstock.base.files import STALE_SECONDS, draft_of, open_file, read_bounded, write_whole


def test_a_file_is_replaced_whole_and_no_draft_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    write_whole(path, "old")
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_that_was_planted_under_the_name_of_a_draft_is_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "config.toml"
    victim.write_text("precious")
    for name in (draft_of(path).name, ".config.toml.draft"):
        (tmp_path / name).symlink_to(victim)
    write_whole(path, b"new")
    assert victim.read_text() == "precious"
    assert path.read_text() == "new"
    assert not path.is_symlink()


def test_drafts_that_a_killed_process_left_are_deleted_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    path = tmp_path / "a[1].bin"
    left, living, others = (tmp_path / f".{name}.host-7.draft" for name in ("a[1].bin", "a[1].bin.b", "a1.bin"))
    (tmp_path / ".a[1].bin.host-8.draft").touch()
    for draft in (left, living, others):
        draft.touch()
        os.utime(draft, (0, left.stat().st_mtime - STALE_SECONDS - 1))
    os.utime(living)
    write_whole(path, "new")
    assert {one.name for one in tmp_path.iterdir()} == {path.name, living.name, others.name, ".a[1].bin.host-8.draft"}


def test_pipes_devices_and_folders_are_no_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # without a writer
    for path in (pipe, Path("/dev/zero"), Path("/dev/null"), tmp_path):
        with pytest.raises(OSError, match="no file|Is a directory"):
            open_file(path)


def test_a_signal_while_a_file_is_opened_is_told_as_it_is(tmp_path: Path) -> None:
    # A descriptor that is closed twice would make "Bad file descriptor" of Ctrl-C.
    class SignalledError(Exception):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise SignalledError

    path = tmp_path / "a"
    path.write_bytes(b"x")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(4000):
            with suppress(SignalledError):
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + number % 40))
                with open_file(path):
                    for _ in range(1000):  # A signal right before a sleep does not end it.
                        time.sleep(0.001)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_small_file_takes_little_memory_whatever_the_limit(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"3")
    tracemalloc.start()
    try:
        assert read_bounded(tmp_path / "small", 2**30) == b"3"
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_a_pipe_that_the_shell_passes_is_read_up_to_the_limit() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"steps = 3")
        os.close(writing)
        assert read_bounded(Path(f"/dev/fd/{reading}"), 100) == b"steps = 3"
    finally:
        os.close(reading)
