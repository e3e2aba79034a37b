"""Clock and power of a GPU, with NVML and AMD SMI replaced by modules of a few lines."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.train import power
from penstock.train.metrics import record
from penstock.train.power import PowerLimits, PowerMeter, PowerReading
from tests.train.tiny_run import step_report

GPU = torch.device("cuda", 1)

NVML = """
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetHandleByUUID(uuid):
    assert uuid == "GPU-abc"
    return 7
def nvmlDeviceGetEnforcedPowerLimit(handle): return 700_000
def nvmlDeviceGetMaxClockInfo(handle, kind):
    assert (handle, kind) == (7, 1)
    return 1980
"""

AMD_SMI = """
from types import SimpleNamespace
class AmdSmiException(Exception): pass
AmdSmiClkType = SimpleNamespace(GFX=0)
def amdsmi_init(): pass
def amdsmi_get_processor_handles(): return ["first"]
def amdsmi_get_power_cap_info(handle): return {"power_cap": 750_000_000}
def amdsmi_get_clock_info(handle, kind): return {"clk": 1500, "max_clk": 2100}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules, and a device that draws 690 W at 1,410 MHz."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(power, "EVERY_SECONDS", 0.001)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 690_000 if torch.version.hip is None else 690)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1410)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    for name in ("pynvml", "amdsmi"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    return tmp_path


def test_a_step_has_the_median_of_its_samples_and_the_limits_of_the_board(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (driver / "pynvml.py").write_text(NVML)
    meter = PowerMeter(GPU)
    limits = PowerLimits(watts=700.0, clock_mhz=1980.0)
    assert meter.read() == PowerReading(690.0, 1410.0, limits)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 1980)
    while meter.read().clock_mhz != 1980:
        time.sleep(0.005)
    meter.close()
    meter.read()
    assert meter.read() == PowerReading(limits=limits), "no sample since the last call"


def test_watts_of_amd_smi_are_those_of_nvml(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (driver / "amdsmi.py").write_text(AMD_SMI)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    meter = PowerMeter(GPU)
    assert meter.read() == PowerReading(690.0, 1410.0, PowerLimits(watts=750.0, clock_mhz=2100.0))
    meter.close()


@pytest.mark.parametrize("fault", ["no package", "the driver refuses", "a CPU", "no library"])
def test_without_a_package_or_an_answer_nothing_is_known(driver: Path, fault: str) -> None:
    if fault == "the driver refuses":
        (driver / "pynvml.py").write_text(NVML.replace("return 7\n", "raise NVMLError('not supported')\n"))
    elif fault == "a CPU":
        (driver / "pynvml.py").write_text(NVML)
    elif fault == "no library":
        (driver / "pynvml.py").write_text("raise OSError('libnvidia-ml.so')\n")
    meter = PowerMeter(torch.device("cpu") if fault == "a CPU" else GPU)
    assert meter.read() == PowerReading()
    meter.close()


def test_metrics_have_power_and_clock() -> None:
    names = ("power_watts", "power_limit_watts", "clock_mhz", "clock_limit_mhz", "tokens_per_joule")
    report = step_report(3, power=PowerReading(690.0, 1410.0, PowerLimits(700.0, 1980.0)))
    tokens_per_joule = report.tokens_per_second_per_device / 690.0
    assert [record(report)[name] for name in names] == [690.0, 700.0, 1410.0, 1980.0, tokens_per_joule]
    assert [record(step_report(3))[name] for name in names] == [None] * 5
