"""Five answers -> a run that trains as it is.

    model       a preset                                  all fields that are not asked
    data        a file, folder or dataset                 fields of `data`, by the form of the name
    tokenizer   `bytes` or a file                         a larger vocabulary, if the tokenizer has more ids
    on          this machine, or a cluster by name        the layout, by the planner; small steps on a CPU
    tokens      a number, or a time at the planned speed  steps, and a warm-up that fits them

The text is opened here, and a model that cannot fit into this machine is refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from math import ceil
from pathlib import Path

import torch

from penstock.base.devices import chip_named
from penstock.base.errors import ConfigError, DataError, DeviceError
from penstock.base.numbers import amount, bytes_text, count_text
from penstock.config.data import SourceName
from penstock.config.presets.registry import preset
from penstock.config.rules import check
from penstock.config.run import Run
from penstock.config.schema import fields_of
from penstock.config.tree import Tree, build, merge, parse_overrides, settle
from penstock.data.files import matched, uncompressed_name
from penstock.data.open import SUFFIXES
from penstock.data.tokenizer import BYTES, open_tokenizer
from penstock.parallel.launch.process import device_name
from penstock.plan.calibrate import device_memory
from penstock.plan.campaign import MOST_TOKENS
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.hardware_file import known_hardware, load_hardware, parse_cluster
from penstock.plan.projection import Projection
from penstock.plan.search import SearchRequest, search
from penstock.train.setup import open_texts, state_bytes

HERE = "here"
STANDARD_LIBRARY = "standard-library"
CPU_LENGTH, CPU_ROWS = 512, 8  # positions and rows of a step on a CPU; a step of most presets would take hours
WARMUP_SHARE = 10  # a warm-up takes at most this part of the steps
ROUND = 128  # a vocabulary is a multiple of this, for matrix products and for ranks that divide it

_DATASET = re.compile(r"[\w-]+/[\w-]+")
_TIME = re.compile(r"(?P<number>[\d_,.e]+) ?(?P<unit>[smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers to the five questions, as the table above shows their forms."""

    model: str
    on: str
    data: str
    tokenizer: str
    tokens: str


@dataclass(frozen=True, kw_only=True)
class Made:
    """A run that was made from answers."""

    run: Run
    projection: Projection | None  # None without a plan
    notes: tuple[str, ...]  # for the user, a line each


def make_run(answers: Answers, name: str, overrides: Sequence[str] = ()) -> Made:
    """The run that five answers describe; `overrides`, `a.b=c` each, win over the answers.

    Raises a PenstockError if an answer cannot be used, or the run cannot be trained there.
    """
    data = {**text_fields(answers.data), "tokenizer": answers.tokenizer}
    run, notes = _with_vocabulary(_with(preset(answers.model), {"name": name, "data": data}))
    cluster, projection = cluster_named(answers.on), None  # no cluster is this machine, whose speed is unknown
    if cluster is None and not torch.cuda.is_available():
        run, small = _on_cpu(run)
        notes += small
    chosen = parse_overrides(Run, overrides)
    run = _with(run, chosen)
    if cluster is None:
        _check_memory(run)
    else:
        projection = _planned(run, cluster)
        run = projection.run
    run, text_notes = _with_text(run, is_here=answers.on == HERE)
    steps = max(1, ceil(tokens_of(answers.tokens, projection) / run.tokens_per_step))
    # The schedule fits the steps that an override asks for; then overrides win once more.
    run = _with(_with_steps(run, chosen.get("training", {}).get("steps", steps)), chosen)
    check(run)
    return Made(run=run, projection=projection, notes=(*notes, *text_notes))


def _with(run: Run, changes: Tree) -> Run:
    """The run with changed fields; rules are checked at the end."""
    return build(Run, merge(Run, run.model_dump(), settle(fields_of(Run), changes)))


def cluster_named(on: str) -> Cluster | None:
    """The named cluster; None for this machine, if its devices are unknown."""
    if on != HERE:
        return parse_cluster(on)
    if not torch.cuda.is_available():
        return None
    chip = chip_named(device_name(torch.device("cuda", 0)))
    if chip is None or chip.pattern not in known_hardware():
        return None
    return cluster_of(torch.cuda.device_count(), load_hardware(chip.pattern))


def _planned(run: Run, cluster: Cluster) -> Projection:
    found = search(SearchRequest(run=run, cluster=cluster, top=1))
    if not found.candidates:
        raise ConfigError(
            f"no layout of {run.name} fits {cluster.devices} x {cluster.hardware.name}",
            fix="more devices, or a smaller model (-8l keeps 8 layers); penstock plan says why",
        )
    return found.candidates[0]


def _on_cpu(run: Run) -> tuple[Run, tuple[str, ...]]:
    """The run with steps that take minutes on a CPU, if its own are larger."""
    if run.tokens_per_step <= CPU_LENGTH * CPU_ROWS:
        return run, ()
    length = min(run.training.sequence_length, CPU_LENGTH)
    rows = {"micro_batch": 1, "global_batch": CPU_ROWS, "sequence_length": length}
    return _with(run, {"training": rows}), (f"steps are small, {length * CPU_ROWS:,} tokens: this machine has no GPU",)


