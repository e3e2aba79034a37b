"""Names of the parts of a layout on command lines, such as `pp=24,ep=8`, and the fields that they stand for."""

from collections.abc import Mapping

from penstock.base.errors import ConfigError, did_you_mean
from penstock.config.dispatcher import STAGES
from penstock.config.fit import NO_PIPELINE
from penstock.config.parallel import DISPATCHERS, RECOMPUTABLE
from penstock.layout.schedules import SCHEDULES

FIELDS: Mapping[str, str] = {
    "pp": "parallel.pipeline",
    "vpp": "pipeline.stages_per_rank",
    "ep": "parallel.expert",
    "etp": "parallel.expert_tensor",
    "cp": "parallel.context",
    "tp": "parallel.tensor",
    "schedule": "pipeline.schedule",
    "micro_batch": "training.micro_batch",
    "recompute": "recompute.modules",
    "sync_free_stage": "dispatch.sync_free",
    "dispatcher": "dispatch.method",
    "shard": "parallel.shard",
    "offload": "offload.optimizer",
}
"""The config field of each part of a layout."""

FOLLOW: Mapping[str, str] = {"dp": "data", "edp": "expert_data"}
"""Parts that follow from the others, by their name in the grid."""


_TEXTS: Mapping[str, tuple[str, ...]] = {
    "schedule": (NO_PIPELINE, *SCHEDULES),
    "dispatcher": ("local", *DISPATCHERS),
    "shard": ("auto", "none", "optimizer", "full"),
    "offload": ("none", "optimizer"),
    "sync_free_stage": tuple(map(str, range(STAGES))),
}
"""Parts of a layout that have few values."""


def parse_layout(text: str) -> dict[str, str]:
    """Texts by name, from a text such as `pp=24,ep=8`; a ConfigError for any other text."""
    choices = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise ConfigError("a layout is a list of assignments", got=repr(part.strip()), allowed="pp=24,ep=8,cp=2")
        check_name(name)
        if name in choices:
            raise ConfigError(f"a layout names {name} twice", got=text, fix="leave one out")
        choices[name] = value
    return choices


def check_name(name: str) -> None:
    """Refuse a name that no layout has with a ConfigError."""
    known = (*FIELDS, *FOLLOW)
    if name not in known:
        suggestion = did_you_mean(name, known)
        raise ConfigError("a layout has no such part", got=name, allowed=", ".join(known), fix=suggestion)


def check_fixed(fixed: Mapping[str, str]) -> None:
    """Refuse a name that is no part of a layout, or a text that is no value of its part, with a ConfigError."""
    for name, text in fixed.items():
        check_name(name)
        allowed = _TEXTS.get(name)
        if allowed is not None and text not in allowed:
            raise ConfigError(f"{name} is unknown", got=text, allowed=", ".join(allowed))
        if name == "recompute":
            parts = () if text == "none" else text.split("+")
            if unknown := [part for part in parts if part not in RECOMPUTABLE]:
                fix, known = did_you_mean(unknown[0], RECOMPUTABLE), ", ".join(RECOMPUTABLE)
                joined = f"none, or some of these joined by +: {known}"
                raise ConfigError("recompute names no such part", got=unknown[0], allowed=joined, fix=fix)
        elif name not in _TEXTS and (not text.isdecimal() or int(text) < 1):
            raise ConfigError(f"{name} is no number of the kind", got=text, allowed="a whole number >= 1")
