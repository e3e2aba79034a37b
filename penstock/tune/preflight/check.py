"""Result of one check."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]
"""A warning may cost speed, and the run starts. A failure ends or spoils the run."""

Area = Literal["versions", "environment", "host", "disk", "devices", "transfers"]


@dataclass(frozen=True)
class PreflightCheck:
    """Result of one check; what was expected and how to fix it are empty if it passed."""

    area: Area
    name: str
    status: Status
    got: str  # the state of the node
    expected: str = ""
    fix: str = ""


def fine(area: Area, name: str, got: str) -> PreflightCheck:
    return PreflightCheck(area, name, "ok", got)
