"""`penstock config`: list, show, explain, compare and check configurations. Nothing here imports PyTorch."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from penstock.base.errors import PenstockError
from penstock.base.numbers import count_text, flops_text
from penstock.cli.output import print_next, print_table, warn
from penstock.cli.verbs import Json, Overrides, Target, group_app
from penstock.config.explain import explain as explain_field
from penstock.config.explain import fields_with, json_schema, reference_markdown
from penstock.config.load import dump_toml, load_run
from penstock.config.presets.registry import PRESETS
from penstock.config.run import Run
from penstock.config.run_rules import BYTES_VOCABULARY, bytes_are_encoded
from penstock.config.schema import differences
from penstock.config.size import Count, size_of

app = group_app("List, show, explain, compare and check configurations.")


@app.command()
def show(
    target: Target,
    overrides: Overrides = None,
    as_json: Json = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print the file alone, without the counts below it.")] = False,
) -> None:
    """Print a run in full, with its parameters and FLOPs per token. The output is a TOML file that can be trained."""
    if as_json and as_toml:
        raise PenstockError("--json and --toml are two forms of one answer", fix="leave one of them out")
    run = load_run(target, overrides or ())
    if as_toml:
        print(dump_toml(run), end="")
        return
    counted = size_of(run.model, run.training.sequence_length)  # by arithmetic, without PyTorch
    if as_json:
        print(json.dumps({"run": run.model_dump(), "count": asdict(counted)}, indent=2))
    else:
        print(f"{dump_toml(run)}\n{_count_lines(run, counted)}")


def _count_lines(run: Run, counted: Count) -> str:
    """Comments in TOML, so that the output as a whole is a file."""
    length = run.training.sequence_length
    lines = [f"parameters  {count_text(counted.parameters)}"]
    if counted.mtp_parameters:
        lines += [f"prediction  {count_text(counted.mtp_parameters)} more, for multi-token prediction"]
    lines += [
        f"active      {count_text(counted.active_parameters)} parameters for each token",
        f"training    {flops_text(counted.flops_per_token)} for each token, at sequence length {length}",
    ]
    return "\n".join(f"# {line}" for line in lines)


@app.command("list")
def list_presets(as_json: Json = False) -> None:
    """List the presets. Any of them can be cut to its first N layers: deepseek-v2-lite-8l."""
    rows = []
    for name, make in PRESETS.items():
        model = make().model
        experts = "none" if model.moe is None else f"{model.moe.top_k} of {model.moe.experts}"
        rows.append((name, f"{model.layers}", experts, " ".join((make.__doc__ or "").split())))
    if as_json:
        print(json.dumps([{"name": name, "description": doc} for name, _, _, doc in rows], indent=2))
    else:
        print_table(("preset", "layers", "experts", "what"), rows)


@app.command()
def explain(field: Annotated[str, typer.Argument(help="Full path, such as model.moe.top_k, or model.moe.")]) -> None:
    """Print a field's meaning, type, range, presets and rules."""
    print(explain_field(field))


@app.command()
def search(
    word: Annotated[str, typer.Argument(help="A word, or another trainer's name: balance, --seq-length.")],
) -> None:
    """List the fields with a word in their name or meaning, or that another trainer calls so."""
    rows = [(field.path, field.doc) for field in fields_with(word)]
    if not rows:
        raise PenstockError(f"no field has {word!r} in its name or meaning", fix="penstock config reference lists all")
    print_table(("field", "meaning"), rows)


@app.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="A preset, a TOML file, or a run folder.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    as_json: Json = False,
) -> None:
    """Show the fields in which two runs differ."""
    changes = differences(load_run(left), load_run(right))
    if as_json:
        print(json.dumps([asdict(change) for change in changes], indent=2))
    elif not changes:
        print(f"{left} and {right} are the same")
    else:
        rows = [(change.field, change.left or "-", change.right or "-") for change in changes]
        print_table(("field", left, right), rows)


@app.command()
def validate(file: Target, overrides: Overrides = None) -> None:
    """Check a file, and say whether it could be trained."""
    run = load_run(file, overrides or ())
    warn_of_unfilled(run)
    print(f"{file} is valid: run {run.name}, {run.training.steps} steps of {run.tokens_per_step} tokens")
    print_next("train", file, *(overrides or ()))


@app.command()
def schema() -> None:
    """Print the JSON schema of a run, for editors and other tools."""
    print(json.dumps(json_schema(), indent=2))


@app.command()
def reference() -> None:
    """Print the reference of all fields as Markdown: docs/config.md."""
    print(reference_markdown(), end="")


def warn_of_unfilled(run: Run) -> None:
    """Warn if the byte tokenizer uses less than half of the vocabulary."""
    if not bytes_are_encoded(run) or run.model.vocab_size < 2 * BYTES_VOCABULARY:  # more than half is used
        return
    library = run.data.source == "standard-library" and not run.data.mixture  # the default of a preset
    text = " and data.source standard-library is 30 MB of Python" if library else ""
    fields = ", and data.source and data.files to your text" if library else ""
    warn(
        f"data.tokenizer bytes has {BYTES_VOCABULARY} ids of model.vocab_size {run.model.vocab_size:,}: the others are "
        f"never trained{text}; fix: set data.tokenizer to the model's tokenizer{fields}, or "
        f"model.vocab_size={BYTES_VOCABULARY}"
    )
