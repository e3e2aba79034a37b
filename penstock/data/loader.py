"""Batches for training: the next rows of a stream are the global batch, and each rank takes its part.

With shuffling a stream has up to LANES lanes, so that the rows of a batch come from as many documents; without, it has
one lane, and rows are neighbours. Each part of a mixture has its own stream.

The global batch does not depend on the number of ranks: rank r of R takes rows r*rows/R .. (r+1)*rows/R - 1 and skips
the rest. To skip rows a rank needs the lengths of their documents, so every rank reads every document of the global
batch. Reading bytes is cheap; if encoding is too slow (a large batch with a tokenizer), pack the corpus beforehand. The
position of the stream after the last batch is the saved state. After a resume each lane continues with its next token,
even if rows, sequence length or the number of ranks have changed.

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

from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.base.errors import DataError
from penstock.data.mixture import Text, TextPart, stream_of
from penstock.data.sources import Source
from penstock.data.stream import LoaderState, Rows, RowStream, check_names, read_count
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


class Batches(Protocol):
    """An iterator over global batches for training: a Loader, or a Prefetch around one."""

    def next_batch(self) -> Batch:
        """Returns this rank's rows of the next global batch, on the CPU; after a DataError, try again."""

    def state(self) -> LoaderState:
        """Returns the position after the last returned batch, and the identity of the data."""

    def restore(self, state: LoaderState) -> None:
        """Continues from a saved state. Other data or damage is a DataError, and then nothing has changed."""

    def skipped(self) -> int:
        """Returns how many records the run has skipped, up to the last returned batch; resumed runs count on."""

    def take_notices(self) -> tuple[str, ...]:
        """Returns messages for the user since the last call, one line each, such as skipped records."""

    def close(self) -> None:
        """Ends background work; no batches follow."""


class Loader:
    """Makes batches on request, from the first token of the first epoch; see `Batches` for its methods.

    `rows` are those of the global batch over all ranks, a multiple of `ranks`. With `shuffle` documents have another
    order in each epoch; else they come by number.
    """

    def __init__(
        self,
        text: Source | Text,
        *,
        rows: int,
        sequence_length: int,
        seed: int,
        document_mask: bool,
        shuffle: bool = True,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        assert rows % ranks == 0, f"a global batch of {rows} rows does not divide among {ranks} ranks"
        assert 0 <= rank < ranks, f"rank {rank} is not one of {ranks}"
        # A text that is no mixture is a mixture of one part.
        text = text if isinstance(text, Text) else Text((TextPart(documents=text),))
        self._stream: RowStream[Any] = stream_of(text, seed=seed, shuffle=shuffle)
        self._identity = {"seed": seed, "shuffle": int(shuffle), "source": self._stream.fingerprint}  # of saved states
        self._corrupt = text.corrupt
        self._sequence_length = sequence_length
        self._document_mask = document_mask
        self._own_rows = rows // ranks
        self._rows_before, self._rows_after = rank * self._own_rows, (ranks - rank - 1) * self._own_rows
        self._tokens_per_batch = rows * sequence_length
        self._position = self._stream.start()
        self._tokens = 0  # of all ranks

    def next_batch(self) -> Batch:
        first = self._stream.advance(self._position, self._rows_before, self._sequence_length)
        rows, after = self._stream.read(first, self._own_rows, self._sequence_length)
        # The position changes last, so that a batch whose reading failed can be asked for again.
        self._position = self._stream.advance(after, self._rows_after, self._sequence_length)
        self._tokens += self._tokens_per_batch
        return pack(rows, document_mask=self._document_mask)

    def state(self) -> LoaderState:
        """Returns the position, the tokens of all ranks so far, and the identity of the data."""
        counts = {"tokens": self._tokens, "skipped": self._corrupt.skipped}
        return {**self._stream.save(self._position), **counts, **self._identity}

    def restore(self, state: LoaderState) -> None:
        check_names(state, self.state())
        for name, meaning in (("source", self._stream.changed), ("seed", "its seed"), ("shuffle", "its shuffling")):
            if state[name] != self._identity[name]:
                what = meaning if isinstance(meaning, str) else meaning(state)
                raise DataError(
                    f"the run was saved with other data: {what} changed",
                    got=f"{name} {self._identity[name]}, was {state[name]}",
                    fix="resume with the data of the run, or begin one with its weights: penstock train --from RUN",
                )
        # Read everything before anything changes.
        position, tokens = self._stream.restore(state), read_count(state, "tokens")
        skipped = read_count(state, "skipped")
        self._position, self._tokens, self._corrupt.skipped = position, tokens, skipped

    def skipped(self) -> int:
        return self._corrupt.skipped

    def take_notices(self) -> tuple[str, ...]:
        return self._corrupt.take_notices()

    def close(self) -> None:
        """Does nothing: a Loader has no background work."""


_Fetched: TypeAlias = tuple[Batch, LoaderState, int, tuple[str, ...]]
"""A batch, and the state, skipped records and notices of the loader right after it."""


class Prefetch:
    """Runs a loader one batch ahead in a background thread; see `Batches` for its methods."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-data")
        # After the last returned batch: the loader itself is one batch ahead, in the thread.
        self._state, self._skipped = loader.state(), loader.skipped()
        self._notices: tuple[str, ...] = ()
        self._ahead: Future[_Fetched] | None = self._start()

    def _start(self) -> "Future[_Fetched]":
        return self._thread.submit(self._fetch)

    def _fetch(self) -> "_Fetched":
        batch = self._loader.next_batch()
        return batch, self._loader.state(), self._loader.skipped(), self._loader.take_notices()

    def next_batch(self) -> Batch:
        """Returns the prefetched batch and starts the next one; errors of the loader are raised here."""
        ahead, self._ahead = self._ahead or self._start(), None  # after an error the next call fetches again
        batch, self._state, self._skipped, notices = ahead.result()
        self._notices += notices
        self._ahead = self._start()
        return batch

    def state(self) -> LoaderState:
        """Returns the loader's state after the last returned batch."""
        return dict(self._state)

    def restore(self, state: LoaderState) -> None:
        """Drops the prefetched batch and continues from a saved state."""
        wait([self._ahead] if self._ahead else [])  # only one thread at a time uses the loader
        self._loader.restore(state)
        self._state, self._skipped = self._loader.state(), self._loader.skipped()
        self._ahead = None  # the next call fetches: a run that ends after an error reads nothing more

    def skipped(self) -> int:
        """Returns how many records were skipped up to the last returned batch."""
        return self._skipped

    def take_notices(self) -> tuple[str, ...]:
        notices, self._notices = self._notices, ()
        return notices

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
