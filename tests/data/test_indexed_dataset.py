"""Pairs of files: read as Megatron writes them, written as Megatron reads them, refused when damaged."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, PackedMetadata, prefix_of
from tests.data.megatron_files import TYPES, write_pair

ORIGIN = PackedMetadata(
    tokenizer="bytes",
    fingerprint=7,
    vocabulary_size=257,
    end_of_document=256,
    documents=2,
    tokens=5,
    text_bytes=3,
    left_out=("corpus.jsonl:3 is not JSON",),
)
SEQUENCES = st.lists(st.lists(st.integers(0, 127), max_size=5), min_size=1, max_size=4)


def documents_of(pair: IndexedDataset) -> list[list[int]]:
    return [pair.document(number).tolist() for number in range(len(pair))]


@pytest.mark.parametrize("code", TYPES)
@given(documents=st.lists(SEQUENCES, min_size=1, max_size=5).filter(lambda chosen: any(map(any, chosen))))
def test_what_megatron_wrote_is_read(tmp_path_factory: pytest.TempPathFactory, code: int, documents: list) -> None:
    pair = IndexedDataset(write_pair(tmp_path_factory.mktemp("pair") / "a.b", documents, code))
    assert documents_of(pair) == [[token for sequence in document for token in sequence] for document in documents]


def test_ids_of_every_type_keep_their_value(tmp_path: Path) -> None:
    largest = {1: 255, 2: 127, 3: 2**15 - 1, 4: 2**31 - 1, 5: 2**40, 6: 2**40, 7: 2**20, 8: 2**16 - 1}
    for code, token in largest.items():
        tokens = IndexedDataset(write_pair(tmp_path / f"{code}", [[[token, 0]]], code)).document(0)
        assert tokens.tolist() == [token, 0]
        assert np.issubdtype(tokens.dtype, np.integer)


@pytest.mark.parametrize(
    ("vocabulary", "name"), [(257, "uint16"), (65499, "uint16"), (65500, "int32"), (200_000, "int32")]
)
def test_what_is_written_is_what_megatron_would_have_written(tmp_path: Path, vocabulary: int, name: str) -> None:
    documents = [[1, 2, 256], [256], [*range(200), 256]]
    with IndexedDatasetWriter(tmp_path / "folder" / "ours", vocabulary) as writer:
        assert writer.type == np.dtype(name)
        for part in (documents[:1], documents[1:]):
            writer.write(np.concatenate(part), np.array([len(document) for document in part]))
        writer.finish(ORIGIN)
    write_pair(tmp_path / "theirs", [[document] for document in documents], {"uint16": 8, "int32": 4}[name])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"folder/ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()
    pair = IndexedDataset(tmp_path / "folder" / "ours")
    assert documents_of(pair) == documents
    assert pair.origin() == ORIGIN


def write_some(prefix: Path, then: Callable[[IndexedDatasetWriter], None]) -> None:
    with IndexedDatasetWriter(prefix, 300) as writer:
        writer.write(np.array([1, 2]), np.array([2]))
        assert [path.name[0] for path in prefix.parent.iterdir()] == ["."]
        then(writer)


def interrupt(writer: IndexedDatasetWriter) -> None:
    raise KeyboardInterrupt


def fill_the_disk(writer: IndexedDatasetWriter) -> None:
    class Full:
        def write(self, content: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    writer._content.close()
    writer._content = Full()
    writer.write(np.array([1, 2]), np.array([2]))


def test_nothing_is_there_before_all_is_written(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_some(tmp_path / "a", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot write .*a\.bin: No space left"):
        write_some(tmp_path / "a", fill_the_disk)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".packed.json"])
def test_a_pair_that_is_there_is_not_written_over(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a{suffix}").write_text("mine")
    with pytest.raises(DataError, match=f"a{suffix} is there already; fix: give another name, or remove it"):
        IndexedDatasetWriter(tmp_path / "a", 300)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write .*: (Not a directory|File exists)"):
        IndexedDatasetWriter(tmp_path / "file" / "a", 300)


def test_an_index_may_leave_sequences_out_and_order_them_anew(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2]], [[3]], [[4, 5, 6]]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[34:46] = struct.pack("<3i", 3, 2, 0)
    index[46:70] = struct.pack("<3q", 6, 0, 0)
    (tmp_path / "a.idx").write_bytes(index)
    assert documents_of(IndexedDataset(prefix)) == [[4, 5, 6], [1, 2], []]


def test_fingerprints_follow_tokens_and_bounds_and_not_names(tmp_path: Path) -> None:
    base = IndexedDataset(write_pair(tmp_path / "a", [[[1, 2]], [[3]]])).fingerprint()
    assert IndexedDataset(write_pair(tmp_path / "b", [[[1, 2]], [[3]]])).fingerprint() == base
    others = [[[[1, 2]], [[4]]], [[[1]], [[2, 3]]], [[[1, 2], [3]]], [[[1, 2]], [[3]], [[]]]]
    assert len({base, *(IndexedDataset(write_pair(tmp_path / "c", other)).fingerprint() for other in others)}) == 5


@pytest.mark.parametrize("name", ["a.b", "a.b.bin", "a.b.idx", "a.b.packed.json"])
def test_a_pair_is_found_by_any_of_its_names(name: str) -> None:
    assert prefix_of(Path("folder") / name) == Path("folder/a.b")


HEADER = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1)
DAMAGED = [
    (b"", r"a\.idx is empty"),
    (b"MMIDIDX\x00", r"a\.idx is no index of packed tokens; allowed: an \.idx file as Megatron writes it"),
    (b"TNTIDX\x00\x00" * 20, "is no index of packed tokens"),
    (HEADER[:-8] + struct.pack("<QBQQ", 2, 8, 0, 0), "is of another version; got version 2, type 8"),
    (HEADER + struct.pack("<BQQ", 9, 0, 0), "is of another version; got version 1, type 9"),
    (HEADER + struct.pack("<BQQ", 8, 3, 2), "it is damaged or cut; got 34 bytes where 86 belong"),
    (HEADER + struct.pack("<BQQ", 8, 2**60, 2**60), "it is damaged or cut"),
    (HEADER + struct.pack("<BQQq", 8, 0, 1, 0), r"a\.idx holds no document; fix: take it out"),
    (HEADER + struct.pack("<BQQiqqq", 8, 1, 2, 9, 0, 0, 1), r"not of one pair, or cut; got sequences outside .*a\.bin"),
    (HEADER + struct.pack("<BQQiqqq", 8, 1, 2, -1, 0, 0, 1), "sequences outside"),
    (HEADER + struct.pack("<BQQiqqq", 8, 1, 2, 1, -2, 0, 1), "sequences outside"),
    (HEADER + struct.pack("<BQQiqqq", 8, 1, 2, 1, 0, 0, 2), "got documents that do not follow each other"),
    (HEADER + struct.pack("<BQQiqqqq", 8, 1, 3, 1, 0, 0, 2, 1), "got documents that do not follow each other"),
    (HEADER + struct.pack("<BQQiqqqb", 8, 1, 2, 1, 0, 0, 1, 0), "is of images and text; only text can be read"),
]


@pytest.mark.parametrize(("index", "message"), DAMAGED)
def test_a_damaged_index_is_refused_in_one_line(tmp_path: Path, index: bytes, message: str) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2]], [[3]]])
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_a_pair_is_refused(tmp_path: Path, suffix: str) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2]]])
    (tmp_path / f"a{suffix}").unlink()
    with pytest.raises(DataError, match=rf"cannot read data file .*a\{suffix}: No such file or directory; fix: give"):
        IndexedDataset(prefix)


def test_numbers_with_fractions_are_no_tokens(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [[[1.5]]], 7)
    with pytest.raises(DataError, match=r"document 0 of .*a\.bin is no tokens: its numbers have fractions"):
        IndexedDataset(prefix).document(0)


@pytest.mark.parametrize("content", ["{", "[]", "{}", json.dumps({"tokenizer": "bytes", "colour": 1})])
def test_a_damaged_description_is_refused(tmp_path: Path, content: str) -> None:
    pair = IndexedDataset(write_pair(tmp_path / "a", [[[1, 2]]]))
    assert pair.origin() is None
    (tmp_path / "a.packed.json").write_text(content)
    with pytest.raises(DataError, match=r"a\.packed\.json does not describe packed tokens"):
        pair.origin()
