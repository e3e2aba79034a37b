"""All documents of a source, without end, dealt to lanes one by one (see `lanes`).

Each epoch has an order of its own, which follows from (seed, epoch) alone (see `order`); without shuffling documents
come by number.
"""

from penstock.data.documents import TextDocuments
from penstock.data.fill_in_middle import FillInMiddle
from penstock.data.lanes import Cursor, LaneStream, with_end
from penstock.data.order import Order, order_of
from penstock.data.sources import Source, Tokens, fingerprint_of


class Stream(LaneStream):
    """Reads the rows of a source. It keeps the latest document of each lane and the latest orders."""

    def __init__(
        self, source: Source, *, seed: int, shuffle: bool, lanes: int, middle: FillInMiddle | None = None
    ) -> None:
        """Takes the documents, the seed (>= 0) of their order, and whether they are put in that order at all.

        Args:
            source: the documents.
            seed: of their order, >= 0.
            shuffle: put them in that order; else they come by number.
            lanes: documents that are read side by side, 1 to the number of documents.
            middle: encodes documents in place of the source, which must have text; None reads them as they are.
        """
        super().__init__(units=len(source), lanes=lanes, counted=f"{len(source)} documents")
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._middle = middle
        self.vocabulary_size = source.vocabulary_size
        self.fingerprint = (
            source.fingerprint if middle is None else fingerprint_of(source.fingerprint, middle.fingerprint)
        )
        self._latest_orders: dict[int, Order] = {}
        self._latest_documents: dict[int, tuple[int, int, Tokens]] = {}

    def document(self, lane: int, cursor: Cursor) -> Tokens:
        """Returns the document that a cursor stands in; the latest of each lane is kept."""
        if lane in self._latest_documents:
            epoch, place, tokens = self._latest_documents[lane]
            if (epoch, place) == (cursor.epoch, cursor.place):
                return tokens
        index = self._order(cursor.epoch)[cursor.place] if self._shuffle else cursor.place
        tokens = with_end(self._read(index, cursor.epoch), self._source.end_of_document, self.vocabulary_size)
        self._latest_documents[lane] = cursor.epoch, cursor.place, tokens
        return tokens

    def following(self, lane: int, cursor: Cursor) -> Cursor | None:
        """Returns None: each document is dealt."""
        return None

    def _read(self, index: int, epoch: int) -> Tokens:
        if self._middle is None:
            return self._source.read(index)
        middle = self._middle
        assert isinstance(self._source, TextDocuments), "only text can be cut"
        return self._source.encoded(index, lambda text: middle.encode(text, (epoch, index)))

    def _order(self, epoch: int) -> Order:
        """Returns the order of an epoch; the latest two are kept, for lanes that resume at the turn of an epoch."""
        if epoch not in self._latest_orders:
            if len(self._latest_orders) == 2:
                del self._latest_orders[min(self._latest_orders)]
            self._latest_orders[epoch] = order_of(self._source, seed=self._seed, epoch=epoch)
        return self._latest_orders[epoch]
