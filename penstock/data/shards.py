"""Text without random access, in shards that are read front to back: a dataset that stays on the network.

A lane gets a shard (see `stream`) and reads it to its end. With shuffling, shards come in random order, and a shard's
documents in blocks of neighbours, each block in random order. Both orders follow from the seed: a position is the
number of a shard and of a document in it, and no buffer is saved. To resume, the shard is opened and read up to the
block of that document, without encoding.

A shuffle buffer, which draws one document whenever another arrives, mixes equally far, but its content depends on all
draws before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.data.documents import NO_TOKENS, CorruptRecords, FillInMiddle, checked_text
from penstock.data.sources import SplitFilter, Tokens, document_order, fingerprint_of, permutation
from penstock.data.stream import Cursor, LaneStream, with_end
from penstock.data.tokenizer_rules import Tokenizer


class Shards(ABC):
    """Text documents in shards, of which `block` neighbours are read and shuffled together. Subclasses read them.

    `content` is a fingerprint of all documents, as far as it is known.
    """

    def __init__(
        self, tokenizer: Tokenizer, content: int, *, block: int, corrupt: CorruptRecords, keep: SplitFilter
    ) -> None:
        self.tokenizer = tokenizer
        self.block = block
        self.corrupt = corrupt
        self.keep = keep
        self.vocab_size = tokenizer.vocab_size
        self.end_of_document = tokenizer.end_of_document
        self.fingerprint = fingerprint_of(content, tokenizer.fingerprint, keep.identity(), block)

    @abstractmethod
    def __len__(self) -> int:
        """Number of shards, at least 1."""

    @abstractmethod
    def blocks(self, shard: int, first: int) -> Iterator[Sequence[object]]:
        """Yields the records of a shard in blocks, only the last of which may be shorter; or raises a DataError."""

    @abstractmethod
    def place(self, shard: int, document: int) -> str:
        """Returns the place of a document for messages."""

    def read(self, shard: int, document: int, value: object, encode: Callable[[str], Tokens]) -> tuple[str, Tokens]:
        """Returns text and tokens of a record of `blocks`; none if it is skipped or belongs to the other split."""

        def read() -> tuple[str, Tokens]:
            text = checked_text(value, self.place(shard, document))
            return (text, encode(text)) if text and self.keep.document(text) else ("", NO_TOKENS)

        return self.corrupt.read_or_skip(read, ("", NO_TOKENS))


@dataclass
class _Reader:
    """The shard of a lane, and its current block."""

    epoch: int
    place: int  # of the shard in the order of the epoch
    shard: int
    blocks: Iterator[Sequence[object]]  # the blocks behind the current one
    number: int  # of the current block
    block: Sequence[object]
    order: Sequence[int]  # in which the documents of the block are read


class ShardStream(LaneStream):
    """Rows of shards. It caches each lane's current block. Args as for `LaneStream`."""

    saved = ("epoch", "place", "offset", "document")

    def __init__(
        self, shards: Shards, *, seed: int, shuffle: bool, lanes: int, middle: FillInMiddle | None = None
    ) -> None:
        super().__init__(shards, "shards", seed=seed, shuffle=shuffle, lanes=lanes, middle=middle)
        self._shards = shards
        self._readers: dict[int, _Reader] = {}  # by lane

    def following(self, lane: int, cursor: Cursor) -> Cursor | None:
        """Returns the start of the next document of the shard, None at its end."""
        following = cursor._replace(document=cursor.document + 1, offset=0)
        return following if self._has(lane, following) else None

    def _has(self, lane: int, cursor: Cursor) -> bool:
        return cursor.document % self._shards.block < len(self._reader(lane, cursor).block)

    def read_document(self, lane: int, cursor: Cursor) -> Tokens:
        """Returns the document of a cursor, its end token included; nothing of a shard without documents."""
        if not self._has(lane, cursor):
            return NO_TOKENS
        reader = self._reader(lane, cursor)
        inside = reader.order[cursor.document % self._shards.block]
        document = reader.number * self._shards.block + inside  # its number in the shard
        encode = self._shards.tokenizer.encode
        if self._middle is not None:
            encode = partial(self._middle.encode, document=(cursor.epoch, reader.shard, document))
        _, tokens = self._shards.read(reader.shard, document, reader.block[inside], encode)
        return with_end(tokens, self._shards.end_of_document, self.vocab_size)

    def _reader(self, lane: int, cursor: Cursor) -> _Reader:
        number = cursor.document // self._shards.block
        reader = self._readers.get(lane)
        is_same = reader is not None and (reader.epoch, reader.place) == (cursor.epoch, cursor.place)
        if reader is None or not is_same or number not in (reader.number, reader.number + 1):
            reader = self._readers[lane] = self._open(cursor, number)  # after a resume, or for the lane's next shard
        if reader.number != number:
            del self._readers[lane]  # after an error its iterator has ended, and the next call opens another
            block = next(reader.blocks, ())  # empty at the end of the shard
            order = list(range(len(block)))
            if self._shuffle:
                order = permutation(len(block), [self._seed, cursor.epoch, reader.shard, number + 1]).tolist()
            reader.number, reader.block, reader.order = number, block, order
            self._readers[lane] = reader
        return reader

    def _open(self, cursor: Cursor, number: int) -> _Reader:
        """Returns a reader before the block of that number."""
        order = document_order(len(self._shards), seed=self._seed, epoch=cursor.epoch) if self._shuffle else None
        shard = cursor.place if order is None else int(order[cursor.place])
        blocks = self._shards.blocks(shard, number)
        return _Reader(cursor.epoch, cursor.place, shard, blocks, number - 1, (), ())
