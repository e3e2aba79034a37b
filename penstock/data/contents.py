"""What a row of a batch really holds: pieces of documents, decoded and counted.

It looks at nothing but the batch, so that it shows what the model will see. A piece ends with an end-of-document token,
or where the row ends. Tokens that only fill a row are told by what never occurs otherwise: an end-of-document token
behind another one, with a label that is not counted.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.batch import Batch
from penstock.data.sources import Tokens
from penstock.data.tokenizer import Tokenizer
from penstock.kernels.reference import IGNORED_LABEL


@dataclass(frozen=True, kw_only=True)
class DocumentSpan:
    """A part of a document in a row.

    Attributes:
        first: place of its first token in the row.
        tokens: how many, its end too.
        text: decoded; None without a tokenizer.
        ids: of its tokens.
        ends: whether the document ends here.
        positions: what the model is told of the places of its first and last token.
        ignored: places of the row whose labels are not counted.
    """

    first: int
    tokens: int
    text: str | None
    ids: tuple[int, ...]
    ends: bool
    positions: tuple[int, int]
    ignored: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RowContents:
    """A row of a batch.

    Attributes:
        pieces: of documents, in order.
        tokens: of the row.
        padding: tokens behind the pieces that only fill the row.
        ignored: labels that are not counted, those of the padding too.
        text_bytes: that its tokens stand for; None if nobody knows.
    """

    pieces: tuple[DocumentSpan, ...]
    tokens: int
    padding: int
    ignored: int
    text_bytes: int | None


def row_of(batch: Batch, number: int, *, end_of_document: int, tokenizer: Tokenizer | None) -> RowContents:
    """Takes a row of a batch apart.

    Args:
        batch: what the model is given, on the CPU.
        number: of the row.
        end_of_document: the id that ends documents.
        tokenizer: what decodes; None for tokens that stand for no text, or whose tokenizer is not at hand.
    """
    tokens, labels = batch.tokens_BS[number].numpy(), batch.labels_BS[number].numpy()
    positions = batch.positions_BS[number].numpy()
    padding = _padding(tokens, labels, end_of_document)
    filled = len(tokens) - padding
    ends = np.flatnonzero(tokens[:filled] == end_of_document) + 1
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


def _padding(tokens: NDArray[np.int64], labels: NDArray[np.int64], end_of_document: int) -> int:
    """Returns how many tokens at the end of a row only fill it."""
    others = np.flatnonzero((tokens != end_of_document) | (labels != IGNORED_LABEL))
    if len(others) == 0:
        return len(tokens)
    # The first of these is the end of the row's last document.
    return max(0, len(tokens) - 2 - int(others[-1]))


def _text_bytes(tokenizer: Tokenizer | None, tokens: Tokens) -> int | None:
    if tokenizer is None:
        return None
    try:
        return int(tokenizer.bytes_of(tokens).sum())
    except DataError:
        # A row may begin inside of a character, which not every tokenizer can tell the bytes of.
        return None
