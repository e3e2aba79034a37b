"""Rows of S + 1 tokens -> a batch: S tokens a row, with labels, positions and documents.

A lane of the stream is cut into rows without a gap, documents or not: its next row begins where this one ends. The
label of a token is the next token of the lane, across the end of a row too, so that no token is passed over as a label.

With `document_mask` a document sees nothing but itself:

- `documents_BS` numbers the documents of each row from 0, and attention stays inside equal numbers;
- `positions_BS` begin at 0 with each document and with each row. The part of a document that stands in the row before
  cannot be seen, and counting on from it would leave the range of the rotary embedding;
- the label of an end-of-document token would be the first token of a document that has nothing to do with it: it is not
  counted. The end-of-document token itself is: the last token of a document has it as its label.

Without, a row is one text: positions are 0..S-1, and an end-of-document token has the next document's first as its
label.

An example, rows of 4 from one lane, the documents `a b c`, `d` and `e f g`, and `.` for the end-of-document token:

    tokens      a b c .   d . e f   g . ...
    labels      b c . d   . e f g           without document_mask
    labels      b c . -   . - f g           with
    positions   0 1 2 3   0 1 0 1           with
    documents   0 0 0 0   0 0 1 1           with
"""

import numpy as np
import torch

from penstock.data.batch import Batch
from penstock.data.rows import Rows
from penstock.kernels.reference import IGNORED_LABEL

PADDING = -1
"""The document number of tokens that only fill a row: no position predicts them."""


def pack(rows: Rows, *, document_mask: bool) -> Batch:
    """Makes a batch of rows.

    Args:
        rows: B rows of S + 1 tokens; the last of a row is only a label.
        document_mask: keep documents apart, as the module says.

    Returns:
        B rows of S tokens on the CPU. No memory is shared with `rows`.
    """
    tokens_BS, labels_BS = rows.tokens[:, :-1].astype(np.int64), rows.tokens[:, 1:].astype(np.int64)
    documents_BS, label_documents_BS = rows.documents[:, :-1], rows.documents[:, 1:]
    positions_BS = np.tile(np.arange(tokens_BS.shape[1]), (len(tokens_BS), 1))

    labels_BS[label_documents_BS == PADDING] = IGNORED_LABEL
    if document_mask:
        labels_BS[label_documents_BS != documents_BS] = IGNORED_LABEL
        begins_BS = np.diff(documents_BS, axis=1, prepend=PADDING) != 0
        positions_BS -= np.maximum.accumulate(np.where(begins_BS, positions_BS, 0), axis=1)
        documents_BS = np.cumsum(begins_BS, axis=1) - begins_BS[:, :1]

    return Batch(
        tokens_BS=torch.from_numpy(tokens_BS),
        labels_BS=torch.from_numpy(labels_BS),
        positions_BS=torch.from_numpy(positions_BS),
        documents_BS=torch.from_numpy(documents_BS) if document_mask else None,
    )
