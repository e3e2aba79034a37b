"""`penstock init`: five questions, and a file that trains as it is.

    penstock init                                  asks, and writes run.toml
    penstock init mine.toml                        the same, another file
    penstock init mine.toml --model deepseek-v2-lite --on 8xH200 --data corpus/ --tokenizer t.json --tokens 20B
    penstock init mine.toml --model debug --yes optimizer.learning_rate=1e-3    the usual answer to what is not said

What is answered by an option is not asked. The answers become a run:

    model       a preset                                  all fields that are not asked
    on          this machine, or a cluster by name        the layout, by the planner; small steps on a CPU
    data        a file, folder or dataset                 fields of `data`, by the form of the name
    tokenizer   `bytes` or a file                         a larger vocabulary, if the tokenizer has more ids
    tokens      a number, or a time at the planned speed  steps, and a warm-up that fits them

The text is opened, a model that cannot fit into this machine is refused, and the run is checked before the file is
written.
"""

import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from math import ceil
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from penstock.base.devices import chip_named
from penstock.base.errors import ConfigError, DataError, DeviceError, PenstockError
from penstock.base.numbers import amount, bytes_text, count_text
from penstock.cli.config import Overrides, warn_of_unfilled
from penstock.cli.output import Force, check_output, print_next, write_file
from penstock.cli.plan_print import cluster_text, conclusion
from penstock.config.data import SourceName
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS, preset
from penstock.config.rules import check
from penstock.config.run import Run
from penstock.config.schema import as_toml, fields_of, find, leaves
from penstock.config.tree import NONE, Tree, build, merge, parse_overrides, settle
from penstock.config.versions import VERSION
from penstock.data.files import matched, uncompressed_name
from penstock.data.open import SUFFIXES
from penstock.data.tokenizer import BYTES, open_tokenizer
from penstock.parallel.launch.process import device_name
from penstock.plan.calibrate import device_memory
from penstock.plan.campaign import MOST_TOKENS
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.hardware_file import known_hardware, load_hardware, parse_cluster
from penstock.plan.projection import Projection
from penstock.plan.search import search
from penstock.plan.search_request import SearchRequest
from penstock.train.run_lock import temporary_folder
from penstock.train.setup import open_texts, state_bytes

FILE = Path("run.toml")
HERE = "here"
STANDARD_LIBRARY = "standard-library"
CPU_LENGTH, CPU_ROWS = 512, 8  # positions and rows of a step on a CPU; a step of most presets would take hours
WARMUP_SHARE = 10  # a warm-up takes at most this part of the steps
ROUND = 128  # a vocabulary is a multiple of this, for matrix products and for ranks that divide it

