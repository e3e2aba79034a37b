"""A run -> a file that says little and explains it: what differs from a preset, what one is likely to change, and why.

The file is read back before it is written: what it loads as is the run, or there is no file.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.base.errors import ConfigError
from penstock.base.numbers import count_text
from penstock.cli.init_run import Made
from penstock.cli.plan_print import cluster_text, conclusion
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS, preset
from penstock.config.run import Run
from penstock.config.schema import as_toml, find, leaves
from penstock.config.tree import NONE
from penstock.config.versions import VERSION

SHOWN = (
    "training.steps",
    "optimizer.learning_rate",
    "data.source",
    "data.tokenizer",
    "evaluation.every",
    "checkpoint.every",
)
"""Stand in every file, whether they differ from the preset or not."""

PRESET_FIELDS = ("name",)
"""Follow from the file itself."""

Leaves = Mapping[str, Any]


def run_text(made: Made, model: str, path: Path, words: str) -> str:
    """The file, checked.

    Args:
        made: the run, and what there is to say about it.
        model: the preset that it starts from.
        path: where it will stand; its stem is the name of the run.
        words: the command that made it.

    Raises:
        ConfigError: the file would not be the run.
    """
    text = "\n".join([*_head(made, model, path, words), *_fields(made.run, preset(model)), ""])
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        draft = Path(folder) / path.name
        draft.write_text(text, encoding="utf-8")
        if load_run(str(draft)) != made.run:
            raise ConfigError(f"{path} cannot say what was asked for", fix="start from penstock config show MODEL")
    return text


def write_run(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        ConfigError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}", got=error.strerror) from error


def _head(made: Made, model: str, path: Path, words: str) -> Iterator[str]:
    about = " ".join((PRESETS[model].__doc__ or "").split()) if model in PRESETS else model
    yield f"# {about}"
    yield f"# Written by: {words}"
    if made.projection is not None:
        yield f"# Planned for {cluster_text(made.projection.cluster)}:"
        yield f"#   {conclusion(made.projection)}"
    yield from (f"# Note: {note}" for note in made.notes)
    yield "#"
    for command, meaning in _commands(made, path).items():
        yield f"#   {command:<44}  {meaning}".rstrip()
    yield ""
    yield f"version = {VERSION}"
    yield f'preset = "{model}"  # what is not said below is as there'


def _commands(made: Made, path: Path) -> dict[str, str]:
    """What to type next."""
    commands = {f"penstock train {path}": "every GPU of this machine, or its CPU"}
    projection = made.projection
    if projection is not None and projection.cluster.nodes > 1:
        machines = f"--nodes {projection.cluster.nodes} --gpus-per-node {projection.cluster.node_devices}"
        commands = {f"penstock launch slurm {path} {machines}": "a job script"}
    return {
        **commands,
        f"penstock config show {path}": "everything, also what the preset says",
        "penstock config explain FIELD": "what a field means",
    }


def _fields(run: Run, base: Run) -> Iterator[str]:
    """Fields that differ or are shown anyway, section by section, each with what it means."""
    wanted, usual = leaves(run), leaves(base)
    chosen = [
        path
        for path, value in wanted.items()
        if path not in PRESET_FIELDS and (path in SHOWN or path not in usual or usual[path] != value)
    ]
    section = ""
    for path in sorted(chosen, key=lambda path: (path.count(".") > 0, list(wanted).index(path))):
        above, _, name = path.rpartition(".")
        if above != section:
            yield from ("", f"[{above}]")
            section = above
        yield f"# {_meaning(path, run)}"
        yield f"{name} = {as_toml(NONE) if wanted[path] is None else as_toml(wanted[path])}"


def _meaning(path: str, run: Run) -> str:
    if path == "training.steps":
        tokens = count_text(run.tokens_per_step * run.training.steps)
        return f"Optimizer steps; {tokens} tokens in all, {run.tokens_per_step:,} in each."
    return next(field.doc for field in find(Run, path))
