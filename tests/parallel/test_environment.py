"""What the shell says, and what libraries are told."""

import os
import subprocess
import sys

import pytest

from penstock.base.errors import DeviceError
from penstock.parallel.environment import SPIN_COUNT, Environment, prepare_environment, read_environment


def test_an_empty_environment_means_defaults() -> None:
    assert read_environment({}) == Environment(color=True, threads=None, world_size=1)


def test_what_the_shell_says_is_read() -> None:
    environment = read_environment({"NO_COLOR": "1", "OMP_NUM_THREADS": "4", "WORLD_SIZE": "1"})
    assert environment == Environment(color=False, threads=4, world_size=1)
    assert read_environment({"NO_COLOR": "", "OMP_NUM_THREADS": ""}).color


def test_several_processes_are_refused() -> None:
    with pytest.raises(DeviceError, match="WORLD_SIZE=8.*without torchrun"):
        read_environment({"WORLD_SIZE": "8"})


@pytest.mark.parametrize("text", ["many", "0", "-1", "2.5", "\N{SUPERSCRIPT TWO}"])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match="OMP_NUM_THREADS must be a whole number"):
        read_environment({"OMP_NUM_THREADS": text})


def test_waiting_threads_sleep_soon_unless_the_shell_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    prepare_environment()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    prepare_environment()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    prepare_environment()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT
    monkeypatch.setenv("GOMP_SPINCOUNT", SPIN_COUNT)  # so that it is taken back after the test


def test_the_command_line_sets_it_before_torch_is_loaded() -> None:
    code = "import sys, penstock.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