_DATASET = re.compile(r"[\w-]+/[\w-]+")
_TIME = re.compile(r"(?P<number>[\d_,.e]+) ?(?P<unit>[smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_USUAL = {"model": "debug", "on": HERE, "data": STANDARD_LIBRARY, "tokenizer": BYTES}  # of tokens, the preset's
QUESTIONS = {
    "model": "Which model?",
    "on": f"Where? `{HERE}` is this machine, 64xMI300X a cluster",
    "data": f"Which text? `{STANDARD_LIBRARY}`, a file, folder or glob, or a dataset such as allenai/c4",
    "tokenizer": f"Which tokenizer? `{BYTES}`, or the path of one",
    "tokens": "How much text? Such as 500M or 2B tokens, or for how long: 12h, 3d",
}


Answers = Mapping[str, str]  # by the names of the table above


@dataclass(frozen=True, kw_only=True)
class Made:
    """A run that was made from answers."""

    run: Run
    projection: Projection | None  # None without a plan
    notes: tuple[str, ...]  # for the user, a line each


def init(  # noqa: PLR0913 - one argument for each option
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; its name is the run's.")] = FILE,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option("--model", metavar="TARGET", help="A preset.")] = None,
    on: Annotated[str | None, typer.Option("--on", metavar="NxCHIP", help=f"{HERE}, or a cluster: 64xMI300X.")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="TEXT", help="A file, folder, glob or dataset.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="FILE", help=f"{BYTES}, or a tokenizer's file.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="N", help="How much text: 2B; or how long: 3d.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take the usual answer.")] = False,
    force: Force = False,
) -> None:
    """Ask five questions, and write a file that trains as it is."""
    if file.suffix != ".toml":
        raise ConfigError("init writes a file that ends in .toml", got=file)
    check_output(file, "FILE", force=force)
    given = {"model": model, "on": on, "data": data, "tokenizer": tokenizer, "tokens": tokens}
    answers = _answers(given, asks=not yes)
    with Console(stderr=True).status("planning and opening the text"):  # stderr: nothing is drawn into a pipe
        made = make_run(answers, file.stem, overrides or ())
    options = [word for name, value in answers.items() for word in (f"--{name}", value)]
    words = shlex.join(["penstock", "init", str(file), *options, *(overrides or [])])
    write_file(file, run_text(made, answers["model"], file, words))
    warn_of_unfilled(made.run)
    for note in made.notes:
        print(f"note: {note}")
    print(f"wrote {file}")
    print_next("train", file)


def _answers(given: dict[str, str | None], *, asks: bool) -> Answers:
    """Take each answer from an option, a person, or the usual one, and check it before the next question."""
    missing = [name for name, value in given.items() if value is None]
    if missing and asks and not sys.stdin.isatty():
        options = " ".join(f"--{name}" for name in missing)
        raise ConfigError(
            "standard input is not a terminal, so questions cannot be asked",
            got=f"no {options}",
            fix=f"{options}, or --yes",
        )
    answers: dict[str, str] = {}
    for name, value in given.items():
        if value is not None:
            _look(name, value, answers)
            answers[name] = value
        else:
            usual = _USUAL.get(name) or _usual_tokens(preset(answers["model"]))
            answers[name] = _asked(name, usual, answers) if asks else usual
    return answers


def _asked(name: str, usual: str, answers: Answers) -> str:
    """Ask a person until the answer can be used."""
    if name == "model":
        print(f"Presets: {', '.join(PRESETS)}; `penstock config list` says what they are.")
    while True:
        try:
            answer = input(f"{QUESTIONS[name]} [{usual}] ").strip() or usual  # an empty line takes the usual answer
        except EOFError:
            raise ConfigError("no answer", got="the end of the input", fix=f"--{name}, or --yes") from None
        try:
            _look(name, answer, answers)
        except PenstockError as error:
            print(f"  {error}")
        else:
            return answer


def _look(name: str, answer: str, answers: Answers) -> None:
    """Refuse an unusable answer, as far as it can be checked now."""
    looks: dict[str, Callable[[str], object]] = {
        "model": preset,
        "on": cluster_named,
        "data": text_fields,
        "tokenizer": open_tokenizer,
    }
    if name in looks:
        looks[name](answer)
    elif answer.strip()[-1:] not in set("smhd") or cluster_named(answers["on"]) is None:
        tokens_of(answer)  # a time becomes tokens when there is a plan


def make_run(answers: Answers, name: str, overrides: Sequence[str] = ()) -> Made:
    """The run that five answers describe; overrides win. Raises a PenstockError if it cannot be trained there."""
    data = {**text_fields(answers["data"]), "tokenizer": answers["tokenizer"]}
    run, notes = _with_vocabulary(_with(preset(answers["model"]), {"name": name, "data": data}))
    cluster, projection = cluster_named(answers["on"]), None  # no cluster is this machine, whose speed is unknown
    if cluster is None and not torch.cuda.is_available():
        run, small = _on_cpu(run)
        notes += small
    chosen = parse_overrides(Run, overrides)
    run = _with(run, chosen)
    if cluster is None:
        _check_memory(run)
    else:
        found = search(SearchRequest(run=run, cluster=cluster, top=1))  # the fastest layout that fits
        if not found.candidates:
            raise ConfigError(
                f"no layout of {run.name} fits {cluster.devices} x {cluster.hardware.name}",
                fix="more devices, or a smaller model (-8l keeps 8 layers); penstock plan says why",
            )
        projection = found.candidates[0]
        run = projection.run
    run, text_notes = _with_text(run, is_here=answers["on"] == HERE)
    steps = max(1, ceil(tokens_of(answers["tokens"], projection) / run.tokens_per_step))
    steps = chosen.get("training", {}).get("steps", steps)
    # The schedule fits the steps; overrides win once more.
    warmup = min(run.schedule.warmup_steps, steps // WARMUP_SHARE)
    decay = run.schedule.decay_steps if run.schedule.decay_steps <= steps - warmup else 0  # 0: a tenth of the steps
    fitting = {"training": {"steps": steps}, "schedule": {"warmup_steps": warmup, "decay_steps": decay}}
    run = _with(_with(run, fitting), chosen)
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
    there = device_memory(device)[0] * max(1, torch.cuda.device_count())  # bytes of all devices together
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
        return {"source": "huggingface", "dataset": text, "streaming": True}  # without a copy of all of it
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
    suffix = ".idx" if path.suffix == ".bin" else uncompressed_name(path).suffix  # a pair is named by either file
    sources: tuple[SourceName, ...] = ("jsonl", "parquet", "packed")
    return next((source for source in sources if suffix in SUFFIXES[source]), "text")


def _with_vocabulary(run: Run) -> tuple[Run, tuple[str, ...]]:
    """The run with a vocabulary for every id of its tokenizer."""
    if run.data.tokenizer == BYTES or run.data.source == "packed":
        return run, ()
    size = open_tokenizer(run.data.tokenizer, run.data.end_of_document or None).vocab_size
    if size <= run.model.vocab_size:
        return run, ()
    room = ceil(size / ROUND) * ROUND  # ids, rounded up
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
            raise error from None  # the text itself is at fault
        return without, (f"nothing is evaluated: {error.what}",)
    return run, ()


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
    each = projection.time.tokens_per_second_per_device  # as planned, not measured
    return number * _SECONDS[time["unit"]] * each * projection.cluster.devices


def _usual_tokens(run: Run) -> str:
    """Tokens that a preset trains on, as an answer."""
    return count_text(run.tokens_per_step * run.training.steps).replace(" ", "")


# Fields in every file, also if they equal the preset.
SHOWN = (
    "training.steps",
    "optimizer.learning_rate",
    "data.source",
    "data.tokenizer",
    "evaluation.every",
    "checkpoint.every",
)


def run_text(made: Made, model: str, path: Path, words: str) -> str:
    """The text of the file `path`, whose stem is the name of the run, checked by loading it.

    The file starts from the preset `model`, and names the `words` of the command that made it.
    """
    text = "\n".join([*_head(made, model, path, words), *_fields(made.run, preset(model)), ""])
    # Load the draft: the file must say the run exactly.
    with temporary_folder("init") as folder:
        draft = folder / path.name
        draft.write_text(text, encoding="utf-8")
        if load_run(str(draft)) != made.run:
            raise ConfigError(f"{path} cannot say what was asked for", fix="start from penstock config show MODEL")
    return text


def _head(made: Made, model: str, path: Path, words: str) -> Iterator[str]:
    about = " ".join((PRESETS[model].__doc__ or "").split()) if model in PRESETS else model
    yield f"# {about}"
    yield f"# Written by: {words}"
    if made.projection is not None:
        yield f"# Planned for {cluster_text(made.projection.cluster)}:"
        yield f"#   {conclusion(made.projection)}"
    yield from (f"# Note: {note}" for note in made.notes)
    yield "#"
    command, meaning = f"penstock train {path}", "every GPU of this machine, or its CPU"
    if made.projection is not None and made.projection.cluster.nodes > 1:
        cluster, meaning = made.projection.cluster, "a job script"
        sizes = f"--nodes {cluster.nodes} --gpus-per-node {cluster.node_devices}"
        command = f"penstock launch slurm {path} {sizes}"
    yield f"#   {command:<44}  {meaning}"
    yield f"#   {f'penstock config show {path}':<44}  everything, also what the preset says"
    yield f"#   {'penstock config explain FIELD':<44}  what a field means"
    yield ""
    yield f"version = {VERSION}"
    yield f'preset = "{model}"  # what is not said below is as there'


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
        yield f"# {_meaning(path, run)}"
        yield f"{name} = {as_toml(NONE) if wanted[path] is None else as_toml(wanted[path])}"


def _meaning(path: str, run: Run) -> str:
    if path == "training.steps":
        tokens = count_text(run.tokens_per_step * run.training.steps)
        return f"Optimizer steps; {tokens} tokens in all, {run.tokens_per_step:,} in each."
    return next(field.doc for field in find(Run, path))
