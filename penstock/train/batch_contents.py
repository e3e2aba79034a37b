"""The contents of the batch of a step, read as training reads it: the documents of each row, decoded and counted.

The training loader is moved to the step: from the newest checkpoint before it, or from the start, reading only lengths.
Then rows are drawn one by one, which tells the mixture part of each.

`row_of` reads only the batch, so it shows exactly what the model gets. A span of a document ends with an
end-of-document token, or at the end of the row. Padding is recognized by a combination that does not occur otherwise:
an end-of-document token after another one, with an ignored label.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.base.errors import CheckpointError, DataError
from penstock.config.run import Run
from penstock.data.loader import Batch
from penstock.data.mixture import Text
from penstock.data.packed import PackedTokens
from penstock.data.sources import Tokens
from penstock.data.stream import LoaderState
from penstock.data.synthetic import SyntheticTokens
from penstock.data.tokenizer import open_tokenizer
from penstock.data.tokenizer_rules import Tokenizer
from penstock.kernels.reference import IGNORED_LABEL
from penstock.train.checkpoint import CheckpointStore
from penstock.train.setup import evaluation_rows, training_loader


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


MOST_ROWS = 1024
"""Rows of a batch that are analyzed; a batch of thousands of long rows would take minutes."""


@dataclass(frozen=True, kw_only=True)
class BatchContents:
    """Analysis of a batch."""

    rows: tuple[RowContents, ...]  # all rows of the batch, or MOST_ROWS of them
    parts: tuple[str, ...]  # mixture part of each row; empty names without a mixture
    batch_rows: int  # all rows of the batch
    weights: dict[str, float] = field(default_factory=dict)  # of the parts; empty without a mixture
    skipped: int = 0  # corrupt records on the way
    notices: tuple[str, ...] = ()

    def summary(self) -> dict[str, Any]:
        """Counts and shares of the rows, as `penstock data inspect --json` has them."""
        tokens, pieces = sum(row.tokens for row in self.rows), sum(len(row.pieces) for row in self.rows)
        padding, ignored = sum(row.padding for row in self.rows), sum(row.ignored for row in self.rows)
        sizes = [row.text_bytes for row in self.rows if row.text_bytes is not None]
        is_known = len(sizes) == len(self.rows) and tokens > padding  # bytes of text without padding
        rows_of = Counter(self.parts)
        return {
            "batch_rows": self.batch_rows,
            "counted_rows": len(self.rows),
            "tokens": tokens,
            "pieces": pieces,
            "pieces_per_row": pieces / len(self.rows),
            "bytes_per_token": sum(sizes) / (tokens - padding) if is_known else None,
            "padding_share": padding / tokens,
            "ignored_share": ignored / tokens,  # labels that are not counted
            "skipped_records": self.skipped,
            "parts": {
                name: {"weight": weight, "share": rows_of[name] / len(self.rows)}
                for name, weight in self.weights.items()
            },
        }


def training_contents(run: Run, text: Text, step: int, store: CheckpointStore | None = None) -> BatchContents:
    """Analyze the batch of a training step, from 1. With a store, reading begins at its newest checkpoint before it.

    Raises a DataError if a document cannot be read.
    """
    before, skipped = _state_before(run, text, step, store)
    reader = training_loader(run, text, 1)
    reader.restore(before)
    tokenizer, end = tokenizer_of(run, text), text.parts[0].documents.end_of_document
    rows, parts = [], []
    for _ in range(min(run.training.global_batch, MOST_ROWS)):
        rows.append(row_of(reader.next_batch(), 0, end_of_document=end, tokenizer=tokenizer))
        after = reader.state()
        parts.append(_part_read(text, before, after))
        before = after
    return BatchContents(
        rows=tuple(rows),
        parts=tuple(parts),
        weights={part.name: part.weight for part in text.parts} if len(text.parts) > 1 else {},
        batch_rows=run.training.global_batch,
        skipped=reader.skipped() - skipped,
        notices=text.corrupt.take_notices(),
    )


def held_out_contents(run: Run, text: Text) -> BatchContents:
    """Analyze the evaluation rows of a run that has some. Raises a DataError if a document cannot be read."""
    judged = evaluation_rows(run, text, min(run.evaluation.rows, MOST_ROWS))
    tokenizer, end = tokenizer_of(run, text), text.parts[0].documents.end_of_document
    numbers = [(batch, number) for batch in judged.batches for number in range(batch.rows)]
    rows = tuple(row_of(batch, number, end_of_document=end, tokenizer=tokenizer) for batch, number in numbers)
    return BatchContents(
        rows=rows,
        parts=("",) * len(rows),
        batch_rows=len(rows),
        skipped=text.corrupt.skipped,
        notices=text.corrupt.take_notices(),
    )


def tokenizer_of(run: Run, text: Text) -> Tokenizer | None:
    """The tokenizer of a run; None if its tokens stand for no text, or the tokenizer is not available."""
    documents = text.parts[0].documents
    if isinstance(documents, SyntheticTokens):
        return None
    if isinstance(documents, PackedTokens):
        return documents.tokenizer
    return open_tokenizer(run.data.tokenizer, run.data.end_of_document or None)


def _state_before(run: Run, text: Text, step: int, store: CheckpointStore | None) -> tuple[LoaderState, int]:
    """Loader state before a step, and the number of records skipped before reading began."""
    # With as many ranks as rows, the first rank builds one row and skips the others, which is faster.
    rows = run.training.global_batch
    loader = training_loader(run, text, rows, ranks=rows)
    done = max((saved for saved in store.steps() if saved < step), default=0) if store is not None else 0
    if store is not None and done > 0:
        facts = store.read_facts(done)
        if "loader" not in facts:
            raise CheckpointError(f"the checkpoint of step {done} says nothing of the data")
        loader.restore(facts["loader"])
    skipped = loader.skipped()
    for _ in range(done, step - 1):
        loader.next_batch()
    return loader.state(), skipped


def _part_read(text: Text, before: LoaderState, after: LoaderState) -> str:
    old, new = before.get("part_tokens"), after.get("part_tokens")  # tokens of each part so far
    if not isinstance(old, list) or not isinstance(new, list):
        return ""
    (grown,) = [number for number, pair in enumerate(zip(old, new, strict=True)) if pair[1] > pair[0]]  # by this row
    return text.parts[grown].name
