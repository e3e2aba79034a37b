"""Documents whose middle comes last."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.documents import USUAL_NAMES, FillInMiddle, find_marks
from penstock.data.loader import Loader
from penstock.data.mixture import Text, TextPart
from penstock.data.text import PlainText
from penstock.data.tokenizer_rules import Tokenizer
from tests.data.in_memory import MARKS, InShards, letters, loader_of

TEXT = "the quick brown fox jumps over the lazy dog"
PREFIX, SUFFIX, MIDDLE = 1, 2, 3  # ids of MARKS in `letters`


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return letters(tmp_path_factory.mktemp("tokenizer"))


def cutter(tokenizer: Tokenizer, *, rate: float = 1.0, spm: float = 0.5, seed: int = 0) -> FillInMiddle:
    return FillInMiddle(tokenizer, find_marks(tokenizer, "letters"), rate=rate, spm=spm, seed=seed)


def parts(tokenizer: Tokenizer, tokens: list[int]) -> dict[int, str]:
    """What stands behind each mark."""
    found: dict[int, list[int]] = {}
    for token in tokens:
        if token in (PREFIX, SUFFIX, MIDDLE):
            latest = found[token] = []
        else:
            latest.append(token)
    return {mark: "".join(chr(31 + token - 3) for token in inside) for mark, inside in found.items()}  # id 4 is a space


@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1), document=st.integers(0, 1000))
def test_no_character_is_lost_and_the_middle_comes_last(tokenizer: Tokenizer, text: str, document: int) -> None:
    psm = parts(tokenizer, cutter(tokenizer, spm=0.0).encode(text, (0, document)).tolist())
    assert list(psm) == [PREFIX, SUFFIX, MIDDLE]
    assert psm[PREFIX] + psm[MIDDLE] + psm[SUFFIX] == text
    spm = parts(tokenizer, cutter(tokenizer, spm=1.0).encode(text, (0, document)).tolist())
    assert list(spm) == [PREFIX, SUFFIX, MIDDLE]
    assert spm[PREFIX] == ""
    assert spm[MIDDLE] == psm[PREFIX] + psm[MIDDLE], "prefix and middle come in one piece, from the same cuts"
    assert spm[SUFFIX] == psm[SUFFIX]


def test_cuts_fall_everywhere_and_follow_from_seed_epoch_and_document(tokenizer: Tokenizer) -> None:
    one = cutter(tokenizer, spm=0.0)
    encoded = [one.encode(TEXT, (0, document)).tolist() for document in range(500)]
    assert encoded == [cutter(tokenizer, spm=0.0).encode(TEXT, (0, document)).tolist() for document in range(500)]
    assert encoded != [one.encode(TEXT, (1, document)).tolist() for document in range(500)]
    assert encoded != [cutter(tokenizer, seed=1).encode(TEXT, (0, document)).tolist() for document in range(500)]
    cuts = [parts(tokenizer, tokens) for tokens in encoded]
    places = {len(cut[PREFIX]) for cut in cuts} | {len(TEXT) - len(cut[SUFFIX]) for cut in cuts}
    assert places == set(range(len(TEXT) + 1))


@pytest.mark.parametrize(("rate", "spm"), [(0.3, 0.5), (0.9, 0.2), (0.0, 0.5)])
def test_rates_are_the_shares(tokenizer: Tokenizer, rate: float, spm: float) -> None:
    one = cutter(tokenizer, rate=rate, spm=spm)
    encoded = [one.encode(TEXT, (0, document)).tolist() for document in range(2000)]
    cut = [tokens for tokens in encoded if MIDDLE in tokens]
    assert abs(len(cut) / 2000 - rate) < 0.04
    if cut:
        assert abs(sum(tokens[:2] == [PREFIX, SUFFIX] for tokens in cut) / len(cut) - spm) < 0.05


def test_the_usual_names_are_found_and_others_can_be_given(tokenizer: Tokenizer) -> None:
    assert MARKS in USUAL_NAMES
    assert find_marks(tokenizer, "letters") == (PREFIX, SUFFIX, MIDDLE)
    assert find_marks(tokenizer, "letters", ("a", "b", "c")) == tuple(ord(name) - 31 + 3 for name in "abc")


def in_shards_of(tokenizer: Tokenizer, texts: list[str], block: int = 2) -> InShards:
    shards = InShards([texts], block=block)
    shards.tokenizer, shards.vocab_size = tokenizer, tokenizer.vocab_size
    shards.end_of_document = tokenizer.end_of_document
    return shards


@pytest.mark.parametrize("in_shards", [False, True])
def test_a_stream_cuts_documents_otherwise_in_each_epoch_and_resumes(
    tokenizer: Tokenizer, tmp_path: Path, in_shards: bool
) -> None:
    paths = [tmp_path / f"{number}.txt" for number in range(6)]
    for number, path in enumerate(paths):
        path.write_text(TEXT[: 20 + number])

    def loader() -> Loader:
        documents: PlainText | InShards = PlainText(paths, tokenizer)
        if in_shards:
            documents = in_shards_of(tokenizer, [path.read_text() for path in paths], block=4)
        text = Text((TextPart(documents=documents, middle=cutter(tokenizer, rate=0.7)),))
        return loader_of(text, rows=2, sequence_length=16)

    one = loader()
    batches, states = [], []
    for _ in range(40):
        states.append(one.state())
        batches.append(one.next_batch().tokens_BS.tolist())
    assert MIDDLE in [token for batch in batches for row in batch for token in row]
    for step in (0, 7, 23):
        other = loader()
        other.restore(states[step])
        assert [other.next_batch().tokens_BS.tolist() for _ in range(5)] == batches[step : step + 5]


def test_an_empty_document_stays_empty(tokenizer: Tokenizer) -> None:
    text = Text((TextPart(documents=in_shards_of(tokenizer, ["", "ab"]), middle=cutter(tokenizer)),))
    tokens = loader_of(text, rows=1, sequence_length=30).next_batch().tokens_BS[0].tolist()
    assert tokens.count(tokenizer.end_of_document) == 30 // 6, "three marks, two letters, one end"
