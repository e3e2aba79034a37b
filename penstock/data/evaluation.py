"""The fixed rows on which a model is judged, with the bytes of text that they predict.

Losses of different tokenizers compare in bits per byte of text: the nats of all counted labels, over ln 2, over the
bytes that these labels stand for. The bytes are exact: each label's own are summed, so that cut documents and labels
that are not counted take no part. An end-of-document token costs nats and stands for no byte.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.batch import Batch
from penstock.data.packing import pack
from penstock.data.sources import Source, Tokens
from penstock.data.stream import Span, document_order, with_end_token
from penstock.kernels.reference import IGNORED_LABEL

_ORDER_SEED = 0
"""The order of documents, and so what is judged, is the same for all runs: their seed has no part in it."""


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
    """Packs documents, in a fixed random order, into at most `limit_rows` rows; all of them, if they are fewer.

    Rows that are not filled, and rows that make the last batch as large as the others, are padded with end-of-document
    tokens whose labels are not counted.

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
    assert rows % ranks == 0, f"a global batch of {rows} rows does not divide among {ranks} ranks"
    assert limit_rows > 0, "an evaluation needs at least one row"
    span, text_bytes = _read_whole_documents(source, limit_rows * sequence_length + 1)
    used = len(span.tokens)
    count = -(-(used - 1) // (rows * sequence_length)) * rows * sequence_length
    padding = count + 1 - used
    padded = Span(
        tokens=np.pad(span.tokens, (0, padding), constant_values=source.end_of_document),
        documents=np.pad(span.documents, (0, padding), constant_values=span.documents[-1] + 1),
    )
    whole = pack(padded, sequence_length=sequence_length, document_mask=document_mask, padding=padding)
    counted = whole.labels_BS.flatten().numpy()[: used - 1] != IGNORED_LABEL
    rank_rows = rows // ranks
    return Evaluation(
        batches=tuple(
            batch.rows_between(rank * rank_rows, (rank + 1) * rank_rows) for batch in whole.micro_batches(rows)
        ),
        tokens=int(counted.sum()),
        text_bytes=int(text_bytes[1:][counted].sum()),
    )


def _read_whole_documents(source: Source, limit: int) -> tuple[Span, NDArray[np.int64]]:
    """Returns the first tokens of the fixed order, at most `limit`, and the bytes of text that each stands for."""
    documents: list[Tokens] = []
    text_bytes: list[Tokens] = []
    count = 0
    for index in document_order(len(source), seed=_ORDER_SEED, epoch=0).tolist():
        document = with_end_token(source, index)
        if len(document) > 0:
            documents.append(document)
            text_bytes.append(np.append(source.bytes_per_token(index), 0))
            count += len(document)
        if count >= limit:
            break
    if count == 0:
        raise DataError("the validation data hold no text: every document is empty", got=f"{len(source)} documents")
    ordinals = np.repeat(np.arange(len(documents)), [len(document) for document in documents])
    span = Span(np.concatenate(documents).astype(np.int64)[:limit], ordinals[:limit])
    return span, np.concatenate(text_bytes).astype(np.int64)[:limit]
