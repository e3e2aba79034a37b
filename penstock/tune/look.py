"""What `penstock tune` looks at before its first trial: faults of the machine, and its speed.

    preflight    the checks of `penstock preflight` on the ranks of the trials; faults are told, and the search goes on
    calibrate    measure what a plan would assume, unless the chip is known

Both run in processes of their own, as trials do, so that the search holds no device. Their results stay in the cache
of the runs, by machine: a calibration for good, a preflight for `FRESH_SECONDS`.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.base.devices import chip_named
from penstock.base.errors import DeviceError
from penstock.base.files import write_whole
from penstock.parallel.launch.process import device_name
from penstock.plan.hardware import Cluster, cluster_of, with_host_memory
from penstock.plan.hardware_file import known_hardware, load_hardware
from penstock.tune.trial_ranks import StartRanks, run_ranks

FRESH_SECONDS = 3600.0  # age until which a preflight of the same ranks is believed
AS_NAMED = 0.97  # share of a chip's memory that its driver leaves; a device with less is not the chip that was named
PREFLIGHT_SECONDS, CALIBRATE_SECONDS = 150.0, 600.0  # time limits; ranks of a preflight wait two minutes for each other


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Where the trials run: so many ranks, and so many of them on each machine; `cache` is the folder for results.

    `memory_bytes` are those of a device as its driver says, `host_bytes` those of a machine; 0 if unknown.
    """

    starter: StartRanks
    cache: Path
    ranks: int
    local_ranks: int
    on_gpu: bool
    memory_bytes: int = 0
    host_bytes: int = 0

    @property
    def device(self) -> str:
        return device_name(torch.device("cuda" if self.on_gpu else "cpu"))

    @property
    def words(self) -> str:
        shown = "-".join("".join(letter if letter.isalnum() else " " for letter in self.device).split()).lower()
        nodes = "" if self.ranks == self.local_ranks else f"x{self.ranks // self.local_ranks}"
        return f"{shown}-{self.local_ranks}{nodes}"


def faults(ground: Ground) -> tuple[str, ...]:
    """A line for each check that failed; one line if the ranks did not come to an end."""
    path = ground.cache / f"preflight-{ground.words}.json"
    if path.exists() and 0 <= time.time() - path.stat().st_mtime < FRESH_SECONDS:
        return tuple(json.loads(path.read_text(encoding="utf-8")))
    ground.cache.mkdir(parents=True, exist_ok=True)
    log = path.with_suffix(".log")
    code = run_ranks(ground.starter, ["preflight", "--json"], ground.ranks, log, seconds=PREFLIGHT_SECONDS)
    text = log.read_text(encoding="utf-8", errors="replace")
    checks = [check for answer in _answers(text) for check in answer["checks"] if check["status"] == "failed"]
    lines = tuple(f"{check['area']} {check['name']} {check['got']}" for check in checks)
    if code and not lines:
        message = next((line for line in reversed(text.splitlines()) if line.strip()), "no output")
        return (f"preflight ended with exit code {code}: {message[:200]}",)
    if code is None:
        return (f"preflight did not end within {PREFLIGHT_SECONDS:.0f} s: the ranks may not reach each other",)
    write_whole(path, json.dumps(lines))
    return lines


def _answers(text: str) -> Iterator[Mapping[str, Any]]:
    """Answers of `preflight --json`, one of each machine, among other lines that ranks have printed."""
    for opening in re.finditer(r"^\{$", text, re.MULTILINE):
        with suppress(json.JSONDecodeError):  # the beginning of a long output may be cut
            yield json.JSONDecoder().raw_decode(text, opening.start())[0]


def cluster_here(ground: Ground, asked: str | None) -> Cluster:
    """These ranks on the chip that is asked for or known, or else as they were calibrated. Raises a DeviceError.

    No device has more memory than its driver says, and no more of the host than there is, whatever chip is asked for.
    """
    chip = chip_named(ground.device) if ground.on_gpu else None
    if asked is None and chip is not None and chip.pattern in known_hardware():
        asked = chip.pattern
    if asked is None:
        path = ground.cache / f"hardware-{ground.words}.toml"
        if not path.exists():
            _calibrate(ground, path)
        asked = f"{path}"
    hardware = load_hardware(asked)
    if ground.local_ranks < ground.ranks and hardware.node.devices != ground.local_ranks:
        hardware = replace(hardware, node=hardware.node.model_copy(update={"devices": ground.local_ranks}))
    if 0 < ground.memory_bytes < AS_NAMED * hardware.memory.capacity_bytes:
        memory = hardware.memory.model_copy(update={"capacity_bytes": ground.memory_bytes})
        hardware = replace(hardware, memory=memory)
    if 0 < (share := ground.host_bytes // ground.local_ranks) < hardware.host_link.memory_bytes:
        hardware = with_host_memory(hardware, share)
    return cluster_of(ground.ranks, hardware)


def _calibrate(ground: Ground, path: Path) -> None:
    ground.cache.mkdir(parents=True, exist_ok=True)
    arguments = ["calibrate", "--output", f"{path}", "--device", "cuda" if ground.on_gpu else "cpu"]
    log = path.with_suffix(".log")
    code = run_ranks(ground.starter, arguments, ground.ranks, log, seconds=CALIBRATE_SECONDS)
    if code or code is None or not path.exists():
        text = log.read_text(encoding="utf-8", errors="replace").strip()[-300:]
        raise DeviceError(f"calibration failed: {text}", fix=f"penstock {' '.join(arguments)}")
