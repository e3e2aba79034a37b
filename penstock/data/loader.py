"""Batches for training: the next rows of a stream are the global batch, and each rank takes its part.

With shuffling a stream has up to LANES lanes, so that the rows of a batch come from as many documents; without, it has
one lane, and rows are neighbours. Each part of a mixture has its own stream.

The global batch does not depend on the number of ranks: rank r of R takes rows r*rows/R .. (r+1)*rows/R - 1 and skips
the rest. To skip rows a rank needs the lengths of their documents, so every rank reads every document of the global
batch. Reading bytes is cheap; if encoding is too slow (a large batch with a tokenizer), pack the corpus beforehand.

The position of the stream after the last batch is the saved state. After a resume each lane continues with its next
token, even if rows, sequence length or the number of ranks have changed.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeAlias

from penstock.base.errors import DataError
from penstock.data.batch import Batch, pack
from penstock.data.mixture import Text, TextPart, stream_of
from penstock.data.sources import Source
from penstock.data.stream import LoaderState, RowStream, check_names, read_count


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
