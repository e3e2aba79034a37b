"""The fixed evaluation rows, with the bytes of text that they predict.

Bits per byte compare losses of different tokenizers: the nats of all counted labels, over ln 2, over the bytes of text
of these labels. The bytes are exact, also for cut documents and ignored labels. An end-of-document token costs nats and
has no bytes.

Rows from few documents say little. So rows are taken at even distances from a long line of documents, the whole split
if it is small. The line is measured first; then only documents with a row in them are read again, one at a time.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.loader import PADDING, Batch, pack
from penstock.data.mixture import Text, TextPart
from penstock.data.shards import Shards
from penstock.data.sources import Source, Tokens, document_order, fingerprint_of, order_of
from penstock.data.stream import Rows, with_end
from penstock.kernels.reference import IGNORED_LABEL

_ORDER_SEED = 0
"""All runs evaluate on the same documents, with any seed."""


class Sample:
    """The first documents of many shards, held in memory: one block of each shard in turn, until there are enough.

    Enough are at least `documents` with `tokens`, or `most_tokens`. Raises a DataError if they cannot be read.
    """

    def __init__(self, shards: Shards, *, documents: int, tokens: int, most_tokens: int) -> None:
        self._tokenizer = shards.tokenizer
        self._tokens: list[Tokens] = []
        self._texts: list[str] = []
        self.vocab_size = shards.vocab_size
        self.end_of_document = shards.end_of_document
        self.fingerprint = fingerprint_of(shards.fingerprint, documents, tokens, most_tokens)
        sampled = 0
        for text, encoded in _documents(shards):
            self._texts.append(text)
            self._tokens.append(encoded)
            sampled += len(encoded) + 1  # with its end token
            if sampled >= tokens and (len(self._texts) >= documents or sampled >= most_tokens):
                break

    def __len__(self) -> int:
        return len(self._texts)

    def read(self, index: int) -> Tokens:
        return self._tokens[index]

    def bytes_per_token(self, index: int) -> Tokens:
        return self._tokenizer.bytes_per_token(self._texts[index])


def _documents(shards: Shards) -> Iterator[tuple[str, Tokens]]:
    """Yields texts with their tokens, one block of each shard in turn."""
    order = document_order(len(shards), seed=_ORDER_SEED, epoch=0).tolist()
    left = {shard: shards.blocks(shard, 0) for shard in order}  # shards that are not read to their end
    number = 0  # of the blocks that are read now, one of each shard
    while left:
        for shard, blocks in list(left.items()):
            block = next(blocks, None)
            if block is None:
                del left[shard]
                continue
            for inside, value in enumerate(block):
                text, tokens = shards.read(shard, number * shards.block + inside, value, shards.tokenizer.encode)
                if text:
                    yield text, tokens
        number += 1


_SPREAD = 8
"""The line has this many rows per chosen row, if the split has."""

_DOCUMENTS = 512
"""The line has at least this many documents, if the split has ..."""

_ENOUGH_TOKENS = 64 * 2**20
"""... up to this many tokens, which limits the time to measure it."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRows:
    """This rank's batches of equally many rows; counted labels and the bytes of their text are of all ranks."""

    batches: tuple[Batch, ...]
    tokens: int
    text_bytes: int


def evaluation_batches(
    text: Source | Text,
    *,
    rows: int,
    sequence_length: int,
    limit_rows: int,
    document_mask: bool,
    rank: int = 0,
    ranks: int = 1,
) -> EvaluationRows:
    """Chooses up to `limit_rows` rows, spread over the documents; all rows of a small text.

    A mixture divides the rows among its parts by weight. Incomplete rows, and rows that complete the last batch, are
    padded with end-of-document tokens whose labels are ignored.

    Args:
        rows: rows of a batch over all ranks; a multiple of `ranks`.
        sequence_length: tokens of a row, S.
        limit_rows: most rows with text, > 0.
        document_mask: separate documents (see `pack`).

    Raises a DataError if a document cannot be read, or none has text.
    """
    assert rows % ranks == 0, f"a batch of {rows} rows does not divide among {ranks} ranks"
    assert limit_rows > 0, "an evaluation needs at least one row"

    # 1. Take rows of each part, and behind them as many empty ones as the last batch wants.
    parts = text.parts if isinstance(text, Text) else (TextPart(documents=text),)
    parts = tuple(filter(_has_text, parts)) or parts  # small parts of a mixture may hold out none
    shares = zip(parts, _shared(limit_rows, [part.weight for part in parts]), strict=True)
    chosen = [_choose(part.documents, limit, sequence_length) for part, limit in shares if limit > 0]
    taken = sum(len(batch.rows.tokens) for batch in chosen)  # fewer than limit_rows for a small text
    chosen.append(_nothing(-taken % rows, sequence_length, parts[0].documents.end_of_document))

    # 2. Count what they predict.
    read = Rows(*(np.concatenate(column) for column in zip(*(batch.rows for batch in chosen), strict=True)))
    text_bytes = np.concatenate([batch.text_bytes for batch in chosen])
    whole = pack(read, document_mask=document_mask)
    counted_BS = whole.labels_BS.numpy() != IGNORED_LABEL

    # 3. Keep our part.
    ours = rows // ranks
    return EvaluationRows(
        batches=tuple(batch.between(rank * ours, (rank + 1) * ours) for batch in whole.micro_batches(rows)),
        tokens=int(counted_BS.sum()),
        text_bytes=int(text_bytes[:, 1:][counted_BS].sum()),  # of the labels, which are the tokens shifted by one
    )