def _check_memory(run: Run) -> None:
    """Refuse a run that this machine cannot hold."""
    needed = state_bytes(run)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    there = device_memory(device)[0] * max(1, torch.cuda.device_count())
    if needed > there:
        raise DeviceError(
            f"{run.name} needs {bytes_text(needed)} for weights, gradients and optimizer alone",
            got=f"{bytes_text(there)} here",
            fix="a smaller model (-8l keeps 8 layers), or --on 64xMI300X for a cluster",
        )


def text_fields(text: str) -> Tree:
    """Fields of the section `data`, by the form of the answer. Raises a DataError if nothing there can be read."""
    if text == STANDARD_LIBRARY:
        return {"source": STANDARD_LIBRARY}
    path = Path(text).expanduser()
    # The marks of `datasets.save_to_disk`.
    if path.is_dir() and any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
        return {"source": "huggingface", "dataset": str(path)}
    if path.exists() or has_magic(text) or text.startswith(("~", ".", "/")) or path.suffix:
        return {"source": _source_of_all(path), "files": str(path)}
    if _DATASET.fullmatch(text):
        return {"source": "huggingface", "dataset": text, "streaming": True}
    raise DataError(
        "this is no text that can be read",
        got=repr(text),
        allowed=f"{STANDARD_LIBRARY}, a file, a folder, a glob, or a Hugging Face dataset such as allenai/c4",
    )


def _source_of_all(path: Path) -> SourceName:
    """Source of most files of a folder or glob. A name with a known suffix need not exist on this machine."""
    own = _source(path)
    if own != "text" or not (path.is_dir() or has_magic(str(path))):
        return own
    kinds = [_source(file) for file in matched([str(path)])]
    return max(dict.fromkeys(kinds), key=kinds.count)  # of equally many the first


def _source(path: Path) -> SourceName:
    """Source of a file, by the suffix of its name before compression."""
    suffix = ".idx" if path.suffix == ".bin" else uncompressed_name(path).suffix
    sources: tuple[SourceName, ...] = ("jsonl", "parquet", "packed")
    return next((source for source in sources if suffix in SUFFIXES[source]), "text")


def _with_vocabulary(run: Run) -> tuple[Run, tuple[str, ...]]:
    """The run with a vocabulary for every id of its tokenizer."""
    if run.data.tokenizer == BYTES or run.data.source == "packed":
        return run, ()
    size = open_tokenizer(run.data.tokenizer, run.data.end_of_document or None).vocab_size
    if size <= run.model.vocab_size:
        return run, ()
    room = ceil(size / ROUND) * ROUND
    note = f"model.vocab_size is {room:,}: the tokenizer has {size:,} ids, and the preset room for "
    return _with(run, {"model": {"vocab_size": room}}), (f"{note}{run.model.vocab_size:,}",)


def _with_text(run: Run, *, is_here: bool) -> tuple[Run, tuple[str, ...]]:
    """The run after its text was opened; without held-out text it is not evaluated."""
    if run.data.streaming:
        return run, ("the dataset was not looked at: that needs the network",)
    missing = [name for name in run.data.files if not Path(name).exists() and not has_magic(name)]
    missing += [name for name in run.data.files if has_magic(name) and not glob(name, recursive=True)]
    if missing and not is_here:
        return run, (f"{missing[0]} is not on this machine, so it was not looked at",)
    try:
        open_texts(run)
    except DataError as error:
        # Too little text to hold some out: evaluate nothing, if that alone is the fault.
        without = _with(run, {"evaluation": {"rows": 0}})
        try:
            open_texts(without)
        except DataError:
            raise error from None
        return without, (f"nothing is evaluated: {error.what}",)
    return run, ()


def _with_steps(run: Run, steps: int) -> Run:
    """The run with so many steps, and a schedule that fits them."""
    warmup = min(run.schedule.warmup_steps, steps // WARMUP_SHARE)
    decay = run.schedule.decay_steps if run.schedule.decay_steps <= steps - warmup else 0
    return _with(run, {"training": {"steps": steps}, "schedule": {"warmup_steps": warmup, "decay_steps": decay}})


def tokens_of(text: str, projection: Projection | None = None) -> float:
    """The number of tokens of an answer: a number, with K, M, B or T behind it; or a time, with s, m, h or d.

    A time needs the speed of a projection. Raises a ConfigError for anything else.
    """
    time = _TIME.fullmatch(text.strip())
    number = amount(text if time is None else time["number"])
    if not number:
        raise ConfigError(
            "this says neither how many tokens nor how long",
            got=repr(text),
            allowed="a number such as 500M or 2B, or a time such as 90m, 12h or 3d",
        )
    if number > MOST_TOKENS:
        raise ConfigError(
            "this is more text than there is", got=f"{text:.40}", allowed=f"up to {MOST_TOKENS:.0e} tokens"
        )
    if time is None:
        return number
    if projection is None:
        raise ConfigError(
            "how much text a time is cannot be said of this machine before it has trained",
            got=repr(text),
            fix="say how many tokens, or name hardware that is known: --on 8xH200",
        )
    each = projection.time.tokens_per_second_per_device
    return number * _SECONDS[time["unit"]] * each * projection.cluster.devices


def usual_tokens(model: str) -> str:
    """Tokens that a preset trains on, as an answer."""
    run = preset(model)
    return count_text(run.tokens_per_step * run.training.steps).replace(" ", "")
