"""`penstock data inspect`: contents of the batches of a run.

    penstock data inspect debug                         the first batch of a preset
    penstock data inspect run.toml data.document_mask=true --step 100 --rows 2
    penstock data inspect runs/debug --step 1500        begins at the newest checkpoint before that step
    penstock data inspect debug --held-out              the rows of the evaluation

Rows are read as training reads them. Text is printed as a Python string, so that every character is visible.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from penstock.base.errors import ConfigError
from penstock.cli.output import print_table
from penstock.cli.verbs import Json, Overrides, Target
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.train.batch_contents import BatchContents, DocumentSpan, RowContents, held_out_contents, training_contents
from penstock.train.loop import open_store
from penstock.train.run_folder import RunFolder
from penstock.train.setup import open_split

_SHOWN = 160  # characters shown of a piece without --full: most from its beginning, some from its end

Step = Annotated[int, typer.Option("--step", min=1, help="Which batch.")]
Rows = Annotated[int, typer.Option("--rows", min=0, help="Rows to show; all are counted.")]
HeldOut = Annotated[bool, typer.Option("--held-out", help="The rows that the model is judged by.")]
Full = Annotated[bool, typer.Option("--full", help="Show the whole text of each piece.")]


def inspect(
    target: Target,
    overrides: Overrides = None,
    step: Step = 1,
    rows: Rows = 2,
    held_out: HeldOut = False,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Show the contents of the batches of a run.

    Rows are decoded piece by piece, with positions, ignored labels, padding, and parts of a mixture.
    """
    run = load_run(target, overrides or ())
    if held_out:
        if run.evaluation.rows == 0:
            raise ConfigError("the run has no held-out rows: evaluation.rows is 0", fix="set evaluation.rows")
        what = f"held-out rows of {run.name}"
        contents = held_out_contents(run, open_split(run, "validation"))
    else:
        if step > run.training.steps:
            raise ConfigError(
                "--step is behind the last step of the run",
                got=step,
                allowed=f"1 to {run.training.steps}",
                fix=f"training.steps={step} makes the run that long",
            )
        what = f"step {step} of {run.name}"
        folder = RunFolder(Path(target))  # of a run, whose checkpoints shorten the way to a step
        store = open_store(run, folder) if folder.exists else None
        contents = training_contents(run, open_split(run, "train"), step, store)
    if as_json:
        shown = [{"part": part, **asdict(row)} for part, row in zip(contents.parts, contents.rows, strict=True)][:rows]
        attention = "document" if run.data.document_mask else "row"
        print(json.dumps({"what": what, **contents.summary(), "attention": attention, "shown": shown}, indent=1))
        return
    print(f"{what}: {contents.batch_rows:,} rows of {run.training.sequence_length:,} tokens\n")
    _print_summary(run, contents)
    for number, row in enumerate(contents.rows[:rows]):
        _print_row(number, row, contents.parts[number], full)


def _print_summary(run: Run, contents: BatchContents) -> None:
    summary = contents.summary()
    counted, size = summary["counted_rows"], summary["bytes_per_token"]
    mark = "" if counted == contents.batch_rows else " (*)"
    facts = [
        ("counted", f"{counted:,} rows, {summary['tokens']:,} tokens{mark}"),
        ("pieces of documents", f"{summary['pieces']:,}, {summary['pieces_per_row']:.2f} a row"),
        ("attention sees", "one document" if run.data.document_mask else "the whole row"),
        ("text", "unknown" if size is None else f"{size:.3f} bytes a token"),
        ("padding", f"{summary['padding_share']:.2%} of the tokens"),
        ("labels not counted", f"{summary['ignored_share']:.2%}"),
    ]
    facts += [("records skipped", f"{contents.skipped:,}")] if contents.skipped else []
    for name, fact in facts:
        print(f"{name:<20} {fact}")
    for notice in contents.notices:
        print(notice)
    if mark:
        print(f"(*) of {contents.batch_rows:,} rows, the first")
    if contents.weights:
        print()
        total = sum(contents.weights.values())  # weights need not sum to 1
        parts = summary["parts"].items()
        print_table(
            ("part", "rows here", "by weight"),
            [(name, f"{part['share']:.1%}", f"{part['weight'] / total:.1%}") for name, part in parts],
        )


def _print_row(number: int, row: RowContents, part: str, full: bool) -> None:
    count = f"{len(row.pieces)} piece" + ("" if len(row.pieces) == 1 else "s")
    print(f"\nrow {number}" + (f" of {part}" if part else "") + f": {count}")
    for piece in row.pieces:
        print(f"  {_positions(piece)}\n    {_text(piece, full)}")
    if row.padding:
        print(f"  {row.tokens - row.padding}..{row.tokens - 1}: padding")


def _positions(piece: DocumentSpan) -> str:
    """Position of a piece in its row, its position ids, and its end."""
    first, last = piece.positions
    facts = [f"{piece.first}..{piece.first + piece.tokens - 1}", f"positions {first}..{last}"]
    if piece.ignored:
        facts.append(f"label not counted at {', '.join(map(str, piece.ignored[:8]))}")
    facts.append("[end of document]" if piece.ends else "[cut by the row]")  # the next row goes on, or not
    return ", ".join(facts)


def _text(piece: DocumentSpan, full: bool) -> str:
    """The text as a Python string, or ids if there is no text."""
    shown = repr(piece.text) if piece.text is not None else f"ids {' '.join(map(str, piece.ids))}"
    if full or len(shown) <= _SHOWN:
        return shown
    behind = _SHOWN // 4  # characters of the end
    return f"{shown[: _SHOWN - behind]} ... {shown[-behind:]}"
