"""Some documents of a text in shards, with numbers: what there is to judge by, where nobody can read at any place."""

from collections.abc import Iterator

from penstock.data.order import document_order
from penstock.data.shards import Shards
from penstock.data.sources import Tokens, fingerprint_of

_ORDER_SEED = 0


class Sample:
    """The first documents of many shards, a block of each in turn, until there are enough. They are held in memory."""

    def __init__(self, shards: Shards, *, documents: int, tokens: int, most_tokens: int) -> None:
        """Reads the documents.

        Args:
            shards: where they are.
            documents: as many are wanted, if the shards have them ...
            tokens: ... and as many tokens ...
            most_tokens: ... but no more than that, whatever is wanted.

        Raises:
            DataError: they cannot be read.
        """
        self._tokenizer = shards.tokenizer
        self._tokens: list[Tokens] = []
        self._texts: list[str] = []
        self.vocabulary_size = shards.vocabulary_size
        self.end_of_document = shards.end_of_document
        self.fingerprint = fingerprint_of(shards.fingerprint, documents, tokens, most_tokens)
        found = 0
        for text, encoded in _documents(shards):
            self._texts.append(text)
            self._tokens.append(encoded)
            found += len(encoded) + 1
            if found >= tokens and (len(self._texts) >= documents or found >= most_tokens):
                break

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._texts)

    def read(self, index: int) -> Tokens:
        """Returns the token ids of a document."""
        return self._tokens[index]

    def bytes_per_token(self, index: int) -> Tokens:
        """Returns the bytes of text behind each token of `read(index)`."""
        return self._tokenizer.bytes_per_token(self._texts[index])


def _documents(shards: Shards) -> Iterator[tuple[str, Tokens]]:
    """Yields texts with their tokens, a block of each shard in turn."""
    order = document_order(len(shards), seed=_ORDER_SEED, epoch=0).tolist()
    left = {shard: shards.blocks(shard, 0) for shard in order}
    number = 0
    while left:
        for shard, blocks in list(left.items()):
            block = next(blocks, None)
            if block is None:
                del left[shard]
                continue
            for inside, value in enumerate(block):
                text, tokens = shards.read(shard, number * shards.block + inside, value, shards.tokenizer.encode)
                if text:
                    yield text, tokens
        number += 1
