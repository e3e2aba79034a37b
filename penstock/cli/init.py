"""`penstock init`: a commented run file for this machine and a text, which trains as it is.

    penstock init                               run.toml: the debug preset on the standard library
    penstock init mine.toml --model deepseek-v2-lite-8l --data corpus/ --tokenizer t.json training.steps=2000

The layout is planned for the GPUs of this machine; steps are small on a CPU. Before the file is written, the text is
opened, and a model that this machine cannot hold is refused. `penstock plan ... --write` plans for another machine.
"""

import re
from collections.abc import Iterator
from glob import has_magic
from pathlib import Path
from typing import Annotated

import torch
import typer

from penstock.base.devices import chip_named
from penstock.base.errors import ConfigError, DataError, DeviceError
from penstock.base.numbers import bytes_text, count_text
from penstock.cli.config import warn_of_unfilled
from penstock.cli.output import check_output, print_next, write_file
from penstock.cli.verbs import Force, Overrides
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS, preset
from penstock.config.run import Run
from penstock.config.schema import as_toml, find, leaves
from penstock.config.tree import Tree
from penstock.config.versions import VERSION
from penstock.data.files import matched
from penstock.data.open import source_of
from penstock.data.tokenizer import BYTES
from penstock.parallel.launch.process import device_name
from penstock.plan.calibrate import device_memory
from penstock.plan.hardware import cluster_of
from penstock.plan.hardware_file import known_hardware, load_hardware
from penstock.plan.search import search
from penstock.plan.search_request import SearchRequest
from penstock.train.setup import open_texts, state_bytes

STANDARD_LIBRARY = "standard-library"
CPU_LENGTH, CPU_ROWS = 512, 8  # positions and rows of a step on a CPU; a step of most presets would take hours
# Fields in every file, also if they equal the preset.
SHOWN = (
    *("training.steps", "optimizer.learning_rate", "data.source", "data.tokenizer"),
    *("evaluation.every", "checkpoint.every"),
)


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; its name is the run's.")] = Path(
        "run.toml"
    ),
    overrides: Overrides = None,
    model: Annotated[str, typer.Option("--model", metavar="TARGET", help="A preset.")] = "debug",
    data: Annotated[
        str, typer.Option("--data", metavar="TEXT", help="A file, folder, glob or dataset.")
    ] = STANDARD_LIBRARY,
    tokenizer: Annotated[str, typer.Option("--tokenizer", metavar="FILE", help=f"{BYTES}, or a file.")] = BYTES,
    force: Force = False,
) -> None:
    """Write a commented run file for this machine and a text; it trains as it is."""
    if file.suffix != ".toml":
        raise ConfigError("init writes a file that ends in .toml", got=file)
    check_output(file, "FILE", force=force)
    base = preset(model)
    fields = {"name": file.stem, "data.tokenizer": tokenizer, **text_fields(data), **_small_steps(base)}
    run = load_run(model, [*(f"{path}={as_toml(value)}" for path, value in fields.items()), *(overrides or ())])
    _check_memory(run)
    run = _planned(run)
    if not run.data.streaming:  # opening it needs the network
        open_texts(run)
    write_file(file, "\n".join([*_head(model, file), *_fields(run, base), ""]))
    warn_of_unfilled(run)
    print(f"wrote {file}")
    print_next("train", file)


