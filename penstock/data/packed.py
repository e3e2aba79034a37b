"""Packed documents: token ids that were encoded beforehand, in Megatron's `.bin/.idx` files.

`penstock data pack` or other programs write them. Packed documents usually end with an end-of-document token, some
without one, depending on the program. The stream adds one to each, so those at the end of a document are removed here.

The `.packed.json` that Penstock writes beside a pair names the tokenizer. Other programs write none: then
`data.tokenizer` names it, or `data.end_of_document` gives the id. Bits per byte of text need the tokenizer itself:
without it, packed documents cannot be evaluated.

A hash of a document's number in its file, not of its content, which would have to be read first, decides the split. It
does not change when documents are appended, or files added or moved.

Packing encodes in several processes. This process reads the texts and writes the tokens in order; a batch of texts goes
to any free process, and its tokens wait for the batches before it. So the files are the same, byte for byte, for any
number of processes, and errors name the document. One reader and writer is enough for some tens of processes; beyond
that, pack parts of the corpus. Texts without tokens are left out, as the stream skips them anyway. A process that
encodes is this module as a program (penstock/base/child.py); its requests and answers:

    {"tokenizer": ..., "end_of_document": ..., "type": "<u2", "texts": [...]}
    {"lengths": [...], "text_bytes": ..., "empty": ..., "faults": [[3, ...]]}, and the tokens
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.base.child import Answer, Child, ChildEndedError, serve
from penstock.base.errors import DataError
from penstock.data.documents import CorruptRecords
from penstock.data.files import EmptyFileError
from penstock.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, PackedMetadata, origin_of, prefix_of
from penstock.data.sources import DocumentPart, RecordError, SplitFilter, Tokens, document_part, fingerprint_of
from penstock.data.tokenizer import BYTES, open_tokenizer
from penstock.data.tokenizer_rules import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """Tokens of a batch."""

    tokens: Tokens  # with end tokens
    lengths: NDArray[np.int64]  # of each document, its end token included
    text_bytes: int
    empty: int
    faults: dict[int, str]  # errors of texts that could not be encoded, by their index in the batch

    def answer(self) -> Answer:
        numbers = {"text_bytes": self.text_bytes, "empty": self.empty, "faults": list(self.faults.items())}
        return {"lengths": self.lengths.tolist(), **numbers}, self.tokens.tobytes()

    @classmethod
    def of(cls, head: dict[str, Any], tokens: bytes, type_name: str) -> "Encoded":
        """The inverse of `answer`."""
        lengths = np.array(head["lengths"], dtype=np.int64)
        return cls(np.frombuffer(tokens, type_name), lengths, head["text_bytes"], head["empty"], dict(head["faults"]))


def encode_texts(tokenizer: Tokenizer, type_name: str, texts: list[str]) -> Encoded:
    end = np.array([tokenizer.end_of_document], dtype=type_name)
    parts: list[Tokens] = []
    lengths, text_bytes, empty = [], 0, 0
    faults: dict[int, str] = {}
    for index, text in enumerate(texts):
        try:
            tokens = tokenizer.encode(text)
        except RecordError as error:
            faults[index] = str(error)
            continue
        if len(tokens) == 0:
            empty += 1
            continue
        parts += [tokens.astype(type_name), end]  # in the type of the file, so that less is sent back
        lengths.append(len(tokens) + 1)
        text_bytes += len(text.encode())
    whole = np.concatenate([np.zeros(0, dtype=type_name), *parts])
    return Encoded(whole, np.array(lengths, dtype=np.int64), text_bytes, empty, faults)


_opened = cache(open_tokenizer)
"""Opens a tokenizer once."""


def _answer(request: dict[str, Any]) -> Answer:
    tokenizer = _opened(request["tokenizer"], request["end_of_document"])
    return encode_texts(tokenizer, request["type"], request["texts"]).answer()


class PackedTokens:
    """The documents of one or more pairs of files, in order.

    `documents` are the numbers of those of the split, counted over all pairs, and `part` the part of each; None means
    all. Without a tokenizer, the bytes of tokens are unknown.
    """

    def __init__(
        self,
        pairs: Sequence[IndexedDataset],
        *,
        vocab_size: int,
        end_of_document: int,
        tokenizer: Tokenizer | None = None,
        documents: NDArray[np.int64] | None = None,
        part: DocumentPart | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.end_of_document = end_of_document
        self.tokenizer = tokenizer
        self._pairs = pairs
        self._firsts = [0, *accumulate(len(pair) for pair in pairs)]  # number of each pair's first document
        self._documents = documents
        self._part = part
        chosen = b"" if documents is None else documents.tobytes()
        identity = [] if part is None else [part.identity()]
        self.fingerprint = fingerprint_of(*(pair.fingerprint() for pair in pairs), end_of_document, chosen, *identity)

    def __len__(self) -> int:
        return self._firsts[-1] if self._documents is None else len(self._documents)

    def read(self, index: int) -> Tokens:
        """Returns the ids of a document without its end, as stored; read-only. Ids beyond the vocabulary are errors."""
        pair, number = self._find(index)
        tokens = pair.document(number)
        stop = len(tokens)
        while stop > 0 and tokens[stop - 1] == self.end_of_document:
            stop -= 1
        tokens = tokens[:stop]
        if stop > 0:
            self._check_ids(tokens, f"document {number} of {pair.prefix}.bin")
        return tokens if self._part is None else self._part.of(tokens)

    def bytes_per_token(self, index: int) -> Tokens:
        """Returns the bytes of text of each token of `read(index)`; a DataError if the tokenizer is unknown."""
        if self.tokenizer is None:
            raise DataError(
                f"bits per byte of {self._pairs[0].prefix} need the tokenizer that packed it",
                fix="set data.tokenizer to it, or data.validation_files to text, or evaluation.rows to 0",
            )
        return self.tokenizer.bytes_of(self.read(index))

    def _check_ids(self, tokens: Tokens, location: str) -> None:
        highest = int(tokens.max())
        lowest = 0 if tokens.dtype.kind == "u" else int(tokens.min())  # unsigned ids need no second pass
        if highest >= self.vocab_size or lowest < 0:
            raise DataError(
                f"{location} has an id outside the vocabulary",
                got=lowest if lowest < 0 else highest,
                allowed=f"0 to {self.vocab_size - 1}",
                fix="set data.tokenizer and model.vocab_size to what the file was packed with",
            )

    def _find(self, index: int) -> tuple[IndexedDataset, int]:
        number = index if self._documents is None else int(self._documents[index])
        pair = bisect_right(self._firsts, number) - 1
        return self._pairs[pair], number - self._firsts[pair]


def open_packed(
    paths: Sequence[Path],
    *,
    keep: SplitFilter,
    vocab_size: int,
    tokenizer: str = BYTES,
    end_of_document: str | None = None,
    corrupt: CorruptRecords | None = None,
) -> PackedTokens:
    """Opens pairs of files as one source; a pair that is named twice counts once, and empty ones are left out.

    `tokenizer` is the setting `data.tokenizer`, whose default "bytes" takes the tokenizer that the files name,
    `end_of_document` the name of a token, or its id in digits; `corrupt` gets notes about the files. Raises a DataError
    if a file is missing or damaged, or all are empty, if the files have different tokenizers, or another one than the
    setting, if their tokenizer is unknown, or if the ids do not fit the model.
    """
    pairs = _opened_pairs(paths, corrupt or CorruptRecords())
    origin = _common_origin(pairs)
    opened = _open_fitting_tokenizer(pairs[0], origin, tokenizer, end_of_document)
    size, end = _meaning(pairs[0], origin, opened, end_of_document, vocab_size)
    if max(size, end + 1) > vocab_size:
        raise DataError(
            f"{pairs[0].prefix} has token ids outside the model's vocabulary",
            got=f"ids up to {max(size - 1, end)} and a vocabulary of {vocab_size}",
            fix=f"give the model a vocabulary of {max(size, end + 1)} or more",
        )
    kept = np.concatenate([keep.each(np.arange(len(pair))) for pair in pairs])  # by the number in the pair
    part = document_part(kept, keep)
    documents = np.flatnonzero(kept) if keep.split is not None and part is None else None
    return PackedTokens(pairs, vocab_size=size, end_of_document=end, tokenizer=opened, documents=documents, part=part)


def _opened_pairs(paths: Sequence[Path], corrupt: CorruptRecords) -> list[IndexedDataset]:
    pairs, empties = [], []
    prefixes = [*dict.fromkeys(map(prefix_of, paths))]
    for prefix in prefixes:
        try:
            pairs.append(IndexedDataset(prefix))
        except EmptyFileError:
            if len(prefixes) == 1:
                raise
            empties.append(prefix)
    corrupt.leave_out(empties, prefixes)
    for line in (line for pair in pairs for line in pair.notes):
        corrupt.note(line)
    return pairs


def _common_origin(pairs: Sequence[IndexedDataset]) -> PackedMetadata | None:
    """Returns the metadata of the pairs; one without metadata is assumed to be like the others."""
    origins = [(pair, origin) for pair in pairs if (origin := origin_of(pair.prefix)) is not None]
    for pair, origin in origins:
        if origin.fingerprint != origins[0][1].fingerprint:
            raise DataError(
                f"{pair.prefix} and {origins[0][0].prefix} were packed with different tokenizers",
                got=f"{origin.tokenizer} and {origins[0][1].tokenizer}",
                fix="pack both with one tokenizer",
            )
    return origins[0][1] if origins else None


def _open_fitting_tokenizer(
    pair: IndexedDataset, origin: PackedMetadata | None, tokenizer: str, end_of_document: str | None
) -> Tokenizer | None:
    """Returns the tokenizer of the ids, None if it is not available."""
    name = None if end_of_document is not None and end_of_document.isdecimal() else end_of_document
    if origin is None:
        return None if tokenizer == BYTES else open_tokenizer(tokenizer, name)
    if tokenizer == BYTES:
        try:
            opened = open_tokenizer(origin.tokenizer, origin.end_of_document_name)
        except DataError:  # its files are gone
            return None
        return opened if opened.fingerprint == origin.fingerprint else None
    opened = open_tokenizer(tokenizer, name or origin.end_of_document_name)
    if origin.fingerprint != opened.fingerprint:
        raise DataError(
            f"{pair.prefix} was packed with another tokenizer, or another end of a document",
            got=f"data.tokenizer {tokenizer}, and {origin.tokenizer} in {pair.prefix.name}.packed.json",
            fix="set data.tokenizer and data.end_of_document to those of the file, or pack the text again",
        )
    return opened


def _meaning(
    pair: IndexedDataset,
    origin: PackedMetadata | None,
    tokenizer: Tokenizer | None,
    end_of_document: str | None,
    vocab_size: int,
) -> tuple[int, int]:
    """Returns (vocabulary size, end-of-document id) from the tokenizer, the metadata, or the settings."""
    stated = int(end_of_document) if end_of_document is not None and end_of_document.isdecimal() else None
    if tokenizer is not None:
        return tokenizer.vocab_size, tokenizer.end_of_document if stated is None else stated
    if origin is not None:
        return origin.vocabulary_size, origin.end_of_document if stated is None else stated
    if stated is not None:
        return vocab_size, stated
    raise DataError(
        f"no tokenizer is known for the ids of {pair.prefix}",
        fix="set data.tokenizer to what packed them, or data.end_of_document to the id that ends a document",
    )


BATCH_CHARACTERS = 2**20
"""Text of a batch, large enough to hide the cost of sending it."""


_AHEAD = 3
"""Batches that are sent ahead, per process."""


class Texts(Protocol):
    """Numbered texts, such as `documents.TextDocuments`."""

    def __len__(self) -> int:
        """Number of texts."""

    def record(self, index: int) -> str:
        """Returns a text, or raises a RecordError that names its place."""


class PackProgress(NamedTuple):
    """Work since the last report."""

    texts: int  # corrupt and empty ones included
    tokens: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """The result of `pack`."""

    origin: PackedMetadata
    empty: int  # texts without tokens, which are left out


class _Batch(NamedTuple):
    """Consecutive texts."""

    numbers: list[int]
    texts: list[str]
    faults: dict[int, str]  # errors of unreadable texts, by their number


def pack(
    texts: Texts,
    prefix: Path,
    *,
    tokenizer: str,
    end_of_document: str | None = None,
    processes: int = 1,
    skip_corrupt: bool = False,
    report: Callable[[PackProgress], None] = lambda done: None,
) -> PackResult:
    """Writes the tokens of all texts to PREFIX.bin and PREFIX.idx, whole or not at all; `report` follows each batch.

    `tokenizer` and `end_of_document` are settings as in `data`. One of `processes` means to encode in this process.
    `skip_corrupt` leaves out and names texts that cannot be read or encoded; else they are errors. Raises a DataError
    if a text is corrupt, none has a token, or the tokenizer or the files cannot be used.
    """
    opened = open_tokenizer(tokenizer, end_of_document)
    written = tokens = text_bytes = empty = 0
    left_out: list[str] = []
    request = {"tokenizer": tokenizer, "end_of_document": end_of_document}
    with ExitStack() as stack:
        writer = stack.enter_context(IndexedDatasetWriter(prefix, opened.vocab_size))
        request["type"] = writer.type.str
        encode, pool = stack.enter_context(_encoder(processes, partial(encode_texts, opened, writer.type.str), request))
        for batch, encoded in _in_order(_batches(texts, skip_corrupt), encode, pool, _AHEAD * processes):
            faults = batch.faults | {
                batch.numbers[index]: f"document {batch.numbers[index]}: {fault}"
                for index, fault in encoded.faults.items()
            }
            if encoded.faults and not skip_corrupt:
                raise DataError(faults[batch.numbers[min(encoded.faults)]])
            left_out += [faults[number] for number in sorted(faults)]
            writer.write(encoded.tokens, encoded.lengths)
            written += len(encoded.lengths)
            tokens += len(encoded.tokens)
            text_bytes += encoded.text_bytes
            empty += encoded.empty
            report(PackProgress(len(batch.texts) + len(batch.faults), len(encoded.tokens), encoded.text_bytes))
        if written == 0:
            raise DataError("there is nothing to pack", got=f"{empty} empty and {len(left_out)} corrupt documents")
        origin = PackedMetadata(
            tokenizer=tokenizer,
            fingerprint=opened.fingerprint,
            vocabulary_size=opened.vocab_size,
            end_of_document=opened.end_of_document,
            end_of_document_name=end_of_document or "",
            documents=written,
            tokens=tokens,
            text_bytes=text_bytes,
            left_out=tuple(left_out),
        )
        writer.finish(origin)
    return PackResult(origin=origin, empty=empty)


def _batches(texts: Texts, skip_corrupt: bool) -> Iterator[_Batch]:
    """Yields all texts in order, in batches that depend on nothing but the texts."""
    batch, characters = _Batch([], [], {}), 0
    for number in range(len(texts)):
        try:
            text = texts.record(number)
        except RecordError as error:
            if not skip_corrupt:
                raise
            batch.faults[number] = str(error)
            continue
        batch.numbers.append(number)
        batch.texts.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = _Batch([], [], {}), 0
    yield batch


Encode = Callable[[list[str]], Encoded]


def _in_order(
    batches: Iterable[_Batch], encode: Encode, pool: ThreadPoolExecutor | None, ahead: int
) -> Iterator[tuple[_Batch, Encoded]]:
    """Yields each batch with its tokens, in order, while up to `ahead` later ones are encoded by the pool."""
    if pool is None:
        yield from ((batch, encode(batch.texts)) for batch in batches)
        return
    waiting: deque[tuple[_Batch, Future[Encoded]]] = deque()
    for batch in batches:
        waiting.append((batch, pool.submit(encode, batch.texts)))
        if len(waiting) > ahead:  # bounds the texts in memory
            first, future = waiting.popleft()
            yield first, future.result()
    for batch, future in waiting:
        yield batch, future.result()


@contextmanager
def _encoder(
    processes: int, encode: Encode, request: dict[str, Any]
) -> Iterator[tuple[Encode, ThreadPoolExecutor | None]]:
    """Yields a function that encodes, and threads for it, each of which asks a child; one process encodes here."""
    if processes == 1:
        yield encode, None
        return
    children = [Child("penstock.data.packed") for _ in range(processes)]
    free: SimpleQueue[Child] = SimpleQueue()
    for child in children:
        free.put(child)

    def ask(texts: list[str]) -> Encoded:
        child = free.get()
        try:
            head, tokens = child.ask({**request, "texts": texts})
        except ChildEndedError as error:
            raise DataError(f"a process that encodes {error}", fix="take fewer processes if memory is short") from error
        finally:
            free.put(child)
        return Encoded.of(head, tokens, request["type"])

    pool = ThreadPoolExecutor(processes)
    try:
        yield ask, pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.close()


if __name__ == "__main__":
    serve(_answer)
