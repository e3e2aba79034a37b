"""The contents of a row of a batch: spans of documents, decoded and counted.

It reads only the batch, so it shows exactly what the model gets. A span ends with an end-of-document token, or at the
end of the row. Padding is recognized by a combination that does not occur otherwise: an end-of-document token after
another one, with an ignored label.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.base.errors import DataError
from penstock.data.batch import Batch
from penstock.data.sources import Tokens
from penstock.data.tokenizer_rules import Tokenizer
from penstock.kernels.reference import IGNORED_LABEL


@dataclass(frozen=True, kw_only=True)
class DocumentSpan:
    """A part of a document in a row."""

    first: int  # index of its first token in the row
    tokens: int  # the end token included
    text: str | None  # None without a tokenizer
    ids: tuple[int, ...]
    ends: bool  # with an end-of-document token
    positions: tuple[int, int]  # of its first and last token, as the model gets them
    ignored: tuple[int, ...]  # indices in the row whose labels are ignored


@dataclass(frozen=True, kw_only=True)
class RowContents:
    """A row of a batch."""

    pieces: tuple[DocumentSpan, ...]
    tokens: int
    padding: int  # tokens
    ignored: int  # labels
    text_bytes: int | None  # None if unknown


def row_of(batch: Batch, number: int, *, end_of_document: int, tokenizer: Tokenizer | None) -> RowContents:
    """Split a row of a batch into documents; without a tokenizer (None) they have no text."""
    tokens, labels = batch.tokens_BS[number].numpy(), batch.labels_BS[number].numpy()
    positions = batch.positions_BS[number].numpy()
    others = np.flatnonzero((tokens != end_of_document) | (labels != IGNORED_LABEL))
    # The first token behind the others is the end of the row's last document.
    padding = max(0, len(tokens) - 2 - int(others[-1])) if len(others) else len(tokens)
    filled = len(tokens) - padding
    ends = np.flatnonzero(tokens[:filled] == end_of_document) + 1  # indices behind end tokens
    pieces = tuple(
        DocumentSpan(
            first=first,
            tokens=stop - first,
            text=None if tokenizer is None else tokenizer.decode(tokens[first:stop]),
            ids=tuple(tokens[first:stop].tolist()),
            ends=bool(tokens[stop - 1] == end_of_document),
            positions=(int(positions[first]), int(positions[stop - 1])),
            ignored=tuple((first + np.flatnonzero(labels[first:stop] == IGNORED_LABEL)).tolist()),
        )
        for first, stop in pairwise(sorted({0, *ends.tolist(), filled}))
    )
    return RowContents(
        pieces=pieces,
        tokens=len(tokens),
        padding=padding,
        ignored=int((labels == IGNORED_LABEL).sum()),
        text_bytes=_text_bytes(tokenizer, tokens[:filled]),
    )


def _text_bytes(tokenizer: Tokenizer | None, tokens: Tokens) -> int | None:
    if tokenizer is None:
        return None
    try:
        return int(tokenizer.bytes_of(tokens).sum())
    except DataError:
        # A row may begin inside of a character, which not every tokenizer can tell the bytes of.
        return None
