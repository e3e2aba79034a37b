"""`penstock calibrate`: a file or text that plans read, and refusals."""

from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.plan.calibrate import BenchmarkSizes
from penstock.plan.hardware_file import read_hardware
from tests.cli import answers
from tests.plan.test_calibrate import TINY


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> BenchmarkSizes:
    monkeypatch.setattr("penstock.cli.calibrate.CPU_SIZES", TINY)
    return TINY


def test_a_file_is_written_and_what_was_measured_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    shown = answers.printed("calibrate --device cpu --name Mine --output", path)
    hardware = read_hardware(path)
    assert (hardware.name, hardware.vendor) == ("Mine", "cpu")
    assert "grouped_forward fp32" in shown
    assert f"8x{path}" in shown


def test_without_a_file_the_text_is_printed(tmp_path: Path) -> None:
    (tmp_path / "printed.toml").write_text(answers.printed("calibrate --device cpu"))
    assert read_hardware(tmp_path / "printed.toml").node.devices == 1


@pytest.mark.slow
def test_two_processes_measure_what_is_between_them(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    assert main(["calibrate", "--device", "cpu", "--processes", "2", "--output", str(path)]) == 0
    hardware = read_hardware(path)
    assert hardware.node.devices == 2
    kinds = {"all-to-all", "all-gather", "reduce-scatter", "point-to-point"}
    assert {one.kind for one in hardware.collectives} == kinds
