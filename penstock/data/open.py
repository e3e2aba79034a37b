"""Opens the data of a run from its settings. The only module that knows all sources.

Training and held-out text are opened by the same rule, part by part. Held out are separate files or a separate split,
or else the share of all documents that a hash selects; with too few documents, the end of each.

The source `standard-library` is the Python files of the running Python's own standard library: real text on every
machine, without download. It has about 1,800 files and 30 MB, test suites included, and is the same for the same
Python. Files that differ between builds of a version are left out: installed packages, compiled files, and build
settings. Empty and non-UTF-8 files are left out too.
"""

import os
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.base.errors import DataError
from penstock.config.run import Data, Documents, SourceName
from penstock.data.documents import CorruptRecords, FillInMiddle, find_marks
from penstock.data.files import matched, reading, uncompressed_name
from penstock.data.hub import DatasetName, DatasetOnDisk, StreamedDataset
from penstock.data.indexed_dataset import origin_of, prefix_of
from penstock.data.mixture import Text, TextPart
from penstock.data.packed import open_packed
from penstock.data.shards import Shards
from penstock.data.sources import Source, Split, SplitFilter, in_split
from penstock.data.synthetic import MarkovTokens, RandomTokens
from penstock.data.tables import ARROW, PARQUET, Tables
from penstock.data.text import JsonLines, PlainText
from penstock.data.tokenizer import BYTES, open_tokenizer
from penstock.data.tokenizer_rules import Tokenizer

_FOREIGN_FOLDERS = ("__pycache__", "site-packages", "dist-packages")
_BUILD_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


def open_standard_library(split: Split, tokenizer: Tokenizer, *, validation_share: float) -> PlainText:
    """Returns the standard library's files of one split, sorted by path.

    A hash of a file's path inside the library decides its split: the split is the same on every machine, and a file
    that is in two Python versions is in the same split of both. Raises a DataError if this Python has no source files.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = _source_files(library)
    if not paths:
        raise DataError(
            f"this Python has no source files in {library}",
            fix='set data.source to "text" or "jsonl" and give data.files',
        )
    names = {path: path.relative_to(library).as_posix().encode() for path in paths}
    chosen = [path for path, name in names.items() if in_split(split, name, validation_share) and _is_text(path)]
    return PlainText(chosen, tokenizer)


def _source_files(library: Path) -> list[Path]:
    paths = []
    for folder, subfolders, names in os.walk(library):
        # Assigned in place: os.walk does not go into folders that are taken out of its list.
        subfolders[:] = [
            name for name in subfolders if name not in _FOREIGN_FOLDERS and not name.startswith(_BUILD_PREFIXES)
        ]
        paths += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(_BUILD_PREFIXES)]
    # By parts and not by the whole string, so that the separator of the operating system does not matter.
    return sorted(paths, key=lambda path: path.relative_to(library).parts)


def _is_text(path: Path) -> bool:
    with reading(path):
        content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return len(content) > 0


SUFFIXES = {"text": (), "jsonl": (".jsonl", ".ndjson", ".json"), "parquet": (PARQUET, *ARROW), "packed": (".idx",)}
"""Suffixes of files in a folder, by source."""


def source_of(path: Path) -> SourceName:
    """The source that reads a file, by the suffix of its name before compression; text for unknown ones."""
    suffix = ".idx" if path.suffix == ".bin" else uncompressed_name(path).suffix  # a pair is named by either file
    sources: tuple[SourceName, ...] = ("jsonl", "parquet", "packed")
    return next((source for source in sources if suffix in SUFFIXES[source]), "text")


def open_text(data: Data, split: Split, *, vocab_size: int, seed: int, cache: Path) -> Text:
    """Opens the documents of one split, with ids that a model of `vocab_size` can embed; copies go to `cache`.

    Raises a DataError if files are missing, empty, or not text, if the split has no document, if the tokenizer does not
    fit the model, or if a package is missing.
    """
    opener = _Opener(data, split, vocab_size, seed, cache, CorruptRecords(data.corrupt))
    parts = []
    for name, part in data.mixture.items():
        if split == "train" or data.validation_share > 0 or part.validation_files or part.validation_split:
            parts.append(opener.part(name, part, part.weight))
    if not data.mixture:
        parts.append(opener.part("", data, 1.0))
    filled = [part for part in parts if len(part.documents)]
    if split == "train" or not filled:  # small parts of a mixture may hold out none, if others do
        for text in parts:
            _check_filled(text, data, split)
    else:
        parts = filled
    ends = {part.documents.end_of_document: part.name for part in parts}
    if len(ends) != 1:  # one model predicts one end of a document
        raise DataError(
            "parts of data.mixture end their documents with different tokens, or none holds out text",
            got=", ".join(f"{name} with {end}" for end, name in ends.items()) or "no part",
            fix="encode all parts with one tokenizer",
        )
    return Text(tuple(parts), opener.corrupt)


def _check_filled(part: TextPart, data: Data, split: Split) -> None:
    if len(part.documents) == 0:
        raise DataError(
            f"the {split} split of {f'data.mixture.{part.name}' if part.name else 'data'} holds no document",
            got=f"data.validation_share {data.validation_share:g}",
            fix="raise data.validation_share, or hold out nothing: data.validation_share=0 evaluation.rows=0",
        )


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The tokenizer of a run."""

    setting: str  # "bytes", or a path
    tokenizer: Tokenizer
    end_of_document: int