def text_fields(text: str) -> Tree:
    """Fields of a text by the form of its name. Raises a DataError if nothing can be read under it."""
    if text == STANDARD_LIBRARY:
        return {"data.source": STANDARD_LIBRARY}
    path = Path(text).expanduser()
    # The marks of `datasets.save_to_disk`.
    if path.is_dir() and any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        return {"data.source": "huggingface", "data.dataset": str(path)}
    if path.exists() or has_magic(text) or text.startswith(("~", ".", "/")) or path.suffix:
        files = matched([str(path)]) if path.is_dir() or has_magic(text) else [path]
        kinds = [source_of(file) for file in files]  # of several kinds the most frequent
        return {"data.source": max(dict.fromkeys(kinds), key=kinds.count), "data.files": (str(path),)}
    if re.fullmatch(r"[\w-]+/[\w-]+", text):
        return {"data.source": "huggingface", "data.dataset": text, "data.streaming": True}  # without a copy of it
    raise DataError(
        "this is no text that can be read",
        got=repr(text),
        allowed=f"{STANDARD_LIBRARY}, a file, a folder, a glob, or a Hugging Face dataset such as allenai/c4",
    )


def _small_steps(run: Run) -> Tree:
    """Fields that make a step take seconds or minutes on a CPU; none with a GPU, or if the steps are small already."""
    if torch.cuda.is_available() or run.tokens_per_step <= CPU_LENGTH * CPU_ROWS:
        return {}
    length = min(run.training.sequence_length, CPU_LENGTH)
    return {"training.micro_batch": 1, "training.global_batch": CPU_ROWS, "training.sequence_length": length}


def _check_memory(run: Run) -> None:
    needed, devices = state_bytes(run), torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = device_memory(torch.device("cuda", 0) if devices else torch.device("cpu"))[0] * max(1, devices)
    if needed > there:
        raise DeviceError(
            f"{run.name} needs {bytes_text(needed)} for weights, gradients and optimizer alone",
            got=f"{bytes_text(there)} here",
            fix="a smaller model (-8l keeps 8 layers); for a cluster, penstock plan MODEL --on 64xMI300X --write",
        )


def _planned(run: Run) -> Run:
    """The run in its fastest layout on the GPUs of this machine; unchanged where their speed is unknown."""
    chip = chip_named(device_name(torch.device("cuda", 0))) if torch.cuda.is_available() else None
    if chip is None or chip.pattern not in known_hardware():
        return run
    cluster = cluster_of(torch.cuda.device_count(), load_hardware(chip.pattern))
    plan = search(SearchRequest(run=run, cluster=cluster, top=1))
    if not plan.candidates:
        raise ConfigError(
            f"no layout of {run.name} fits {cluster.devices} x {cluster.hardware.name}",
            fix="more devices, or a smaller model (-8l keeps 8 layers); penstock plan says why",
        )
    return plan.candidates[0].run


def _head(model: str, path: Path) -> Iterator[str]:
    about = " ".join((PRESETS[model].__doc__ or "").split()) if model in PRESETS else model
    yield f"# {about}"
    yield "#"
    for command, meaning in (
        (f"penstock train {path}", "every GPU of this machine, or its CPU"),
        (f"penstock config show {path}", "everything, also what the preset says"),
        ("penstock config explain FIELD", "what a field means"),
    ):
        yield f"#   {command:<44}  {meaning}"
    yield from ("", f"version = {VERSION}", f'preset = "{model}"  # what is not said below is as there')


def _fields(run: Run, base: Run) -> Iterator[str]:
    """Fields that differ or are always shown, by section, each with its documentation."""
    wanted, usual = leaves(run), leaves(base)
    chosen = [
        path
        for path, value in wanted.items()
        if path != "name" and (path in SHOWN or path not in usual or usual[path] != value)
    ]
    section = ""
    # TOML: keys of the top level come before all tables.
    for path in sorted(chosen, key=lambda path: (path.count(".") > 0, list(wanted).index(path))):
        above, _, name = path.rpartition(".")
        if above != section:  # a new table
            yield from ("", f"[{above}]")
            section = above
        yield f"# {next(field.doc for field in find(Run, path))}"
        if path == "training.steps":
            tokens = count_text(run.tokens_per_step * run.training.steps)
            yield f"# {tokens} tokens in all, {run.tokens_per_step:,} in each step."
        yield f"{name} = {as_toml('none' if wanted[path] is None else wanted[path])}"
