"""Batches for training: an endless stream of documents, cut into global batches, of which each rank takes its rows.

The global batch of a step is the next rows*S tokens of the stream. It does not depend on the number of ranks: rank r of
R takes rows r*rows/R .. (r+1)*rows/R - 1 of it, and skips the rest. To skip, a rank must know how long the documents
are, so that every rank reads every document of the global batch. Reading bytes is cheap; where encoding is not (a large
batch with a tokenizer), encode the corpus beforehand.

What has been handed out is one cursor. Saved and restored, it continues with the very next token, also when rows,
sequence length or number of ranks have changed.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Protocol, Self

from penstock.base.errors import DataError
from penstock.data.batch import Batch
from penstock.data.packing import cut, pack
from penstock.data.sources import Source
from penstock.data.stream import Cursor, Stream


class Batches(Protocol):
    """What training draws from: a Loader, or a Prefetch around one."""

    def next_batch(self) -> Batch:
        """Returns this rank's rows of the next global batch, on the CPU.

        Raises:
            DataError: a document cannot be read.
        """

    def state(self) -> dict[str, int]:
        """Returns the place after the batch that was handed out last, and what it is a place in."""

    def restore(self, state: Mapping[str, int]) -> None:
        """Continues where a state was taken.

        Raises:
            DataError: the state is of other data, or damaged; nothing has changed then.
        """

    def close(self) -> None:
        """Ends what runs in the background."""


class Loader:
    """Makes batches when they are asked for."""

    def __init__(
        self,
        source: Source,
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
            source: the documents.
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
        self._stream = Stream(source, seed=seed, shuffle=shuffle)
        self._identity = {"seed": seed, "shuffle": int(shuffle), "source": source.fingerprint}
        self._documents = len(source)
        self._sequence_length = sequence_length
        self._document_mask = document_mask
        rank_tokens = rows // ranks * sequence_length
        self._tokens_before, self._tokens_ours = rank * rank_tokens, rank_tokens
        self._tokens_behind = (ranks - rank - 1) * rank_tokens
        self._cursor = Cursor()
        self._tokens_handed_out = 0

    def next_batch(self) -> Batch:
        """Returns this rank's rows of the next global batch, on the CPU.

        Raises:
            DataError: a document cannot be read; the next call tries again.
        """
        ours = self._stream.advance(self._cursor, self._tokens_before)
        span, behind = self._stream.read(ours, self._tokens_ours)
        self._cursor = self._stream.advance(behind, self._tokens_behind)
        self._tokens_handed_out += self._tokens_before + self._tokens_ours + self._tokens_behind
        return pack(cut(span, self._sequence_length), document_mask=self._document_mask)

    def state(self) -> dict[str, int]:
        """Returns the cursor, the tokens handed out to all ranks so far, and what tells these data from others."""
        return {**self._cursor._asdict(), "tokens": self._tokens_handed_out, **self._identity}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continues where a state was taken.

        Raises:
            DataError: the state is of other data, or damaged; nothing has changed then.
        """
        if state.keys() != self.state().keys():
            raise DataError(
                "the saved place in the data is damaged",
                got=", ".join(state) or "nothing",
                allowed=", ".join(self.state()),
            )
        for name, meaning in (("source", "its documents"), ("seed", "its seed"), ("shuffle", "its shuffling")):
            if state[name] != self._identity[name]:
                raise DataError(
                    f"the run was saved with other data: {meaning} changed",
                    got=f"{name} {self._identity[name]}, was {state[name]}",
                    fix="resume with the data settings and files of the run, or start a new run",
                )
        cursor = Cursor(state["epoch"], state["place"], state["offset"])
        if min(cursor) < 0 or cursor.place >= self._documents:
            raise DataError("the saved place in the data is damaged", got=dict(state))
        self._cursor = cursor
        self._tokens_handed_out = state["tokens"]

    def close(self) -> None:
        """Does nothing: a Loader has nothing in the background."""


class Prefetch:
    """Keeps a loader one batch ahead, in one background thread. `state` is of what was handed out."""

    def __init__(self, loader: Loader) -> None:
        """Takes over the loader, which nobody else may use from now on, and starts the first batch."""
        self._loader = loader
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-data")
        self._state = loader.state()
        self._ahead = self._start()

    def _start(self) -> Future[tuple[Batch, dict[str, int]]]:
        return self._thread.submit(lambda: (self._loader.next_batch(), self._loader.state()))

    def next_batch(self) -> Batch:
        """Returns the batch that is ready, or waits for it, and starts the next.

        Raises:
            DataError: what the loader raised.
        """
        batch, self._state = self._ahead.result()
        self._ahead = self._start()
        return batch

    def state(self) -> dict[str, int]:
        """Returns the loader's state after the batch that was handed out last."""
        return dict(self._state)

    def restore(self, state: Mapping[str, int]) -> None:
        """Drops the batch that is ahead and continues where a state was taken.

        Raises:
            DataError: the state is of other data, or damaged; nothing has changed then.
        """
        wait([self._ahead])
        self._loader.restore(state)
        self._state = self._loader.state()
        self._ahead = self._start()

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
