"""Text sources: reading a record as text, encoding it, and the policy for corrupt records (`data.corrupt`).

A skipped record is a document without tokens on every rank, so that numbers of documents and saved positions stay
valid. It is skipped, and counted, again in the next epoch. Documents of the other split have no tokens either.

Fill-in-the-middle (arXiv 2207.14255) cuts some training documents at two random characters, encodes each part
separately, and puts the middle at the end. Half of these documents, or the share `data.fill_in_middle_spm`, have the
second order, in which prefix and middle are adjacent:

    PSM    <prefix> PREFIX <suffix> SUFFIX <middle> MIDDLE
    SPM    <prefix> <suffix> SUFFIX <middle> PREFIX MIDDLE

The end-of-document token follows as always. Documents are cut before they are packed into rows ("document level" in the
paper). The seed, the epoch and the document alone decide the cut. Held-out text is never cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.random import PCG64
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.base.numbers import counted
from penstock.data.files import empty
from penstock.data.sources import DocumentPart, RecordError, SplitFilter, Tokens, fingerprint_of
from penstock.data.tokenizer_rules import Tokenizer

CorruptPolicy: TypeAlias = Literal["stop", "skip"]
Value = TypeVar("Value")

NAMED = 5
"""Skipped records that are reported by name; of the others the tenth, hundredth, ... reports a count."""

NO_TOKENS: Tokens = np.zeros(0, dtype=np.int64)
"""The tokens of a skipped record."""


def with_cure(error: RecordError) -> RecordError:
    """The same error, with the option that skips such records."""
    fixes = filter(None, (error.fix, f"{error.resume_with[0]} leaves out records that cannot be read"))
    return RecordError(error.what, got=error.got, allowed=error.allowed, fix=", or ".join(fixes))


class CorruptRecords:
    """Applies the policy for records that cannot be read; `skipped` counts them, and a resumed run sets it."""

    def __init__(self, policy: CorruptPolicy = "stop") -> None:
        self.skips = policy == "skip"
        self.skipped = 0  # of the whole run: a resumed one continues the count
        self._named = 0  # by this process
        self._notices: list[str] = []

    def read_or_skip(self, read: Callable[[], Value], otherwise: Value) -> Value:
        """Returns the result of `read`, or `otherwise` if a RecordError is skipped."""
        try:
            return read()
        except RecordError as error:
            if not self.skips:
                raise with_cure(error) from error
            self._count(error)
            return otherwise

    def _count(self, error: RecordError) -> None:
        self.skipped += 1
        self._named += 1
        if self._named <= NAMED:
            self._notices.append(f"data: skipped a record: {' '.join(error.what.split())}")
        elif self.skipped == 10 ** (len(str(self.skipped)) - 1):  # 10, 100, 1000, ...
            self._notices.append(f"data: {self.skipped:,} records were skipped so far")

    def note(self, line: str) -> None:
        self._notices.append(f"data: {line}")

    def leave_out(self, empties: Sequence[Path], files: Sequence[Path]) -> None:
        """Reports the files of a source that are empty, in one line. Raises an EmptyFileError if all of them are."""
        if empties and len(empties) == len(files):
            raise empty(files[0])
        if empties:
            more = f", and {counted(len(empties) - 1, 'other file')} too" if empties[1:] else ""
            self.note(f"{empties[0]} is empty and left out{more}")

    def take_notices(self) -> tuple[str, ...]:
        notices, self._notices = tuple(self._notices), []
        return notices


class TextDocuments(ABC):
    """A source of text documents. Subclasses read the records.

    Args:
        content: fingerprint of all documents and `part`, the part of each that belongs to the split (None: whole).
        keep: filter by text, for subclasses that cannot filter before reading.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        content: int,
        *,
        corrupt: CorruptRecords,
        keep: SplitFilter,
        part: DocumentPart | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._corrupt = corrupt
        self._keep = keep
        self._part = part
        self.skips = corrupt.skips  # records that cannot be read
        self.vocab_size = tokenizer.vocab_size
        self.end_of_document = tokenizer.end_of_document
        self.fingerprint = fingerprint_of(content, tokenizer.fingerprint, keep.identity())

    @abstractmethod
    def __len__(self) -> int:
        """Number of documents."""

    @abstractmethod
    def record(self, index: int) -> str:
        """Returns the text of a document. Raises a RecordError for this document, a DataError for the source."""

    def sample(self, limit: int) -> NDArray[np.int64]:
        """Returns numbers of up to `limit` documents at even distances."""
        return np.unique(np.linspace(0, len(self) - 1, min(limit, len(self))).astype(np.int64))

    def read(self, index: int) -> Tokens:
        return self.encoded(index, self._tokenizer.encode)

    def bytes_per_token(self, index: int) -> Tokens:
        return self.encoded(index, self._tokenizer.bytes_per_token)

    def encoded(self, index: int, encode: Callable[[str], Tokens]) -> Tokens:
        """Returns `encode` of a document's text; no tokens if it is skipped or belongs to the other split."""

        def read() -> Tokens:
            text = self.record(index)
            if not text or not self._keep.document(text):
                return NO_TOKENS
            part_text = text if self._part is None else self._part.of(text)
            return encode(part_text) if part_text else NO_TOKENS

        return self._corrupt.read_or_skip(read, NO_TOKENS)


