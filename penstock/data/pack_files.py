"""Texts -> a pair of packed files, encoded by many processes.

This process reads the texts in their order and writes the tokens in that order; the others encode. A batch of texts
goes to whichever process is free, and its tokens wait for those of the batches before it. So the files are the same,
byte for byte, for any number of processes; and a text that cannot be used is known by its place, whoever encoded it.
Reading and writing in one process is enough for some tens of processes; beyond that, pack parts of the corpus.

Texts without a token (empty ones) are left out, as the stream passes over them anyway.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.indexed_dataset import IndexedDatasetWriter, PackedMetadata
from penstock.data.sources import RecordError, Tokens
from penstock.data.tokenizer import Tokenizer, open_tokenizer

BATCH_CHARACTERS = 2**20
"""Text of a batch: enough that handing it over costs little."""

_AHEAD = 3
"""Batches that are handed out before their turn, for each process."""


class Texts(Protocol):
    """Numbered texts; `documents.TextDocuments` are such."""

    def __len__(self) -> int:
        """Number of texts."""

    def record(self, index: int) -> str:
        """Returns a text.

        Raises:
            RecordError: it is damaged; the message says where it stands.
        """


class PackProgress(NamedTuple):
    """What has been packed since the last report.

    Attributes:
        texts: read, the corrupt and the empty ones too.
        tokens: written.
        text_bytes: encoded.
    """

    texts: int
    tokens: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """What was packed.

    Attributes:
        origin: what stands beside the files.
        empty: texts without a token.
    """

    origin: PackedMetadata
    empty: int


class _Batch(NamedTuple):
    """Texts that follow each other. `faults` has those that could not be read, by their number."""

    numbers: list[int]
    texts: list[str]
    faults: dict[int, str]


class _Encoded(NamedTuple):
    """Tokens of a batch, each text with its end; `faults` has texts that could not be encoded, by their place."""

    tokens: Tokens
    lengths: NDArray[np.int64]
    text_bytes: int
    empty: int
    faults: dict[int, str]


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
    """Writes the tokens of all texts to PREFIX.bin and PREFIX.idx, whole or not at all.

    Args:
        texts: what to pack.
        prefix: of the files.
        tokenizer: as `data.tokenizer`; each process opens it.
        end_of_document: as `data.end_of_document`.
        processes: that encode; 1 encodes in this one.
        skip_corrupt: leave out what cannot be read or encoded, and name it; else it is an error.
        report: called now and then with what was done since.

    Raises:
        DataError: a text is corrupt, none has a token, the tokenizer cannot be used, or the files cannot be written.
    """
    opened = open_tokenizer(tokenizer, end_of_document)
    written = tokens = text_bytes = empty = 0
    left_out: list[str] = []
    with IndexedDatasetWriter(prefix, opened.vocabulary_size) as writer, _encoders(processes) as submit:
        encode = partial(_encode, tokenizer, end_of_document, writer.type.str)
        for batch, encoded in _in_order(_batches(texts, skip_corrupt), encode, submit, _AHEAD * processes):
            faults = batch.faults | {
                batch.numbers[place]: f"document {batch.numbers[place]}: {fault}"
                for place, fault in encoded.faults.items()
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
            vocabulary_size=opened.vocabulary_size,
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
    """Yields all texts in their order, in batches that depend on nothing but the texts."""
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


Encode = Callable[[list[str]], _Encoded]
Submit = Callable[[Encode, list[str]], "Future[_Encoded]"]


def _in_order(
    batches: Iterable[_Batch], encode: Encode, submit: Submit, ahead: int
) -> Iterator[tuple[_Batch, _Encoded]]:
    """Yields each batch with its tokens, in order, while up to `ahead` later ones are being encoded."""
    waiting: deque[tuple[_Batch, Future[_Encoded]]] = deque()
    for batch in batches:
        waiting.append((batch, submit(encode, batch.texts)))
        if len(waiting) > ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for batch, future in waiting:
        yield batch, future.result()


@contextmanager
def _encoders(processes: int) -> Iterator[Submit]:
    """Gives a function that encodes in other processes, or at once in this one if there is to be only one."""
    if processes == 1:
        yield _at_once
        return
    # Started anew and not forked: a fork of a process with threads may never come back from a lock.
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=signal.signal,
        # Ctrl-C reaches all processes; this one ends the others.
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        yield pool.submit
    except BrokenProcessPool as error:
        raise DataError(
            "a process that encodes was ended from outside", fix="take fewer processes if memory is short"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _at_once(encode: Encode, texts: list[str]) -> "Future[_Encoded]":
    future: Future[_Encoded] = Future()
    future.set_result(encode(texts))
    return future


def _encode(tokenizer: str, end_of_document: str | None, type_name: str, texts: list[str]) -> _Encoded:
    """Encodes a batch; runs in any process."""
    opened = _opened(tokenizer, end_of_document)
    end = np.array([opened.end_of_document], dtype=type_name)
    parts: list[Tokens] = []
    lengths, text_bytes, empty = [], 0, 0
    faults: dict[int, str] = {}
    for place, text in enumerate(texts):
        try:
            tokens = opened.encode(text)
        except RecordError as error:
            faults[place] = str(error)
            continue
        if len(tokens) == 0:
            empty += 1
            continue
        parts += [tokens.astype(type_name), end]
        lengths.append(len(tokens) + 1)
        text_bytes += len(text.encode())
    whole = np.concatenate([np.zeros(0, dtype=type_name), *parts])
    return _Encoded(whole, np.array(lengths, dtype=np.int64), text_bytes, empty, faults)


@cache
def _opened(tokenizer: str, end_of_document: str | None) -> Tokenizer:
    """The tokenizer, opened once in each process."""
    return open_tokenizer(tokenizer, end_of_document)