def vocabulary_of(data: Data) -> Vocabulary:
    """The tokenizer of a run, without opening its text. For packed documents it is the one that packed them.

    Raises a DataError if the tokens have no text, or the tokenizer cannot be opened.
    """
    places = tuple(data.mixture.values()) or (data,)
    if places[0].source in ("synthetic-random", "synthetic-learnable"):
        raise DataError(f"the tokens of data.source={places[0].source} stand for no text")
    setting, end = data.tokenizer, data.end_of_document
    if setting == BYTES and all(documents.source == "packed" for documents in places):
        files = matched(places[0].files, SUFFIXES["packed"])
        origin = next(filter(None, (origin_of(prefix_of(path)) for path in files)), None)
        if origin is None:
            raise DataError(f"no tokenizer is known for {files[0]}", fix="set data.tokenizer")
        setting, end = origin.tokenizer, end or origin.end_of_document_name
    # The end of packed documents may be an id in digits, and no name.
    tokenizer = open_tokenizer(setting, None if end.isdecimal() else end or None)
    end_of_document = int(end) if end.isdecimal() else tokenizer.end_of_document
    return Vocabulary(setting=setting, tokenizer=tokenizer, end_of_document=end_of_document)


@dataclass(frozen=True)
class _Opener:
    """Opens the parts of one split."""

    data: Data
    split: Split
    vocabulary_size: int
    seed: int
    cache: Path
    corrupt: CorruptRecords

    def part(self, name: str, settings: Documents, weight: float) -> TextPart:
        path = f"data.mixture.{name}" if name else "data"
        documents = self._documents(settings, path)
        return TextPart(name=name, weight=weight, documents=documents, middle=self._middle)

    def _documents(self, settings: Documents, path: str) -> Source | Shards:
        match settings.source:
            case "synthetic-random":
                return RandomTokens(self.split, vocab_size=self.vocabulary_size, seed=self.seed)
            case "synthetic-learnable":
                return MarkovTokens(self.split, vocab_size=self.vocabulary_size, seed=self.seed)
            case "standard-library":
                share = self.data.validation_share
                return open_standard_library(self.split, self._tokenizer, validation_share=share)
            case "huggingface":
                return self._dataset(settings)
        files = self._files(settings, path)
        keep = self._keep(is_separate=bool(settings.validation_files))
        field, corrupt, cache = settings.text_field, self.corrupt, self.cache
        match settings.source:
            case "text":
                return PlainText(files, self._tokenizer, keep=keep, corrupt=corrupt, cache=cache)
            case "jsonl":
                return JsonLines(files, self._tokenizer, text_field=field, keep=keep, corrupt=corrupt, cache=cache)
            case "parquet":
                return Tables(files, self._tokenizer, text_field=field, keep=keep, corrupt=corrupt)
        return open_packed(
            files,
            keep=keep,
            corrupt=corrupt,
            vocab_size=self.vocabulary_size,
            tokenizer=self.data.tokenizer,
            end_of_document=self.data.end_of_document or None,
        )

    def _dataset(self, settings: Documents) -> Source | Shards:
        is_separate = bool(settings.validation_split)
        split = settings.validation_split if is_separate and self.split == "validation" else settings.split
        name = DatasetName(settings.dataset, settings.dataset_config, split, settings.revision)
        keep, field = self._keep(is_separate=is_separate), settings.text_field
        if settings.streaming:
            return StreamedDataset(
                name, self._tokenizer, text_field=field, block=self.data.shuffle_block, keep=keep, corrupt=self.corrupt
            )
        return DatasetOnDisk(name, self._tokenizer, text_field=field, keep=keep, corrupt=self.corrupt)

    def _keep(self, *, is_separate: bool) -> SplitFilter:
        """Returns the filter of the split; it keeps everything if validation data is separate."""
        return SplitFilter() if is_separate else SplitFilter(self.split, self.data.validation_share)

    def _files(self, settings: Documents, path: str) -> list[Path]:
        suffixes = SUFFIXES[settings.source]
        train = matched(settings.files, suffixes, field=f"{path}.files")
        held_out = matched(settings.validation_files, suffixes, field=f"{path}.validation_files")
        both = {*map(os.path.realpath, train)} & {*map(os.path.realpath, held_out)}
        if both:
            raise DataError(
                f"data file {min(both)} is in {path}.files and in {path}.validation_files", fix="take it out of one"
            )
        return held_out if held_out and self.split == "validation" else train

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = open_tokenizer(self.data.tokenizer, self.data.end_of_document or None)
        if tokenizer.vocab_size > self.vocabulary_size:
            raise DataError(
                f"data.tokenizer {self.data.tokenizer} has token ids outside the model's vocabulary",
                got=f"ids up to {tokenizer.vocab_size - 1} and a vocabulary of {self.vocabulary_size}",
                fix=f"give the model a vocabulary of {tokenizer.vocab_size} or more, or take another tokenizer",
            )
        return tokenizer

    @cached_property
    def _middle(self) -> FillInMiddle | None:
        data = self.data
        if data.fill_in_middle == 0 or self.split == "validation":
            return None
        marks = find_marks(self._tokenizer, data.tokenizer, data.fill_in_middle_tokens)
        return FillInMiddle(
            self._tokenizer, marks, rate=data.fill_in_middle, spm=data.fill_in_middle_spm, seed=self.seed
        )
