"""Documents made from a seed: a kind that nothing can be learned from, and a kind that a small model soon learns.

`RandomTokens` measures speed: all of the vocabulary, evenly. `MarkovTokens` shows that learning works, and how far it
is from the best possible: its entropy is known.

A document is a function of (seed, split, number), so that nothing is stored. Only raw output of the PCG64 generator is
used: NumPy promises that it never changes, which it does not for the distributions built on top.

There is no text behind the tokens. One byte a token is claimed, so that "bits per byte" reads as bits per token.
"""

from abc import ABC, abstractmethod

import numpy as np
from numpy.random import PCG64
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.sources import Split, Tokens, fingerprint_of

DOCUMENTS: dict[Split, int] = {"train": 1_000_000, "validation": 1_000}
"""Documents of each split."""

LONGEST = 1023
"""Tokens of the longest document; lengths are even over 1..LONGEST, 512 in the mean."""


class SyntheticTokens(ABC):
    """Documents of random length. Subclasses say which tokens; the vocabulary's last id ends a document."""

    _smallest_vocabulary = 2

    def __init__(self, split: Split, *, vocabulary_size: int, seed: int) -> None:
        """Takes the model's vocabulary and the seed of the run; the two splits share no document.

        Raises:
            DataError: the vocabulary is too small.
        """
        if vocabulary_size < self._smallest_vocabulary:
            raise DataError(
                "the model's vocabulary is too small for synthetic data",
                got=vocabulary_size,
                allowed=f">= {self._smallest_vocabulary}",
            )
        self.vocabulary_size = vocabulary_size
        self.end_of_document = vocabulary_size - 1
        self.fingerprint = fingerprint_of(type(self).__name__, split, vocabulary_size, seed)
        self._documents = DOCUMENTS[split]
        self._key = (seed, list(DOCUMENTS).index(split))

    def __len__(self) -> int:
        """Number of documents."""
        return self._documents

    def read(self, index: int) -> Tokens:
        """Returns the tokens of a document, int64."""
        raw = PCG64([*self._key, index])
        return self._tokens(raw.random_raw(1 + int(raw.random_raw()) % LONGEST))

    def bytes_per_token(self, index: int) -> Tokens:
        """Returns a one for each token."""
        return np.ones(len(self.read(index)), dtype=np.int64)

    @abstractmethod
    def _tokens(self, draws: NDArray[np.uint64]) -> Tokens:
        """Returns as many tokens as there are random numbers."""


class RandomTokens(SyntheticTokens):
    """Tokens drawn evenly from the vocabulary: log2(vocabulary - 1) bits each, and no model can do better."""

    def _tokens(self, draws: NDArray[np.uint64]) -> Tokens:
        return (draws % np.uint64(self.end_of_document)).astype(np.int64)


class MarkovTokens(SyntheticTokens):
    """A sparse order-2 Markov chain over 32 symbols (or the vocabulary, if that is smaller).

    Any two symbols in a row may be followed by 4 symbols only, with chances 1/2, 1/4, 1/8 and 1/8. Given the two before
    it, a symbol has 1.75 bits (1.213 nats) of entropy. A model that sees only one symbol back cannot tell the 4: it
    must attend to learn. Untrained, a symbol costs log2(vocabulary) bits; with symbol frequencies alone, about 5.

    Two more things cost a perfect model something: the first two symbols of a document (5 bits each) and where it ends
    (10 bits). Over a mean document of 512 symbols that is 0.03 bits a token.
    """

    ENTROPY_BITS = 1.75
    SYMBOLS = 32
    CHOICES = 4
    _smallest_vocabulary = CHOICES + 1

    def __init__(self, split: Split, *, vocabulary_size: int, seed: int) -> None:
        """Draws the table of followers from the seed alone: both splits speak the same language."""
        super().__init__(split, vocabulary_size=vocabulary_size, seed=seed)
        symbols = self._symbols = min(self.SYMBOLS, self.end_of_document)
        draws = PCG64([seed, len(DOCUMENTS)]).random_raw(symbols * symbols * symbols)
        # The order of random numbers is a random order: its first entries are distinct symbols, each as likely.
        followers = np.argsort(draws.reshape(symbols * symbols, symbols), axis=1, kind="stable")[:, : self.CHOICES]
        self._followers: list[list[int]] = followers.tolist()

    def _tokens(self, draws: NDArray[np.uint64]) -> Tokens:
        # Of eight even chances, four fall on the first follower, two on the second, one on each of the others.
        choices = np.array([0, 0, 0, 0, 1, 1, 2, 3])[draws % np.uint64(8)].tolist()
        tokens: list[int] = (draws[:2] % np.uint64(self._symbols)).tolist()
        for choice in choices[2:]:
            tokens.append(self._followers[tokens[-2] * self._symbols + tokens[-1]][choice])
        return np.array(tokens, dtype=np.int64)
