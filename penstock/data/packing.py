"""A span of the token stream -> rows of S tokens with labels, positions and documents.

Rows are cut from the stream without a gap, documents or not: row r holds tokens r*S .. r*S+S-1. The label of a token is
the next token of the stream, across the end of a row too, so that no token of the stream is passed over as a label.

With `document_mask` a document sees nothing but itself:

- `documents_BS` numbers the documents of each row from 0, and attention stays inside equal numbers;
- `positions_BS` begin at 0 with each document and with each row. The part of a document that stands in the row before
  cannot be seen, and counting on from it would leave the range of the rotary embedding;
- the label of an end-of-document token would be the first token of a document that has nothing to do with it: it is not
  counted. The end-of-document token itself is: the last token of a document has it as its label.

Without, a row is one text: positions are 0..S-1, and an end-of-document token has the next document's first as its
label.

An example, rows of 4, the documents `a b c`, `d` and `e f g`, and `.` for the end-of-document token:

    stream      a b c .   d . e f   g . ...
    labels      b c . d   . e f g           without document_mask
    labels      b c . -   . - f g           with
    positions   0 1 2 3   0 1 0 1           with
    documents   0 0 0 0   0 0 1 1           with
"""

import numpy as np
import torch

from penstock.data.batch import Batch
from penstock.data.stream import Span
from penstock.kernels.reference import IGNORED_LABEL


def pack(span: Span, *, sequence_length: int, document_mask: bool, padding: int = 0) -> Batch:
    """Cuts a span into rows.

    Args:
        span: B*S + 1 tokens; the last is only a label.
        sequence_length: S.
        document_mask: keep documents apart, as the module says.
        padding: tokens at the span's end that are not of the stream, and that no position shall predict.

    Returns:
        B rows on the CPU. Nothing is shared with the span.
    """
    count = len(span.tokens) - 1
    assert count % sequence_length == 0, f"{count} tokens do not fill rows of {sequence_length}"
    shape = (count // sequence_length, sequence_length)

    labels = span.tokens[1:].copy()
    if document_mask:
        labels[span.documents[1:] != span.documents[:-1]] = IGNORED_LABEL
    labels[count - padding :] = IGNORED_LABEL

    positions_BS = np.broadcast_to(np.arange(sequence_length), shape)
    documents_BS = span.documents[:-1].reshape(shape)
    if document_mask:
        begins_BS = np.diff(documents_BS, axis=1, prepend=-1) != 0
        positions_BS = positions_BS - np.maximum.accumulate(np.where(begins_BS, positions_BS, 0), axis=1)
        documents_BS = documents_BS - documents_BS[:, :1]

    return Batch(
        tokens_BS=torch.tensor(span.tokens[:-1].reshape(shape)),
        labels_BS=torch.tensor(labels.reshape(shape)),
        positions_BS=torch.tensor(positions_BS),
        documents_BS=torch.tensor(documents_BS) if document_mask else None,
    )
