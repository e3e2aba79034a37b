"""Runs that may break rules, for tests of the rules."""

from collections.abc import Sequence

from penstock.config.merge import merge, parse_overrides
from penstock.config.presets.registry import preset
from penstock.config.run import Run
from penstock.config.validation import build


def unchecked_run(overrides: Sequence[str], base: str = "debug") -> Run:
    """A preset with overrides, of the right types, with no rule checked."""
    return build(Run, merge(Run, preset(base).model_dump(), parse_overrides(Run, overrides)))
