"""`penstock init`: five questions, and a file that trains as it is.

    penstock init                                  asks, and writes run.toml
    penstock init mine.toml                        the same, another file
    penstock init mine.toml --model deepseek-v2-lite --on 8xH200 --data corpus/ --tokenizer t.json --tokens 20B
    penstock init mine.toml --model debug --yes optimizer.learning_rate=1e-3    the usual answer to what is not said

What is answered by an option is not asked. With a cluster the planner chooses the layout. The text is opened and the
run is checked before anything is written.
"""

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.base.errors import ConfigError, PenstockError
from penstock.base.numbers import count_text
from penstock.cli.config import Overrides, warn_of_unfilled
from penstock.cli.init_run import (
    HERE,
    STANDARD_LIBRARY,
    Answers,
    Made,
    cluster_named,
    make_run,
    text_fields,
    tokens_of,
    usual_tokens,
)
from penstock.cli.output import Force, check_output, print_next, write_file
from penstock.cli.plan_print import cluster_text, conclusion
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS, preset
from penstock.config.run import Run
from penstock.config.schema import as_toml, find, leaves
from penstock.config.tree import NONE
from penstock.config.versions import VERSION
from penstock.data.tokenizer import BYTES, open_tokenizer

FILE = Path("run.toml")

_USUAL = {"model": "debug", "on": HERE, "data": STANDARD_LIBRARY, "tokenizer": BYTES}  # of tokens, the preset's
_LOOKS: dict[str, Callable[[str], object]] = {
    "model": preset,
    "on": cluster_named,
    "data": text_fields,
    "tokenizer": open_tokenizer,
}
QUESTIONS = {
    "model": "Which model?",
    "on": f"Where? `{HERE}` is this machine, 64xMI300X a cluster",
    "data": f"Which text? `{STANDARD_LIBRARY}`, a file, folder or glob, or a dataset such as allenai/c4",
    "tokenizer": f"Which tokenizer? `{BYTES}`, or the path of one",
    "tokens": "How much text? Such as 500M or 2B tokens, or for how long: 12h, 3d",
}


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
    with Console(stderr=True).status("planning and opening the text"):
        made = make_run(answers, file.stem, overrides or ())
    options = [word for name, value in vars(answers).items() for word in (f"--{name}", value)]
    words = shlex.join(["penstock", "init", str(file), *options, *(overrides or [])])
    write_file(file, run_text(made, answers.model, file, words))
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
            usual = _USUAL[name] if name in _USUAL else usual_tokens(answers["model"])
            answers[name] = _asked(name, usual, answers) if asks else usual
    return Answers(**answers)


def _asked(name: str, usual: str, answers: dict[str, str]) -> str:
    """Ask a person until the answer can be used."""
    if name == "model":
        print(f"Presets: {', '.join(PRESETS)}; `penstock config list` says what they are.")
    while True:
        try:
            answer = input(f"{QUESTIONS[name]} [{usual}] ").strip() or usual
        except EOFError:
            raise ConfigError("no answer", got="the end of the input", fix=f"--{name}, or --yes") from None
        try:
            _look(name, answer, answers)
        except PenstockError as error:
            print(f"  {error}")
        else:
            return answer


def _look(name: str, answer: str, answers: dict[str, str]) -> None:
    """Refuse an unusable answer, as far as it can be checked now."""
    if name in _LOOKS:
        _LOOKS[name](answer)
    elif answer.strip()[-1:] not in set("smhd") or cluster_named(answers["on"]) is None:
        tokens_of(answer)  # a time becomes tokens when there is a plan


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
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        draft = Path(folder) / path.name
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
    for command, meaning in _commands(made, path).items():
        yield f"#   {command:<44}  {meaning}".rstrip()
    yield ""
    yield f"version = {VERSION}"
    yield f'preset = "{model}"  # what is not said below is as there'


def _commands(made: Made, path: Path) -> dict[str, str]:
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
    """Fields that differ or are always shown, by section, each with its documentation."""
    wanted, usual = leaves(run), leaves(base)
    chosen = [
        path
        for path, value in wanted.items()
        if path != "name" and (path in SHOWN or path not in usual or usual[path] != value)
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
