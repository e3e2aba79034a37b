"""One thing that was looked at, and how it was found."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]
"""A warning costs speed, or may: a run starts. What failed ends a run, or spoils it."""

Area = Literal["versions", "environment", "host", "disk", "devices", "transfers"]


@dataclass(frozen=True, kw_only=True)
class PreflightCheck:
    """A thing that was looked at.

    Attributes:
        area: what it belongs to.
        name: what it is.
        status: how it was found.
        got: what it is like.
        expected: what it should be like; empty where everything is right.
        fix: how to mend it; empty where there is nothing to mend.
    """

    area: Area
    name: str
    status: Status
    got: str
    expected: str = ""
    fix: str = ""


def fine(area: Area, name: str, got: str) -> PreflightCheck:
    """A thing that is right."""
    return PreflightCheck(area=area, name=name, status="ok", got=got)
