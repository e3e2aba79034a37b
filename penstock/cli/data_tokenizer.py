"""`penstock data tokenizer`: train a tokenizer.

penstock data tokenizer train corpus/*.jsonl --vocabulary 32000 --output tokenizer.json
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.data_texts import (
    CACHE,
    CacheOption,
    CorruptOption,
    CorruptTexts,
    FieldOption,
    Files,
    SourceOption,
    TextSource,
    open_texts,
    print_left_out,
)
from penstock.cli.next import print_next
from penstock.cli.outputs import Force, check_output
from penstock.data.documents import TextDocuments
from penstock.data.sources import RecordError
from penstock.data.tokenizer_train import END_OF_DOCUMENT, train_tokenizer

Vocabulary = Annotated[
    int, typer.Option("--vocabulary", max=10_000_000, help="Tokens, 256 bytes and special ones among them.")
]
Output = Annotated[Path, typer.Option("--output", help="File to write, such as tokenizer.json.")]
Special = Annotated[list[str] | None, typer.Option("--special", help="One more special token; any number of times.")]

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def tokenizer(context: typer.Context) -> None:
    """Train a tokenizer."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(  # noqa: PLR0913 - one argument for each option
    files: Files,
    vocabulary: Vocabulary,
    output: Output,
    source: SourceOption = TextSource.JSONL,
    text_field: FieldOption = "text",
    special: Special = None,
    corrupt: CorruptOption = CorruptTexts.STOP,
    cache: CacheOption = CACHE,
    force: Force = False,
) -> None:
    """Train a byte-level BPE tokenizer on text and write its tokenizer.json."""
    check_output(output, "--output", force=force, makes_folder=True)
    texts = open_texts(files, source, text_field, corrupt, cache)
    left_out: list[str] = []
    size = train_tokenizer(
        _readable(texts, left_out, skip=corrupt is CorruptTexts.SKIP),
        output,
        vocabulary_size=vocabulary,
        special_tokens=special or (),
        show_progress=sys.stderr.isatty(),
    )
    print(f"wrote {output}: {size:,} tokens, {END_OF_DOCUMENT} ends a document")
    print_left_out(left_out)
    kind = [] if source is TextSource.JSONL else ["--source", source.value]
    print_next("data", "pack", *files, *kind, "--output", "packed/text", "--tokenizer", output)


def _readable(texts: TextDocuments, left_out: list[str], *, skip: bool) -> Iterator[str]:
    """Yields all texts but those that cannot be read, whose faults are noted."""
    for number in range(len(texts)):
        try:
            yield texts.record(number)
        except RecordError as error:
            if not skip:
                raise
            left_out.append(str(error))
