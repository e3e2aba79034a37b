"""The data settings of a run -> the source that they name. The only file that knows all sources."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from penstock.base.errors import DataError
from penstock.data.sources import Source, Split, in_split
from penstock.data.standard_library import open_standard_library
from penstock.data.synthetic import MarkovTokens, RandomTokens
from penstock.data.text import JsonLines, Keep, PlainText, TextFiles, keep_all
from penstock.data.tokenizer import Tokenizer, open_tokenizer

SourceName = Literal["standard-library", "text", "jsonl", "synthetic-random", "synthetic-learnable"]


def open_source(  # noqa: PLR0913 - one argument for each field of the data section, by its name
    *,
    source: SourceName,
    split: Split,
    vocabulary_size: int,
    seed: int,
    files: Sequence[str] = (),
    validation_files: Sequence[str] = (),
    tokenizer: str = "bytes",
    text_field: str = "text",
    end_of_document: str | None = None,
    validation_share: float = 0.02,
) -> Source:
    """Opens the documents of one split. All arguments but three are the fields of the config's data section.

    Args:
        source: kind of source.
        split: which part of it.
        vocabulary_size: of the model; ids at or above it cannot be embedded.
        seed: of synthetic documents.
        files: text and jsonl only: files for training, and for validation too if that has none of its own.
        validation_files: text and jsonl only: files held out; training then has all of `files`.
        tokenizer: "bytes", or the path of a `tokenizer.json`; synthetic sources have none.
        text_field: jsonl only: the field that holds the text.
        end_of_document: text of the token that ends a document; None or empty looks for the usual ones.
        validation_share: share of the documents that is held out, by hash, where validation has no files of its own.

    Raises:
        DataError: files are missing, empty, or not text; no document is in the split; the tokenizer does not fit the
            model.
    """
    if source not in get_args(SourceName):
        raise DataError("data.source is unknown", got=source, allowed=", ".join(get_args(SourceName)))
    match source:
        case "synthetic-random":
            return RandomTokens(split, vocabulary_size=vocabulary_size, seed=seed)
        case "synthetic-learnable":
            return MarkovTokens(split, vocabulary_size=vocabulary_size, seed=seed)

    encoder = _open_fitting_tokenizer(tokenizer, end_of_document, vocabulary_size)
    opened: TextFiles
    if source == "standard-library":
        opened = open_standard_library(split, encoder, validation_share=validation_share)
    else:
        paths, keep = _choose_files(split, files, validation_files, validation_share)
        if source == "jsonl":
            opened = JsonLines(paths, encoder, text_field=text_field, keep=keep)
        else:
            opened = PlainText(paths, encoder, keep)
    if len(opened) == 0:
        raise DataError(
            f"the {split} split holds no document",
            got=f"data.validation_share {validation_share:g}",
            fix="set data.validation_files, or change data.validation_share, or give more documents",
        )
    return opened


def _open_fitting_tokenizer(tokenizer: str, end_of_document: str | None, vocabulary_size: int) -> Tokenizer:
    """Returns the tokenizer, if the model can embed every id that it gives."""
    encoder = open_tokenizer(tokenizer, end_of_document)
    if encoder.vocabulary_size > vocabulary_size:
        raise DataError(
            f"data.tokenizer {tokenizer} has token ids outside the model's vocabulary",
            got=f"ids up to {encoder.vocabulary_size - 1} and a vocabulary of {vocabulary_size}",
            fix=f"give the model a vocabulary of {encoder.vocabulary_size} or more, or take another tokenizer",
        )
    return encoder


def _choose_files(
    split: Split, files: Sequence[str], validation_files: Sequence[str], validation_share: float
) -> tuple[list[Path], Keep]:
    """Returns the files of a split, and which of their documents belong to it."""
    chosen = validation_files if split == "validation" and validation_files else files
    if not chosen:
        raise DataError("data.files is empty", fix="set data.files to the files to train on")
    both = {Path(name).resolve() for name in files} & {Path(name).resolve() for name in validation_files}
    if both:
        raise DataError(
            f"data file {min(both)} is in data.files and in data.validation_files", fix="take it out of one"
        )
    keep = keep_all if validation_files else partial(in_split, split, validation_share=validation_share)
    return [Path(name) for name in chosen], keep