def _has_text(part: TextPart) -> bool:
    """Whether a document of a part has a token; shards are taken to have one."""
    documents = part.documents
    return isinstance(documents, Shards) or any(len(documents.read(index)) for index in range(len(documents)))


class _Chosen(NamedTuple):
    """Rows, and the bytes of text of each token."""

    rows: Rows
    text_bytes: NDArray[np.int64]  # B x S + 1


def _shared(rows: int, weights: Sequence[float]) -> list[int]:
    """Divides rows among parts: the next row goes to the part with fewest for its weight."""
    if len(weights) == 1:
        return [rows]
    shares = [0] * len(weights)
    for _ in range(rows):
        turn = min(range(len(weights)), key=lambda part: (shares[part] + 1) / weights[part])
        shares[turn] += 1
    return shares


def _choose(documents: Source | Shards, limit_rows: int, sequence_length: int) -> _Chosen:
    wanted = _SPREAD * limit_rows * sequence_length + 1
    if isinstance(documents, Shards):
        documents = Sample(documents, documents=_DOCUMENTS, tokens=wanted, most_tokens=_ENOUGH_TOKENS)
    line = _measure(documents, wanted)
    text_rows = -(-(line.tokens - 1) // sequence_length)  # rounded up; the last token of the line is only a label
    taken = min(limit_rows, text_rows)
    starts = [number * text_rows // taken * sequence_length for number in range(taken)]
    return _read_rows(documents, line, starts, sequence_length)


class _Line(NamedTuple):
    """Documents with their end tokens, one after another."""

    documents: list[int]  # their numbers in the source
    starts: list[int]  # token at which each begins, and the end of the last one

    @property
    def tokens(self) -> int:
        return self.starts[-1]


def _measure(source: Source, tokens: int) -> _Line:
    """Returns a line of at least `tokens` tokens in the fixed order, or of all documents."""
    line = _Line([], [0])
    order = order_of(source, seed=_ORDER_SEED, epoch=0)
    for position in range(len(source)):
        index = int(order[position])
        length = len(source.read(index))
        if length == 0:
            continue
        line.documents.append(index)
        line.starts.append(line.tokens + length + 1)  # with its end token
        # Long enough for the rows, and of enough documents, unless these are very large.
        if line.tokens >= tokens and (len(line.documents) >= _DOCUMENTS or line.tokens >= _ENOUGH_TOKENS):
            break
    if not line.documents:
        what = "the validation data hold no text: every document is empty"
        fix = "raise data.validation_share, or hold out nothing: evaluation.rows=0"
        raise DataError(what, got=f"{len(source)} documents", fix=fix)
    return line


def _nothing(rows: int, sequence_length: int, end_of_document: int) -> _Chosen:
    shape = rows, sequence_length + 1
    padding = Rows(np.full(shape, end_of_document, dtype=np.int64), np.full(shape, PADDING, dtype=np.int64))
    return _Chosen(padding, np.zeros(shape, dtype=np.int64))


def _read_rows(source: Source, line: _Line, starts: Sequence[int], sequence_length: int) -> _Chosen:
    """Returns rows of S + 1 tokens from ascending `starts` on the line, padded beyond its end, with bytes of text."""
    chosen = _nothing(len(starts), sequence_length, source.end_of_document)
    # Pieces come in the order of the line, so each document is read once.
    for number, pieces in groupby(_pieces(line, starts, sequence_length + 1), key=itemgetter(0)):
        begin, index = line.starts[number], line.documents[number]
        document = with_end(source.read(index), source.end_of_document, source.vocab_size)
        document_bytes = np.append(source.bytes_per_token(index), 0)  # the end token has no bytes
        for _, row, first, last in pieces:  # `first` and `last` are places on the line
            there, here = slice(first - starts[row], last - starts[row]), slice(first - begin, last - begin)
            chosen.rows.tokens[row, there] = document[here]
            chosen.rows.documents[row, there] = number
            chosen.text_bytes[row, there] = document_bytes[here]
    return chosen


def _pieces(line: _Line, starts: Sequence[int], width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields (document, row, start, end) of each document's part in each row; all are places on the line."""
    for row, start in enumerate(starts):
        stop = min(start + width, line.tokens)
        number = bisect_right(line.starts, start) - 1
        while line.starts[number] < stop:
            yield number, row, max(start, line.starts[number]), min(stop, line.starts[number + 1])
            number += 1
