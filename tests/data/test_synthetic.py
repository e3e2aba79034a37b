"""Documents made from a seed: stable, within the vocabulary, and of the entropy that is claimed."""

from collections import Counter
from math import log2

import numpy as np
import pytest

from penstock.base.errors import DataError
from penstock.data.sources import Split
from penstock.data.synthetic import LONGEST, MarkovTokens, RandomTokens, SyntheticTokens

KINDS = [RandomTokens, MarkovTokens]


def make(kind: type[SyntheticTokens], *, vocab_size: int = 257, seed: int = 1) -> SyntheticTokens:
    return kind("train", vocab_size=vocab_size, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_depend_on_seed_split_and_number_alone(kind: type[SyntheticTokens]) -> None:
    source = make(kind)
    first = source.read(5).tolist()
    source.read(6)
    assert source.read(5).tolist() == first == make(kind).read(5).tolist()
    others = [make(kind, seed=2), kind("validation", vocab_size=257, seed=1)]
    assert all(other.read(5).tolist() != first for other in others)
    assert len({source.fingerprint, *(other.fingerprint for other in others)}) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab_size", [5, 33, 257, 129_280])
def test_tokens_are_in_the_vocabulary_and_never_the_end(kind: type[SyntheticTokens], vocab_size: int) -> None:
    source = make(kind, vocab_size=vocab_size)
    tokens = np.concatenate([source.read(index) for index in range(20)])
    assert tokens.min() >= 0
    assert tokens.max() < source.end_of_document == vocab_size - 1


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_are_even_over_their_range(kind: type[SyntheticTokens]) -> None:
    source = make(kind)
    lengths = [len(source.read(index)) for index in range(300)]
    assert 1 <= min(lengths) < 50
    assert LONGEST - 50 < max(lengths) <= LONGEST
    assert 460 < sum(lengths) / 300 < 560  # the mean of 1..1023 is 512
    assert source.bytes_per_token(7).tolist() == [1] * lengths[7]


@pytest.mark.parametrize("seen", [1, 2])
def test_the_learnable_language_has_its_stated_entropy_only_after_two_symbols(seen: int) -> None:
    source = make(MarkovTokens)
    followers: dict[tuple[int, ...], Counter[int]] = {}
    for index in range(1000):
        tokens = source.read(index).tolist()
        for *before, symbol in zip(*(tokens[start:] for start in range(seen + 1)), strict=False):
            followers.setdefault(tuple(before), Counter())[symbol] += 1
    total = sum(counts.total() for counts in followers.values())
    bits = sum(count * log2(counts.total() / count) for counts in followers.values() for count in counts.values())
    if seen == 1:
        assert bits / total > 4  # one symbol back says little: 5 bits are those of 32 even symbols
    else:
        assert max(map(len, followers.values())) == MarkovTokens.CHOICES
        assert bits / total == pytest.approx(MarkovTokens.ENTROPY_BITS, abs=0.02)


def test_both_splits_speak_the_same_language() -> None:
    def triples(split: Split, documents: int) -> set[tuple[int, ...]]:
        source = MarkovTokens(split, vocab_size=257, seed=1)
        read = (source.read(index).tolist() for index in range(documents))
        return {triple for tokens in read for triple in zip(tokens, tokens[1:], tokens[2:], strict=False)}

    assert triples("validation", 5) <= triples("train", 1000)


@pytest.mark.parametrize(("kind", "least"), [(RandomTokens, 2), (MarkovTokens, 5)])
def test_a_vocabulary_that_is_too_small_is_refused(kind: type[SyntheticTokens], least: int) -> None:
    make(kind, vocab_size=least).read(0)
    with pytest.raises(DataError, match=f"too small for synthetic data; got {least - 1}; allowed: >= {least}"):
        make(kind, vocab_size=least - 1)
