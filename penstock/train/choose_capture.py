"""Whether a run replays whole passes, parts of layers, or nothing: as asked, or with `graphs.capture` auto the most."""

from collections.abc import Sequence

import torch

from penstock.base.errors import DeviceError, KernelError
from penstock.config.parallel import Captured
from penstock.config.rules import capture_problem
from penstock.config.run import Run
from penstock.kernels.choose import Choice
from penstock.train.captured import CapturedPasses
from penstock.train.captured_parts import CapturedParts

READS_COUNTS: dict[Captured, tuple[str, ...]] = {"full": ("permute", "experts"), "partial": ("permute",)}
"""Operators of what is captured whose reference form brings row counts to the host."""


def choose_capture(
    run: Run, device: torch.device, choices: Sequence[Choice]
) -> tuple[CapturedPasses | CapturedParts | None, str]:
    """How a run makes its passes.

    Args:
        run: says what is asked for.
        device: where.
        choices: of kernels there.

    Returns:
        The passes, or None if they are eager; and a word on it for the user, empty if nobody asked.

    Raises:
        DeviceError: graphs are asked for, and the device has none.
        KernelError: they are asked for, and a kernel waits for the device.
    """
    wanted = run.graphs.capture
    if wanted == "none":
        return None, ""
    if wanted != "auto":
        _refuse(wanted, run, device, choices)
    obstacle = why_not("full", run, device, choices)
    if wanted == "full" or (wanted == "auto" and not obstacle):
        return CapturedPasses(is_asked_for=wanted == "full"), "passes, from the second step on"
    if wanted == "partial":
        return CapturedParts(is_asked_for=True), "parts of layers, from the second step on"
    if why_not("partial", run, device, choices):
        return None, f"none: {obstacle}"
    return CapturedParts(is_asked_for=False), f"parts of layers, from the second step on; no passes: {obstacle}"


def why_not(what: Captured, run: Run, device: torch.device, choices: Sequence[Choice]) -> str:
    """What keeps the passes of a run, or the parts of its layers, from being captured; empty if nothing does."""
    if device.type != "cuda":
        return f"device {device.type} has no graphs"
    problem = capture_problem(run, what)
    if problem is not None:
        return f"{problem.field} {problem.what}"
    waiting = _waiting(what, run, choices)
    return f"the reference form of {waiting} reads counts on the host" if waiting else ""


def _refuse(what: Captured, run: Run, device: torch.device, choices: Sequence[Choice]) -> None:
    """Raise if what was asked for cannot be had here; what cannot be had anywhere has been refused by a rule."""
    if device.type != "cuda":
        raise DeviceError(f"graphs.capture={what} needs a GPU", got=f"device {device.type}", fix="graphs.capture=auto")
    waiting = _waiting(what, run, choices)
    if waiting:
        raise KernelError(
            f"graphs.capture={what} cannot be had: the reference form of {waiting} reads counts on the host",
            fix=f"leave kernels.{waiting} and kernels.all at auto, or set graphs.capture=none",
        )


def _waiting(what: Captured, run: Run, choices: Sequence[Choice]) -> str:
    """An operator that waits for the device in the form that was chosen; empty if there is none."""
    if run.model.moe is None:
        return ""
    return next((one.op for one in choices if one.op in READS_COUNTS[what] and one.backend == "reference"), "")
