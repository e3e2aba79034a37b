"""What the verbs of `penstock data` that read text share: the options, and the texts that they name."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.config.data import Data
from penstock.data.documents import TextDocuments
from penstock.data.open import open_text


class TextSource(StrEnum):
    """What the files are."""

    JSONL = "jsonl"
    TEXT = "text"
    PARQUET = "parquet"


class CorruptTexts(StrEnum):
    """What becomes of a text that cannot be used."""

    STOP = "stop"
    SKIP = "skip"


Files = Annotated[list[str], typer.Argument(metavar="FILES", help="Files, folders or globs.")]
SourceOption = Annotated[TextSource, typer.Option("--source", help="Lines, whole files, or rows.")]
FieldOption = Annotated[str, typer.Option("--text-field", help="Field or column that holds the text.")]
CorruptOption = Annotated[CorruptTexts, typer.Option("--corrupt", help="Stop at a damaged text, or leave it out.")]
CacheOption = Annotated[Path, typer.Option("--cache", help="Folder for decompressed copies of compressed files.")]

CACHE = Path("runs/cache")
"""Where runs keep theirs."""

_NAMED = 5

_ANY_VOCABULARY = 2**31


def open_texts(
    files: list[str], source: TextSource, text_field: str, corrupt: CorruptTexts, cache: Path
) -> TextDocuments:
    """Returns the texts of files, in their order, as a run would read them.

    Raises:
        DataError: a file is missing, damaged or empty.
    """
    settings = Data(
        source=source.value, files=tuple(files), text_field=text_field, corrupt=corrupt.value, validation_share=0.0
    )
    text = open_text(settings, "train", vocabulary_size=_ANY_VOCABULARY, seed=0, cache=cache)
    documents = text.parts[0].documents
    assert isinstance(documents, TextDocuments), f"{source} is a source of text"
    return documents


def print_left_out(faults: Sequence[str], where: str = "") -> None:
    """Names some of the texts that were left out; `where` says what names them all."""
    if faults:
        print(f"{len(faults):,} corrupt documents were left out{where}:")
    for fault in faults[:_NAMED]:
        print(f"  {fault}")
