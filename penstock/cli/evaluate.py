"""`penstock evaluate`: loss and bits per byte of saved weights on text, and scores of tasks.

    penstock evaluate runs/first                              the held-out text of the run
    penstock evaluate runs/first --data books --data a.jsonl  texts of one's own, one line for each
    penstock evaluate Qwen3-30B-A3B --data a.jsonl --json     a folder of Hugging Face weights; JSON
    penstock evaluate runs/first --tasks hellaswag,arc_easy   tasks of lm-evaluation-harness

Bits per byte compare models with different tokenizers: the loss of all predicted tokens in bits, over the UTF-8 bytes
of their text. A file is plain text (one document), or JSON Lines, Parquet or packed tokens by its suffix. One process
computes, on a GPU if there is one. Nothing of the run is changed, so it may still be training.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from penstock.cli.output import print_next, print_table
from penstock.cli.verbs import Checkpoint, Json
from penstock.parallel.launch.environment import read_environment
from penstock.parallel.launch.process import choose_device, prepare_process
from penstock.train.saved_model import evaluate_tasks, evaluate_text, import_harness, open_model, own_texts, texts_of

_COLUMNS = ("source", "loss", "bits/byte", "tokens", "bytes", "rows", "seconds")


def evaluate(
    source: Annotated[Path, typer.Argument(metavar="RUN|WEIGHTS", help="A run, or a folder of weights.")],
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="PATH", help="File, folder or glob; may be repeated.")
    ] = None,
    *,
    text_field: Annotated[str, typer.Option("--text-field", help="Field or column that holds the text.")] = "text",
    rows: Annotated[int, typer.Option("--rows", min=0, help="Rows of each text at most; 0 takes all of it.")] = 256,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", min=2, help="Tokens of a row; else that of the run.")
    ] = None,
    step: Checkpoint = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", metavar="NAME,...", help="Tasks of lm-evaluation-harness.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print loss and bits per byte of weights on text."""
    harness = import_harness() if tasks else None  # its absence is reported before any work
    device = choose_device("auto")
    prepare_process(read_environment(), seed=0, deterministic=False)
    saved = open_model(source, step, device)
    length = sequence_length or saved.run.training.sequence_length
    with TemporaryDirectory() as cache:  # of decompressed copies
        if data:
            texts, notices = texts_of(saved.run, data, text_field, Path(cache))
            for line in notices:
                print(line, file=sys.stderr)  # standard output may be for programs
        else:
            texts = {} if harness else own_texts(saved)
        losses = [evaluate_text(saved, name, text, rows=rows, sequence_length=length) for name, text in texts.items()]
    scores = evaluate_tasks(harness, saved, tasks.split(","), device) if harness and tasks else {}
    if as_json:
        facts = {"weights": str(source), "step": saved.step, "sequence_length": length}
        answer = {**facts, "texts": [asdict(loss) for loss in losses], "tasks": scores}
        print(json.dumps(answer, indent=2, default=str))
        return
    print(f"{saved.label}, rows of {length:,} tokens")
    if losses:
        print_table(
            _COLUMNS,
            [
                (
                    loss.source,
                    f"{loss.loss:.4f}",
                    f"{loss.bits_per_byte:.4f}",
                    f"{loss.tokens:,}",
                    f"{loss.text_bytes:,}",
                    f"{loss.rows:,}",
                    f"{loss.seconds:.1f}",
                )
                for loss in losses
            ],
        )
    if scores:
        print_table(("task", "metric", "score"), _score_rows(scores))
    if saved.step is None:
        print_next("import", source, "--output", f"{saved.run.name}-run")
    else:
        print_next("sample", source, "The ")


def _score_rows(scores: dict[str, dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [
        (task, metric.removesuffix(",none"), f"{value:.4f}")
        for task, metrics in scores.items()
        for metric, value in metrics.items()
        if isinstance(value, float)
    ]
