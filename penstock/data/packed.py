"""Documents that were encoded beforehand: Megatron's `.bin/.idx` files, ours (`penstock data pack`) or others'.

Packed documents usually end with an end-of-document token already, some with none, depending on how they were made.
The stream adds one to each; so those at the end of a document are taken off here, and every document has exactly one.

Which tokenizer made the ids is known from the `.packed.json` that we write beside a pair. Other programs write none;
then `data.tokenizer` says it, or, without the tokenizer, `data.end_of_document` gives the id. Bits per byte of text
need the tokenizer itself: without it nothing can be judged on packed documents.

Training and held-out documents are told apart by a hash of a document's number in its file, not of its content, which
would have to be read first. The split stays the same when documents are appended, or files added or moved.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.indexed_dataset import IndexedDataset, PackedMetadata, prefix_of
from penstock.data.sources import DocumentPart, SplitFilter, Tokens, divided, fingerprint_of
from penstock.data.tokenizer import BYTES, Tokenizer, open_tokenizer


class PackedTokens:
    """The documents of one pair of files or more, in their order."""

    def __init__(
        self,
        pairs: Sequence[IndexedDataset],
        *,
        vocabulary_size: int,
        end_of_document: int,
        tokenizer: Tokenizer | None = None,
        documents: NDArray[np.int64] | None = None,
        stretch: DocumentPart | None = None,
    ) -> None:
        """Takes pairs that are open.

        Args:
            pairs: at least one.
            vocabulary_size: every id is below it; that is checked when a document is read.
            end_of_document: the id that ends documents, there and in the stream.
            tokenizer: what made the ids; without it their bytes cannot be told.
            documents: numbers of those that belong to this source, counted over all pairs; None means all.
            stretch: which part of each belongs to it; None takes them whole.
        """
        self.vocabulary_size = vocabulary_size
        self.end_of_document = end_of_document
        self.tokenizer = tokenizer
        self._pairs = pairs
        self._firsts = [0, *accumulate(len(pair) for pair in pairs)]
        self._documents = documents
        self._stretch = stretch
        chosen = b"" if documents is None else documents.tobytes()
        divided_as = [] if stretch is None else [stretch]
        self.fingerprint = fingerprint_of(*(pair.fingerprint() for pair in pairs), end_of_document, chosen, *divided_as)

    def __len__(self) -> int:
        """Number of documents."""
        return self._firsts[-1] if self._documents is None else len(self._documents)

    def read(self, index: int) -> Tokens:
        """Returns the ids of a document without its end, as they stand in the file; read-only.

        Raises:
            DataError: an id is outside the vocabulary.
        """
        pair, number = self._find(index)
        tokens = pair.document(number)
        stop = len(tokens)
        while stop > 0 and tokens[stop - 1] == self.end_of_document:
            stop -= 1
        tokens = tokens[:stop]
        if stop > 0:
            self._check_ids(tokens, f"document {number} of {pair.prefix}.bin")
        return tokens if self._stretch is None else self._stretch.of(tokens)

    def bytes_per_token(self, index: int) -> Tokens:
        """Returns the bytes of text behind each token of `read(index)`.

        Raises:
            DataError: the tokenizer is not known, or cannot tell.
        """
        if self.tokenizer is None:
            raise DataError(
                f"bits per byte of {self._pairs[0].prefix} need the tokenizer that packed it",
                fix="set data.tokenizer to it, or data.validation_files to text, or evaluation.rows to 0",
            )
        return self.tokenizer.bytes_of(self.read(index))

    def place(self, index: int) -> str:
        """Returns where a document stands, for people."""
        pair, number = self._find(index)
        return f"{pair.prefix}.bin, document {number}"

    def _check_ids(self, tokens: Tokens, place: str) -> None:
        """Refuses ids that no model of this vocabulary can embed."""
        highest = int(tokens.max())
        lowest = 0 if tokens.dtype.kind == "u" else int(tokens.min())
        if highest >= self.vocabulary_size or lowest < 0:
            raise DataError(
                f"{place} has an id outside the vocabulary",
                got=lowest if lowest < 0 else highest,
                allowed=f"0 to {self.vocabulary_size - 1}",
                fix="set data.tokenizer and model.vocab_size to what the file was packed with",
            )

    def _find(self, index: int) -> tuple[IndexedDataset, int]:
        """Returns the pair that a document is in, and its number there."""
        number = index if self._documents is None else int(self._documents[index])
        place = bisect_right(self._firsts, number) - 1
        return self._pairs[place], number - self._firsts[place]


def open_packed(
    paths: Sequence[Path],
    *,
    keep: SplitFilter,
    vocabulary_size: int,
    tokenizer: str = BYTES,
    end_of_document: str | None = None,
) -> PackedTokens:
    """Opens pairs of files as one source.

    Args:
        paths: prefixes of pairs, or either of their files; a pair that is named twice counts once.
        keep: which documents, by their numbers.
        vocabulary_size: of the model.
        tokenizer: setting `data.tokenizer`; "bytes", which is what it is if nobody sets it, takes the one that the
            files name.
        end_of_document: setting `data.end_of_document`: a token's name, or its id in digits.

    Raises:
        DataError: a file is missing, damaged or empty; the files were packed with different tokenizers, or with
            another one than is set; nobody says what their ids are; the ids do not fit the model.
    """
    pairs = [IndexedDataset(prefix) for prefix in dict.fromkeys(map(prefix_of, paths))]
    origin = _common_origin(pairs)
    opened = _open_fitting_tokenizer(pairs[0], origin, tokenizer, end_of_document)
    size, end = _meaning(pairs[0], origin, opened, end_of_document, vocabulary_size)
    if max(size, end + 1) > vocabulary_size:
        raise DataError(
            f"{pairs[0].prefix} has token ids outside the model's vocabulary",
            got=f"ids up to {max(size - 1, end)} and a vocabulary of {vocabulary_size}",
            fix=f"give the model a vocabulary of {max(size, end + 1)} or more",
        )
    kept = np.concatenate([keep.each(np.arange(len(pair))) for pair in pairs])
    stretch = divided(kept, keep)
    documents = np.flatnonzero(kept) if keep.split is not None and stretch is None else None
    return PackedTokens(
        pairs, vocabulary_size=size, end_of_document=end, tokenizer=opened, documents=documents, stretch=stretch
    )


def _common_origin(pairs: Sequence[IndexedDataset]) -> PackedMetadata | None:
    """Returns what the pairs say of their tokens; one that says nothing is taken to be like the others."""
    origins = [(pair, origin) for pair in pairs if (origin := pair.origin()) is not None]
    for pair, origin in origins:
        if origin.fingerprint != origins[0][1].fingerprint:
            raise DataError(
                f"{pair.prefix} and {origins[0][0].prefix} were packed with different tokenizers",
                got=f"{origin.tokenizer} and {origins[0][1].tokenizer}",
                fix="pack both with one tokenizer",
            )
    return origins[0][1] if origins else None


def _open_fitting_tokenizer(
    pair: IndexedDataset, origin: PackedMetadata | None, tokenizer: str, end_of_document: str | None
) -> Tokenizer | None:
    """Returns the tokenizer that made the ids, None if it is not at hand."""
    name = None if end_of_document is not None and end_of_document.isdecimal() else end_of_document
    if origin is None:
        return None if tokenizer == BYTES else open_tokenizer(tokenizer, name)
    if tokenizer == BYTES:
        return _tokenizer_of(origin)
    opened = open_tokenizer(tokenizer, name or origin.end_of_document_name)
    if origin.fingerprint != opened.fingerprint:
        raise DataError(
            f"{pair.prefix} was packed with another tokenizer, or another end of a document",
            got=f"data.tokenizer {tokenizer}, and {origin.tokenizer} in {pair.prefix.name}.packed.json",
            fix="set data.tokenizer and data.end_of_document to those of the file, or pack the text again",
        )
    return opened


def _tokenizer_of(origin: PackedMetadata) -> Tokenizer | None:
    """Returns the tokenizer that was used, if it is still where it was, and the same."""
    try:
        opened = open_tokenizer(origin.tokenizer, origin.end_of_document_name)
    except DataError:
        return None
    return opened if opened.fingerprint == origin.fingerprint else None


def _meaning(
    pair: IndexedDataset,
    origin: PackedMetadata | None,
    tokenizer: Tokenizer | None,
    end_of_document: str | None,
    vocabulary_size: int,
) -> tuple[int, int]:
    """Returns the size of the vocabulary and the id that ends documents, by whoever knows them."""
    stated = int(end_of_document) if end_of_document is not None and end_of_document.isdecimal() else None
    if tokenizer is not None:
        return tokenizer.vocabulary_size, tokenizer.end_of_document if stated is None else stated
    if origin is not None:
        return origin.vocabulary_size, origin.end_of_document if stated is None else stated
    if stated is not None:
        return vocabulary_size, stated
    raise DataError(
        f"nothing says what the ids of {pair.prefix} are",
        fix="set data.tokenizer to what packed them, or data.end_of_document to the id that ends a document",
    )
