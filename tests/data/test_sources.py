"""The split by hash, and fingerprints."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.data.sources import DocumentPart, SplitFilter, fingerprint_of, in_split


@given(st.binary(), st.floats(0, 0.99))
def test_a_document_is_in_one_split_exactly(key: bytes, share: float) -> None:
    assert in_split("train", key, share) != in_split("validation", key, share)


def test_the_split_is_the_same_forever() -> None:
    held_out = [number for number in range(100) if in_split("validation", str(number).encode(), 0.05)]
    assert held_out == [29, 72, 90, 99], "a change of the hash moves held-out text into training"


def test_the_share_is_met_and_a_larger_share_only_adds() -> None:
    keys = [str(number).encode() for number in range(4000)]
    small = {key for key in keys if in_split("validation", key, 0.05)}
    large = {key for key in keys if in_split("validation", key, 0.2)}
    assert small < large
    assert 150 < len(small) < 250
    assert not any(in_split("validation", key, 0.0) for key in keys)


def test_fingerprints_fit_an_int64_and_see_where_parts_end() -> None:
    assert 0 <= fingerprint_of("x") < 2**56
    assert fingerprint_of(b"ab", b"c") != fingerprint_of(b"a", b"bc")
    assert fingerprint_of(1, "a") == fingerprint_of(1, "a")


def test_fingerprints_of_split_settings_never_change() -> None:
    """Checkpoints hold them: names of classes have no part in them."""
    parts = SplitFilter("train", 0.05).identity(), DocumentPart("validation", 0.05).identity()
    assert fingerprint_of(*parts) == 48966791030401258
