"""Batches for training: the next rows of a stream are a global batch, of which each rank takes its part.

With shuffling, the stream has up to LANES lanes, so that the rows of a batch are of as many documents; without, it has
one, and the rows are neighbours.

The global batch of a step does not depend on the number of ranks: rank r of R takes rows r*rows/R .. (r+1)*rows/R - 1
of it, and skips the rest. To skip, a rank must know how long the documents are, so that every rank reads every document
of the global batch. Reading bytes is cheap; where encoding is not (a large batch with a tokenizer), encode the corpus
beforehand.

What has been handed out is one position of the stream. Saved and restored, each lane continues with its very next
token, also when rows, sequence length or number of ranks have changed.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Protocol, Self, TypeAlias

from penstock.base.errors import DataError
from penstock.data.batch import Batch
from penstock.data.packing import pack
from penstock.data.sources import Source
from penstock.data.stream import Cursor, Position, Stream

SavedPlace: TypeAlias = dict[str, int | list[int]]
"""A place in the data, and what it is a place in, as a checkpoint stores it."""

LANES = 32
"""Documents that a shuffled stream reads side by side; each lane keeps the one that it is in."""


class Batches(Protocol):
    """What training draws from: a Loader, or a Prefetch around one."""

    def next_batch(self) -> Batch:
        """Returns this rank's rows of the next global batch, on the CPU.

        Raises:
            DataError: a document cannot be read.
        """

    def state(self) -> SavedPlace:
        """Returns the place after the batch that was handed out last, and what it is a place in."""

    def restore(self, state: SavedPlace) -> None:
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
        lanes = min(LANES, len(source)) if shuffle else 1
        self._stream = Stream(source, seed=seed, shuffle=shuffle, lanes=lanes)
        self._identity = {"seed": seed, "shuffle": int(shuffle), "source": source.fingerprint}
        self._documents = len(source)
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

    def state(self) -> SavedPlace:
        """Returns the position, the tokens handed out to all ranks so far, and what tells these data from others.

        `epoch` and `place` are of the next document to be dealt; the three lists have one entry a lane.
        """
        undealt, lanes, rows = self._position
        return {
            "epoch": undealt.epoch,
            "place": undealt.place,
            "lane_epochs": [cursor.epoch for cursor in lanes],
            "lane_places": [cursor.place for cursor in lanes],
            "lane_offsets": [cursor.offset for cursor in lanes],
            "rows": rows,
            "tokens": self._tokens_handed_out,
            **self._identity,
        }

    def restore(self, state: SavedPlace) -> None:
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
        self._position, self._tokens_handed_out = self._saved_position(state), _number(state, "tokens")

    def _saved_position(self, state: SavedPlace) -> Position:
        """Returns the position in a state; an error if no stream over these documents can be there."""
        undealt = Cursor(_number(state, "epoch"), _number(state, "place"))
        columns = [_numbers(state, f"lane_{name}s", len(self._position.lanes)) for name in Cursor._fields]
        lanes = tuple(Cursor(*entries) for entries in zip(*columns, strict=True))
        dealt = {cursor[:2] for cursor in lanes}
        if max(cursor.place for cursor in (undealt, *lanes)) >= self._documents:
            raise _damaged(f"places in more than {self._documents} documents")
        if len(dealt) != len(lanes) or max(dealt) >= undealt[:2]:
            raise _damaged("a document dealt twice")
        return Position(undealt, lanes, _number(state, "rows"))

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

    def _start(self) -> Future[tuple[Batch, SavedPlace]]:
        return self._thread.submit(lambda: (self._loader.next_batch(), self._loader.state()))

    def next_batch(self) -> Batch:
        """Returns the batch that is ready, or waits for it, and starts the next.

        Raises:
            DataError: what the loader raised.
        """
        batch, self._state = self._ahead.result()
        self._ahead = self._start()
        return batch

    def state(self) -> SavedPlace:
        """Returns the loader's state after the batch that was handed out last."""
        return dict(self._state)

    def restore(self, state: SavedPlace) -> None:
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


def _number(state: SavedPlace, name: str) -> int:
    """Returns a whole number >= 0 of a state."""
    value = state[name]
    if not isinstance(value, int) or value < 0:
        raise _damaged(f"{name} {value}")
    return value


def _numbers(state: SavedPlace, name: str, count: int) -> list[int]:
    """Returns `count` whole numbers >= 0 of a state."""
    values = state[name]
    if not isinstance(values, list) or len(values) != count:
        raise _damaged(f"{name} {values}")
    return [_number({name: value}, name) for value in values]


def _damaged(got: str) -> DataError:
    return DataError("the saved place in the data is damaged", got=got)
