"""Result of one check."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]
"""A warning may cost speed, and the run starts. A failure ends or spoils the run."""

Area = Literal["versions", "environment", "host", "disk", "devices", "transfers"]


@dataclass(frozen=True)
class PreflightCheck:
    """Result of one check.

    Attributes:
        got: the state of the node.
        expected: empty for a passed check.
        fix: empty for a passed check.
    """

    area: Area
    name: str
    status: Status
    got: str
    expected: str = ""
    fix: str = ""


def fine(area: Area, name: str, got: str) -> PreflightCheck:
    """A passed check."""
    return PreflightCheck(area, name, "ok", got)
