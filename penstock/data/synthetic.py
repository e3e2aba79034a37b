"""Synthetic documents: random tokens, and a Markov chain that a small model soon learns.

`RandomTokens` measures speed: the whole vocabulary, uniformly, with nothing to learn. `MarkovTokens` shows that
learning works, and its entropy is known.

A document is a function of (seed, split, number); nothing is stored. Only raw PCG64 output is used: NumPy guarantees
that it never changes, unlike the distributions on top.

Tokens have no text. Each counts as one byte, so that "bits per byte" means bits per token.
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
"""Tokens of the longest document; lengths are uniform over 1..LONGEST, 512 on average."""


class SyntheticTokens(ABC):
    """Documents of random length. Subclasses choose the tokens; the vocabulary's last id ends a document.

    The splits share no document. Raises a DataError if the vocabulary is too small.
    """

    _smallest_vocabulary = 2

    def __init__(self, split: Split, *, vocab_size: int, seed: int) -> None:
        if vocab_size < self._smallest_vocabulary:
            allowed = f">= {self._smallest_vocabulary}"
            raise DataError("the model's vocabulary is too small for synthetic data", got=vocab_size, allowed=allowed)
        self.vocab_size = vocab_size
        self.end_of_document = vocab_size - 1
        self.fingerprint = fingerprint_of(type(self).__name__, split, vocab_size, seed)
        self._documents = DOCUMENTS[split]
        self._key = (seed, list(DOCUMENTS).index(split))

    def __len__(self) -> int:
        return self._documents

    def read(self, index: int) -> Tokens:
        """Returns the tokens of a document, int64."""
        raw = PCG64([*self._key, index])
        return self._tokens(raw.random_raw(1 + raw.random_raw() % LONGEST))  # the first number is the length

    def bytes_per_token(self, index: int) -> Tokens:
        return np.ones(len(self.read(index)), dtype=np.int64)

    @abstractmethod
    def _tokens(self, draws: NDArray[np.uint64]) -> Tokens:
        """Returns as many tokens as there are random numbers."""


class RandomTokens(SyntheticTokens):
    """Uniform tokens: log2(vocabulary - 1) bits each, and no model can do better."""

    def _tokens(self, draws: NDArray[np.uint64]) -> Tokens:
        return (draws % np.uint64(self.end_of_document)).astype(np.int64)


class MarkovTokens(SyntheticTokens):
    """A sparse order-2 Markov chain over 32 symbols (or the vocabulary, if that is smaller).

    Each pair of symbols has 4 possible successors, with probabilities 1/2, 1/4, 1/8 and 1/8: 1.75 bits (1.213 nats) of
    entropy per symbol. A model that sees only one symbol back cannot tell the 4: it must attend to learn. Untrained, a
    symbol costs log2(vocabulary) bits; with symbol frequencies alone, about 5.

    A perfect model also pays for the first two symbols of a document (5 bits each) and for its end (10 bits): 0.03 bits
    per token over a mean document of 512 symbols.
    """

    ENTROPY_BITS = 1.75
    SYMBOLS = 32
    CHOICES = 4
    _smallest_vocabulary = CHOICES + 1

    def __init__(self, split: Split, *, vocab_size: int, seed: int) -> None:
        super().__init__(split, vocab_size=vocab_size, seed=seed)
        symbols = self._symbols = min(self.SYMBOLS, self.end_of_document)
        # One chain for both splits: the second key is none of theirs.
        draws = PCG64([seed, len(DOCUMENTS)]).random_raw(symbols * symbols * symbols)
        # The order of random numbers is a random order: its first entries are distinct symbols, each as likely.
        followers = np.argsort(draws.reshape(symbols * symbols, symbols), axis=1, kind="stable")[:, : self.CHOICES]
        self._followers: list[list[int]] = followers.tolist()  # of the pair (a, b), at a * symbols + b

    def _tokens(self, draws: NDArray[np.uint64]) -> Tokens:
        # Of eight even chances, four fall on the first follower, two on the second, one on each of the others.
        choices = np.array([0, 0, 0, 0, 1, 1, 2, 3])[draws % np.uint64(8)].tolist()
        tokens: list[int] = (draws[:2] % np.uint64(self._symbols)).tolist()
        for choice in choices[2:]:
            tokens.append(self._followers[tokens[-2] * self._symbols + tokens[-1]][choice])
        return np.array(tokens, dtype=np.int64)