SAMPLED = 1000
"""Documents of a part that `read_sample` reads."""


def read_sample(documents: Iterable[object]) -> str:
    """Reads a sample of each source of text; returns what was skipped, in words, empty for nothing.

    Raises a RecordError if records of the sample cannot be read and are not skipped, a DataError for a whole source.
    """
    faults: list[RecordError] = []
    read, skips = 0, True
    for source in documents:
        if not isinstance(source, TextDocuments):
            continue
        skips = source.skips
        for index in source.sample(SAMPLED).tolist():
            read += 1
            try:
                source.record(index)
            except RecordError as error:
                faults.append(error)
    if not faults:
        return ""
    first, counts = faults[0], f"{len(faults):,} of {read:,} sampled records cannot be read"
    if not skips:
        raise with_cure(RecordError(f"{counts}; {first.what}", got=first.got, allowed=first.allowed, fix=first.fix))
    return f"{counts}, such as {first.what}"


def checked_text(value: object, location: str) -> str:
    """Returns a record's value if it is text that UTF-8 can encode, else raises a RecordError that names `location`."""
    if not isinstance(value, str):
        raise RecordError(f"{location} is not text", got=type(value).__name__)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{location} holds half of a surrogate pair") from error
    return value


USUAL_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
"""Prefix, suffix and middle tokens of GPT-4 and Qwen, StarCoder, DeepSeek, Code Llama."""

_TAG = 0xF1
"""Separates these random numbers from those of the order of documents."""


class FimTokens(NamedTuple):
    """Ids of the tokens before each part of a document."""

    prefix: int
    suffix: int
    middle: int


class FillInMiddle:
    """Encodes training documents: the share `rate` of them is cut, and the share `spm` of these has the order SPM."""

    def __init__(self, tokenizer: Tokenizer, marks: FimTokens, *, rate: float, spm: float, seed: int) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._rate = rate
        self._spm = spm
        self._seed = seed
        self.fingerprint = fingerprint_of(tuple(marks), rate, spm)

    def encode(self, text: str, document: Sequence[int]) -> Tokens:
        """Returns the tokens of a text; whole numbers identify the document: epoch and number."""
        draws = PCG64([self._seed, *document, _TAG]).random_raw(4)
        chances = draws[:2] / 2.0**64  # uniform in [0, 1): whether to cut, and the order
        if chances[0] >= self._rate:
            return self._tokenizer.encode(text)
        first, second = sorted(int(draw) % (len(text) + 1) for draw in draws[2:])  # characters
        prefix, middle, suffix = text[:first], text[first:second], text[second:]
        marks = self._marks
        if chances[1] < self._spm:
            return self._joined(marks.prefix, marks.suffix, suffix, marks.middle, prefix, middle)
        return self._joined(marks.prefix, prefix, marks.suffix, suffix, marks.middle, middle)

    def _joined(self, *parts: int | str) -> Tokens:
        wanted = [part for part in parts if part != ""]  # an empty part has its mark, and no tokens
        encode = self._tokenizer.encode
        return np.concatenate([np.array([part]) if isinstance(part, int) else encode(part) for part in wanted])


def find_marks(tokenizer: Tokenizer, name: str, names: Sequence[str] = ()) -> FimTokens:
    """Returns the tokens before prefix, suffix and middle, by `names` or USUAL_NAMES; a DataError if there are none."""
    for candidates in (tuple(names),) if names else USUAL_NAMES:
        ids = [tokenizer.token_id(candidate) for candidate in candidates]
        marks = [token for token in ids if token is not None]
        if len(marks) == len(ids):
            return FimTokens(*marks)
        if names:
            missing = ", ".join(candidate for candidate, number in zip(candidates, ids, strict=True) if number is None)
            raise DataError(f"data.tokenizer {name} has no token {missing}", fix="correct data.fill_in_middle_tokens")
    raise DataError(
        f"data.tokenizer {name} has no tokens for fill-in-the-middle",
        got="none of " + ", ".join(candidates[0] for candidates in USUAL_NAMES),
        fix="set data.fill_in_middle_tokens to its names, or data.fill_in_middle to 0",
    )
