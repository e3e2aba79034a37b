"""Batches for training: the next rows of a stream are a global batch, of which each rank takes its part.

With shuffling, a stream has up to LANES lanes, so that the rows of a batch are of as many documents; without, it has
one, and the rows are neighbours. Of a mixture, each part has its own stream.

The global batch of a step does not depend on the number of ranks: rank r of R takes rows r*rows/R .. (r+1)*rows/R - 1
of it, and skips the rest. To skip, a rank must know how long the documents are, so that every rank reads every document
of the global batch. Reading bytes is cheap; where encoding is not (a large batch with a tokenizer), encode the corpus
beforehand.

What has been handed out is one position of the stream. Saved and restored, each lane continues with its very next
token, also when rows, sequence length or number of ranks have changed.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from penstock.base.errors import DataError
from penstock.data.batch import Batch, pack
from penstock.data.mixture import Text, TextPart, stream_of
from penstock.data.sources import Source
from penstock.data.stream import LoaderState, RowStream, check_names, number


class Batches(Protocol):
    """What training draws from: a Loader, or a Prefetch around one."""

    def next_batch(self) -> Batch:
        """Returns this rank's rows of the next global batch, on the CPU.

        Raises:
            DataError: a document cannot be read.
        """

    def state(self) -> LoaderState:
        """Returns the place after the batch that was handed out last, and what it is a place in."""

    def restore(self, state: LoaderState) -> None:
        """Continues where a state was taken.

        Raises:
            DataError: the state is of other data, or damaged; nothing has changed then.
        """

    def skipped(self) -> int:
        """Returns how many records could not be read and were skipped, up to the batch that was handed out last."""

    def take_notices(self) -> tuple[str, ...]:
        """Returns what the user should know of the data since the last call, a line each."""

    def close(self) -> None:
        """Ends what runs in the background."""


class Loader:
    """Makes batches when they are asked for."""

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
        """Starts at the first token of the first epoch.

        Args:
            text: the documents, or all that a run trains on.
            rows: rows of the global batch, of all ranks together; a multiple of `ranks`.
            sequence_length: tokens of a row, S.
            seed: of the order of documents, >= 0.
            document_mask: keep documents apart (see packing).
            shuffle: give each epoch another order; else documents come by number.
            rank: which part of the global batch is ours.
            ranks: number of parts.
        """
        assert rows % ranks == 0, f"a global batch of {rows} rows does not divide among {ranks} ranks"
        assert 0 <= rank < ranks, f"rank {rank} is not one of {ranks}"
        text = text if isinstance(text, Text) else Text((TextPart(documents=text),))
        self._stream: RowStream[Any] = stream_of(text, seed=seed, shuffle=shuffle)
        self._identity = {"seed": seed, "shuffle": int(shuffle), "source": self._stream.fingerprint}
        self._corrupt = text.corrupt
        self._sequence_length = sequence_length
        self._document_mask = document_mask
        self._rows_ours = rows // ranks
        self._rows_before, self._rows_behind = rank * self._rows_ours, (ranks - rank - 1) * self._rows_ours
        self._tokens_per_batch = rows * sequence_length
        self._position = self._stream.start()
        self._tokens_handed_out = 0

    def next_batch(self) -> Batch:
        """Returns this rank's rows of the next global batch, on the CPU.

        Raises:
            DataError: a document cannot be read; the next call tries again.
        """
        ours = self._stream.advance(self._position, self._rows_before, self._sequence_length)
        rows, behind = self._stream.read(ours, self._rows_ours, self._sequence_length)
        self._position = self._stream.advance(behind, self._rows_behind, self._sequence_length)
        self._tokens_handed_out += self._tokens_per_batch
        return pack(rows, document_mask=self._document_mask)

    def state(self) -> LoaderState:
        """Returns the position, the tokens handed out to all ranks so far, and what tells these data from others."""
        return {
            **self._stream.save(self._position),
            "tokens": self._tokens_handed_out,
            "skipped": self._corrupt.skipped,
            **self._identity,
        }

    def restore(self, state: LoaderState) -> None:
        """Continues where a state was taken.

        Raises:
            DataError: the state is of other data, or damaged; nothing has changed then.
        """
        check_names(state, self.state())
        for name, meaning in (("source", self._stream.changed), ("seed", "its seed"), ("shuffle", "its shuffling")):
            if state[name] != self._identity[name]:
                what = meaning if isinstance(meaning, str) else meaning(state)
                raise DataError(
                    f"the run was saved with other data: {what} changed",
                    got=f"{name} {self._identity[name]}, was {state[name]}",
                    fix="resume with the data settings and files of the run, or start a new run",
                )
        position, tokens, skipped = self._stream.restore(state), number(state, "tokens"), number(state, "skipped")
        self._position, self._tokens_handed_out, self._corrupt.skipped = position, tokens, skipped

    def skipped(self) -> int:
        """Returns how many records were skipped so far, by all processes of the run one after the other."""
        return self._corrupt.skipped

    def take_notices(self) -> tuple[str, ...]:
        """Returns which records were skipped since the last call."""
        return self._corrupt.take_notices()

    def close(self) -> None:
        """Does nothing: a Loader has nothing in the background."""


class _Ready(NamedTuple):
    """A batch, and the loader right after it."""

    batch: Batch
    state: LoaderState
    skipped: int
    notices: tuple[str, ...]


class Prefetch:
    """Keeps a loader one batch ahead, in one background thread. `state` is of what was handed out."""

    def __init__(self, loader: Loader) -> None:
        """Takes over the loader, which nobody else may use from now on, and starts the first batch."""
        self._loader = loader
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-data")
        self._state, self._skipped = loader.state(), loader.skipped()
        self._notices: tuple[str, ...] = ()
        self._ahead = self._start()

    def _start(self) -> Future[_Ready]:
        return self._thread.submit(self._next)

    def _next(self) -> _Ready:
        batch = self._loader.next_batch()
        return _Ready(batch, self._loader.state(), self._loader.skipped(), self._loader.take_notices())

    def next_batch(self) -> Batch:
        """Returns the batch that is ready, or waits for it, and starts the next.

        Raises:
            DataError: what the loader raised.
        """
        batch, self._state, self._skipped, notices = self._ahead.result()
        self._notices += notices
        self._ahead = self._start()
        return batch

    def state(self) -> LoaderState:
        """Returns the loader's state after the batch that was handed out last."""
        return dict(self._state)

    def restore(self, state: LoaderState) -> None:
        """Drops the batch that is ahead and continues where a state was taken.

        Raises:
            DataError: the state is of other data, or damaged; nothing has changed then.
        """
        wait([self._ahead])
        self._loader.restore(state)
        self._state, self._skipped = self._loader.state(), self._loader.skipped()
        self._ahead = self._start()

    def skipped(self) -> int:
        """Returns how many records were skipped up to the batch that was handed out last."""
        return self._skipped

    def take_notices(self) -> tuple[str, ...]:
        """Returns which records were skipped since the last call."""
        notices, self._notices = self._notices, ()
        return notices

    def close(self) -> None:
        """Ends the thread; there are no batches after that."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()
