"""Batches: rows of tokens with labels, positions and documents, and how rows of a stream become one.

A lane is cut into rows without gaps: its next row begins where this one ends. The label of a token is the lane's next
token, also across the end of a row, so that every token is a label once.

With `document_mask` documents are independent:

- `documents_BS` numbers the documents of each row from 0, and attention stays inside equal numbers;
- `positions_BS` restart at 0 with each document and each row: a continued document cannot attend to the previous row,
  and counting on would exceed the range of the rotary embedding;
- the label of an end-of-document token would be the first token of an unrelated document, so it is ignored. The end
  token itself is predicted: it is the label of a document's last token.

Without it, a row is one text: positions are 0..S-1, and an end token predicts the next document's first token.

Example: rows of 4 from one lane, the documents `a b c`, `d` and `e f g`, and `.` for the end-of-document token:

    tokens      a b c .   d . e f   g . ...
    labels      b c . d   . e f g           without document_mask
    labels      b c . -   . - f g           with
    positions   0 1 2 3   0 1 0 1           with
    documents   0 0 0 0   0 0 1 1           with
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.data.stream import Rows
from penstock.kernels.reference import IGNORED_LABEL


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of tokens, int64, with everything that a forward pass and a loss need."""

    tokens_BS: Tensor
    labels_BS: Tensor  # the next token of the stream; IGNORED_LABEL (-100) where nothing is predicted
    positions_BS: Tensor  # for the rotary embedding; 0..S-1, or counted from each document's start in the row
    documents_BS: Tensor | None  # attention stays inside equal ids of a row, from 0; None if it may cross documents

    @property
    def rows(self) -> int:
        return self.tokens_BS.shape[0]

    def between(self, start: int, stop: int) -> "Batch":
        """Returns rows start..stop-1, as views."""
        rows: dict[str, Any] = {name: None if x_BS is None else x_BS[start:stop] for name, x_BS in vars(self).items()}
        return Batch(**rows)

    def micro_batches(self, rows: int) -> list["Batch"]:
        """Returns micro-batches of `rows` rows each, in order, as views."""
        assert self.rows % rows == 0, f"{self.rows} rows do not divide into micro-batches of {rows}"
        return [self.between(start, start + rows) for start in range(0, self.rows, rows)]


PADDING = -1
"""The document number of padding tokens; no position predicts them."""


def pack(rows: Rows, *, document_mask: bool) -> Batch:
    """Make a batch of B rows of S tokens, on the CPU, in new memory; the last of S + 1 tokens is only a label."""
    # B x S + 1 -> twice B x S, shifted by one; astype copies.
    tokens_BS, labels_BS = rows.tokens[:, :-1].astype(np.int64), rows.tokens[:, 1:].astype(np.int64)
    documents_BS, label_documents_BS = rows.documents[:, :-1], rows.documents[:, 1:]
    positions_BS = np.tile(np.arange(tokens_BS.shape[1]), (len(tokens_BS), 1))

    labels_BS[label_documents_BS == PADDING] = IGNORED_LABEL
    if document_mask:
        labels_BS[label_documents_BS != documents_BS] = IGNORED_LABEL  # of end tokens
        # True at the first token of each document in the row, the row's first token included.
        begins_BS = np.diff(documents_BS, axis=1, prepend=PADDING) != 0
        # Minus the position at which the document of each token begins.
        positions_BS -= np.maximum.accumulate(np.where(begins_BS, positions_BS, 0), axis=1)
        documents_BS = np.cumsum(begins_BS, axis=1) - begins_BS[:, :1]  # begins so far, from 0

    return Batch(
        tokens_BS=torch.from_numpy(tokens_BS),
        labels_BS=torch.from_numpy(labels_BS),
        positions_BS=torch.from_numpy(positions_BS),
        documents_BS=torch.from_numpy(documents_BS) if document_mask else None,
    )
