"""The fixed rows on which a model is judged, with the bytes of text that they predict.

Losses of different tokenizers compare in bits per byte of text: the nats of all counted labels, over ln 2, over the
bytes that these labels stand for. The bytes are exact: each label's own are summed, so that cut documents and labels
that are not counted take no part. An end-of-document token costs nats and stands for no byte.

Rows that follow each other are often of one document, and a few documents say little. So rows are taken evenly from a
line of text that is longer than needed.
"""

from dataclasses import dataclass

import numpy as np

from penstock.base.errors import DataError
from penstock.data.batch import Batch
from penstock.data.packing import PADDING, cut, pack
from penstock.data.sources import Source, Tokens
from penstock.data.stream import Span, document_order, joined, with_end_token
from penstock.kernels.reference import IGNORED_LABEL

_ORDER_SEED = 0
"""The order of documents, and so what is judged, is the same for all runs: their seed has no part in it."""

_SPREAD = 8
"""Rows that are read for each row that is taken."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Rows to judge by.

    Attributes:
        batches: this rank's rows, equally many in each batch and on each rank.
        tokens: counted labels, of all ranks.
        text_bytes: bytes of text that these labels stand for, of all ranks.
    """

    batches: tuple[Batch, ...]
    tokens: int
    text_bytes: int


def evaluation_batches(
    source: Source,
    *,
    rows: int,
    sequence_length: int,
    limit_rows: int,
    document_mask: bool,
    rank: int = 0,
    ranks: int = 1,
) -> Evaluation:
    """Chooses at most `limit_rows` rows, spread over the documents; the whole text, if it has fewer.

    A row that the text does not fill, and rows that make the last batch as large as the others, are padded with
    end-of-document tokens whose labels are not counted.

    Args:
        source: the documents of the validation split.
        rows: rows of a batch, of all ranks together; a multiple of `ranks`.
        sequence_length: tokens of a row, S.
        limit_rows: the most rows that hold text, > 0.
        document_mask: keep documents apart (see packing).
        rank: which part of each batch is ours.
        ranks: number of parts.

    Raises:
        DataError: a document cannot be read, or none holds text.
    """
    assert rows % ranks == 0, f"a batch of {rows} rows does not divide among {ranks} ranks"
    assert limit_rows > 0, "an evaluation needs at least one row"

    # 1. Read a line of text; end it with a full row, and with as many empty rows as the last batch may want.
    line, text_bytes = _read_line(source, _SPREAD * limit_rows * sequence_length + 1)
    text_rows = -(-(len(line.tokens) - 1) // sequence_length)
    taken = min(limit_rows, text_rows)
    empty_rows = -taken % rows
    padding = (text_rows + empty_rows) * sequence_length + 1 - len(line.tokens)
    line = Span(
        np.pad(line.tokens, (0, padding), constant_values=source.end_of_document),
        np.pad(line.documents, (0, padding), constant_values=PADDING),
    )
    text_bytes = np.pad(text_bytes, (0, padding))

    # 2. Take rows at even distances, and the empty rows.
    places = np.concatenate([np.arange(taken) * text_rows // taken, text_rows + np.arange(empty_rows)])
    tokens, documents = cut(line, sequence_length)
    whole = pack(Span(tokens[places], documents[places]), document_mask=document_mask)

    # 3. Count what they predict, and keep our part.
    label_bytes_BS = text_bytes[1:].reshape(-1, sequence_length)[places]
    counted_BS = whole.labels_BS.numpy() != IGNORED_LABEL
    ours = rows // ranks
    return Evaluation(
        batches=tuple(batch.between(rank * ours, (rank + 1) * ours) for batch in whole.micro_batches(rows)),
        tokens=int(counted_BS.sum()),
        text_bytes=int(label_bytes_BS[counted_BS].sum()),
    )


def _read_line(source: Source, limit: int) -> tuple[Span, Tokens]:
    """Returns at most `limit` tokens of the fixed order of documents, and the bytes of text that each stands for."""
    documents: list[Tokens] = []
    text_bytes: list[Tokens] = []
    count = 0
    for index in document_order(len(source), seed=_ORDER_SEED, epoch=0).tolist():
        document = with_end_token(source, index)
        if len(document) == 0:
            continue
        documents.append(document)
        text_bytes.append(np.append(source.bytes_per_token(index), 0))
        count += len(document)
        if count >= limit:
            break
    if not documents:
        raise DataError("the validation data hold no text: every document is empty", got=f"{len(source)} documents")
    tokens, numbers = joined(documents)
    return Span(tokens[:limit], numbers[:limit]), np.concatenate(text_bytes)[:limit]
