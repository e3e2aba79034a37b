"""Verbs, exit codes, and how errors are shown."""

import errno
import signal
import subprocess
import sys
from contextlib import suppress
from types import ModuleType

import pytest

from penstock.base.errors import DataError
from penstock.base.interrupts import imports_end_at_once
from penstock.cli.main import VERBS, main
from tests.cli import answers


def replace_train(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None, code: object = None) -> None:
    """Put a verb in place of `train` that raises or returns what it is told."""

    def train() -> object:
        if error is not None:
            raise error
        return code

    module = ModuleType("penstock.cli.train")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.cli.train", module)


def test_nothing_typed_and_help_show_the_verbs_and_version_the_version() -> None:
    for words in ((), ("--help",)):
        out = answers.printed("", *words)
        assert all(verb.name in out for verb in VERBS)
    assert answers.printed("--version").startswith("penstock ")


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("ours"), FileNotFoundError(errno.ENOENT, "No such file", "own.txt")]
)
def test_a_fault_of_the_program_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_train(monkeypatch, error)
    with pytest.raises(type(error)):
        main(["train"])


def test_an_interrupt_is_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_train(monkeypatch, KeyboardInterrupt())
    code, out, _ = answers.outcome("train")
    assert (code, out) == (130, "")


def test_a_closed_pipe_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    replace_train(monkeypatch, BrokenPipeError())
    with suppress(SystemExit):  # typer's own way out, silent as well
        assert main(["train"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (DataError("the file\nis empty", fix="give another"), "the file is empty; fix: give another"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "a.txt"), "Permission denied: a.txt"),
        (DataError("a column", got="a\x1b[31mb\x9b"), "a column; got a\\x1b[31mb\\x9b"),
        (MemoryError(), "the memory of this machine, or what this process may have of it, is used up"),
    ],
)
def test_an_error_of_the_user_or_of_the_machine_is_one_line_and_code_2(
    error: BaseException, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_train(monkeypatch, error)
    assert answers.outcome("train") == (2, "", f"error: {told}\n")


def test_a_long_value_is_cut_in_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_train(monkeypatch, DataError("x" * 10_000, fix="a shorter one"))
    _, _, err = answers.outcome("train")
    assert len(err) < 2100 and err.endswith("xxx; fix: a shorter one\n")  # beginning and end stay


def test_an_interrupt_while_modules_are_imported_ends_at_once_and_later_ones_raise_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with imports_end_at_once():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with imports_end_at_once():  # What ignores Ctrl-C goes on ignoring it.
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (3, 3), ("text", 0)])
def test_a_verb_may_choose_its_exit_code(monkeypatch: pytest.MonkeyPatch, returned: object, code: int) -> None:
    replace_train(monkeypatch, code=returned)
    assert main(["train"]) == code


def test_the_module_runs_and_looking_at_configurations_needs_no_torch() -> None:
    # One process for both, since each costs a second: `-X importtime` lists on stderr every module that is imported.
    command = [sys.executable, "-X", "importtime", "-m", "penstock", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "deepseek-v3" in done.stdout
    assert "penstock.config.load" in imported
    assert not imported & {"torch", "triton", "numpy", "penstock.models.build"}  # each takes long


def test_an_error_ends_the_process_with_code_2_and_no_traceback() -> None:
    command = [sys.executable, "-m", "penstock", "config", "validate", "debgu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: no preset is called 'debgu'; allowed: debug, ")
