"""Packed documents as a source: one end each, the right tokenizer, bytes of text, splits."""

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.child import Child, ChildEndedError
from penstock.base.errors import DataError
from penstock.data import packed as packed_data
from penstock.data.documents import CorruptRecords
from penstock.data.evaluation import evaluation_batches
from penstock.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, PackedMetadata, origin_of, prefix_of
from penstock.data.packed import PackedTokens, PackProgress, PackResult, open_packed, pack
from penstock.data.sources import RecordError, Source, SplitFilter
from penstock.data.stream import Stream
from penstock.data.tokenizer import ByteTokenizer, open_tokenizer
from tests.data.vocabularies import HARD_TEXTS, json_file, tiktoken_file

TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""NumPy's type of each code."""

Documents = Sequence[Sequence[Sequence[int]]]
"""Each a list of sequences, each a list of ids."""


def write_pair(prefix: Path, documents: Documents, code: int = 8) -> Path:
    """Write PREFIX.bin and PREFIX.idx as Megatron-LM does, from the description of the format alone."""
    width = np.dtype(TYPES[code]).itemsize  # bytes of an id
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    starts = [width * sum(lengths[:place]) for place in range(len(sequences))]  # bytes
    bounds = [sum(map(len, documents[:place])) for place in range(len(documents) + 1)]  # sequences before each document
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(sequences), len(bounds))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(starts)}q", *starts)
    index += struct.pack(f"<{len(bounds)}q", *bounds)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    content = b"".join(np.array(sequence, dtype=TYPES[code]).tobytes() for sequence in sequences)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(content)
    return prefix


ALL = SplitFilter()
END = 256
COUNTS = {"documents": 1, "tokens": 1, "text_bytes": 1}
BYTES = PackedMetadata(
    tokenizer="bytes", fingerprint=ByteTokenizer.fingerprint, vocabulary_size=257, end_of_document=END, **COUNTS
)


def write(prefix: Path, *documents: list[int], origin: PackedMetadata | None = BYTES) -> Path:
    write_pair(prefix, [[document] for document in documents])
    if origin is not None:
        prefix.with_name(f"{prefix.name}.packed.json").write_text(json.dumps(asdict(origin)))
    return prefix


def opened(*prefixes: Path, keep: SplitFilter = ALL, vocabulary: int = 1000, **settings: str) -> PackedTokens:
    return open_packed(prefixes, keep=keep, vocab_size=vocabulary, **settings)


def tokens_of(source: Source) -> list[list[int]]:
    return [source.read(number).tolist() for number in range(len(source))]


@given(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 3))
def test_every_document_has_one_end_in_the_stream(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], ends: int
) -> None:
    while tokens and tokens[-1] == 0:
        tokens.pop()
    prefix = write(tmp_path_factory.mktemp("a") / "a", [*tokens, *[0] * ends], [7, 0], origin=None)
    source = opened(prefix, end_of_document="0")
    assert tokens_of(source) == [tokens, [7]]
    stream = Stream(source, seed=0, shuffle=False, lanes=1)
    rows, _ = stream.read(stream.start(), 1, 20)
    line = [*tokens, 0, 7, 0] if tokens else [7, 0]
    assert rows.tokens[0].tolist() == (line * 21)[:21]


def test_several_pairs_are_one_source_and_a_pair_counts_once(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [1, END], [2, END]), write(tmp_path / "b", [3, END], origin=None)
    source = opened(tmp_path / "a.bin", tmp_path / "a.idx", tmp_path / "b.idx")
    assert tokens_of(source) == [[1], [2], [3]]
    assert source.fingerprint == opened(a, b).fingerprint != opened(b, a).fingerprint


def test_splits_share_no_document_and_stay_when_documents_are_appended(tmp_path: Path) -> None:
    documents = [[number % 200, number // 200, END] for number in range(1000)]
    short, long = write(tmp_path / "short", *documents[:600]), write(tmp_path / "long", *documents)
    found = {
        (prefix, split): tokens_of(opened(prefix, keep=SplitFilter(split, 0.1)))
        for prefix in (short, long)
        for split in ("train", "validation")
    }
    assert sorted(found[long, "train"] + found[long, "validation"]) == sorted(document[:-1] for document in documents)
    assert 60 <= len(found[long, "validation"]) <= 140
    kept = found[short, "validation"]
    assert found[long, "validation"][: len(kept)] == kept
    train, held_out = (opened(long, keep=SplitFilter(split, 0.1)) for split in ("train", "validation"))
    assert train.fingerprint != held_out.fingerprint


def metadata_of(tokenizer: Path) -> PackedMetadata:
    read = open_tokenizer(str(tokenizer))
    ids = {"vocabulary_size": read.vocab_size, "end_of_document": read.end_of_document}
    return replace(BYTES, tokenizer=str(tokenizer), fingerprint=read.fingerprint, **ids)


def test_without_the_tokenizer_a_run_can_train_and_not_judge(tmp_path: Path) -> None:
    tokenizer = json_file(tmp_path / "tokenizer.json")
    prefix = write(tmp_path / "a", [5, 6, 0], origin=metadata_of(tokenizer))
    tokenizer.unlink()
    source = opened(prefix)
    assert (tokens_of(source), source.end_of_document, source.vocab_size) == ([[5, 6]], 0, 283)
    told = r"bits per byte of .*a need the tokenizer .*; fix: .*, or evaluation\.rows to 0"
    with pytest.raises(DataError, match=told):
        evaluation_batches(source, rows=1, sequence_length=4, limit_rows=1, document_mask=False)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [5, 6, END])
    other = json_file(tmp_path / "tokenizer.json")
    told = r"a was packed with another tokenizer.*; got data.tokenizer .*, and bytes in a"
    with pytest.raises(DataError, match=told):
        opened(prefix, tokenizer=str(other))
    mixed = write(tmp_path / "b", [5, 6, 0], origin=metadata_of(other))
    with pytest.raises(DataError, match=r"b and .*a were packed with different tokenizers; got .*json and bytes"):
        opened(prefix, mixed)


def test_files_of_others_need_a_tokenizer_or_the_id_that_ends_documents(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [5, 6, 0], origin=None)
    with pytest.raises(DataError, match=r"no tokenizer is known for the ids of .*a; fix: set data\.tokenizer"):
        opened(prefix)
    tokenizer = json_file(tmp_path / "tokenizer.json")
    named = opened(prefix, tokenizer=str(tokenizer))
    assert (tokens_of(named), named.vocab_size) == ([[5, 6]], 283)
    assert named.bytes_per_token(0).tolist() == [1, 1]
    stated = opened(prefix, end_of_document="6")
    assert (tokens_of(stated), stated.vocab_size, stated.tokenizer) == ([[5, 6, 0]], 1000, None)


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [5, 300, END])
    with pytest.raises(DataError, match="outside the model's vocabulary; got ids up to 256 and a vocabulary of 200"):
        opened(prefix, vocabulary=200)
    told = r"document 0 of .*a\.bin has an id outside the vocabulary; got 300; .*0 to 256"
    with pytest.raises(DataError, match=told):
        opened(prefix).read(0)
    negative = write_pair(tmp_path / "b", [[[5, -1]]], 4)
    with pytest.raises(DataError, match="outside the vocabulary; got -1"):
        opened(negative, end_of_document="0").read(0)


def test_tokens_are_judged_by_the_same_bytes_as_their_text(tmp_path: Path) -> None:
    texts = ["the penstock feeds the turbine", "\u4e16\u754c \U0001f600", "a"]
    tokenizer = json_file(tmp_path / "tokenizer.json")
    read = open_tokenizer(str(tokenizer))
    prefix = write(tmp_path / "a", *([*read.encode(text).tolist(), 0] for text in texts), origin=None)
    source = opened(prefix, tokenizer=str(tokenizer))
    judged = evaluation_batches(source, rows=1, sequence_length=8, limit_rows=100, document_mask=False)
    first = int(np.argmax(judged.batches[0].tokens_BS.numpy() >= 0))
    unpredicted = int(source.tokenizer.bytes_of(judged.batches[0].tokens_BS.numpy()[0, first : first + 1])[0])
    assert judged.text_bytes == sum(len(text.encode()) for text in texts) - unpredicted


TEXTS = [*HARD_TEXTS, *(f"document {number} " * (number % 7) for number in range(60))]


@dataclass(frozen=True)
class InMemory:
    """Texts in a list; None stands for one that cannot be read."""

    texts: tuple[str | None, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def record(self, index: int) -> str:
        text = self.texts[index]
        if text is None:
            raise RecordError(f"corpus.jsonl:{index + 1} is not JSON")
        return text


def packed(folder: Path, *texts: str | None, **settings: object) -> PackResult:
    return pack(InMemory(texts), folder / "a", **{"tokenizer": "bytes", **settings})


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_data, "BATCH_CHARACTERS", 100)  # several batches in a few texts


def test_what_was_packed_is_what_the_tokenizer_gives(tmp_path: Path) -> None:
    tokenizer = str(json_file(tmp_path / "tokenizer.json"))
    done = packed(tmp_path, *TEXTS, tokenizer=tokenizer)
    source = opened(tmp_path / "a")
    encode = open_tokenizer(tokenizer).encode
    wanted = [encode(text).tolist() for text in TEXTS if text]
    assert tokens_of(source) == wanted
    sizes = [source.bytes_per_token(number).sum() for number in range(len(source))]
    assert sizes == [len(text.encode()) for text in TEXTS if text]
    origin = origin_of(tmp_path / "a")
    assert origin == done.origin
    assert (origin.documents, done.empty) == (len(wanted), TEXTS.count(""))
    assert origin.tokens == sum(map(len, wanted)) + len(wanted)
    assert origin.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_a_token_that_was_named_to_end_documents_need_not_be_named_again(tmp_path: Path) -> None:
    tokenizer = str(json_file(tmp_path / "tokenizer.json", special=["<|endoftext|>", "<stop>"]))
    packed(tmp_path, "the town", tokenizer=tokenizer, end_of_document="<stop>")
    for settings in ({}, {"tokenizer": tokenizer}, {"tokenizer": tokenizer, "end_of_document": "<stop>"}):
        source = opened(tmp_path / "a", **settings)
        assert (source.end_of_document, source.bytes_per_token(0).sum()) == (1, len("the town"))
    with pytest.raises(DataError, match="packed with another tokenizer, or another end of a document"):
        opened(tmp_path / "a", tokenizer=tokenizer, end_of_document="<|endoftext|>")


@pytest.mark.usefixtures("small_batches")
def test_the_files_are_the_same_for_any_number_of_processes(tmp_path: Path) -> None:
    tokenizer = str(json_file(tmp_path / "tokenizer.json"))
    texts = [*TEXTS[:9], None, *TEXTS[9:], None]
    for processes in (1, 3):
        packed(tmp_path / f"{processes}", *texts, tokenizer=tokenizer, processes=processes, skip_corrupt=True)
    for suffix in (".bin", ".idx", ".packed.json"):
        assert (tmp_path / f"1/a{suffix}").read_bytes() == (tmp_path / f"3/a{suffix}").read_bytes()


@pytest.mark.usefixtures("small_batches")
def test_progress_adds_up(tmp_path: Path) -> None:
    reports: list[PackProgress] = []
    done = packed(tmp_path, *TEXTS, report=reports.append)
    assert len(reports) > 3
    assert np.sum(reports, axis=0).tolist() == [len(TEXTS), done.origin.tokens, done.origin.text_bytes]


def test_a_corrupt_text_stops_and_leaves_nothing_or_is_left_out_and_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl:2 is not JSON"):
        packed(tmp_path, "a", None, "b")
    assert list(tmp_path.iterdir()) == []
    done = packed(tmp_path, "a", None, "b", None, skip_corrupt=True)
    assert done.origin.left_out == ("corpus.jsonl:2 is not JSON", "corpus.jsonl:4 is not JSON")
    assert (done.origin.documents, done.empty) == (2, 0)


def test_a_text_that_cannot_be_encoded_is_corrupt(tmp_path: Path) -> None:
    tokenizer = f"{tiktoken_file(tmp_path / 'r.tiktoken')}:llama3"
    texts = ["a", None, " " * 2_000_000 + "a", "b"]
    done = packed(tmp_path, *texts, tokenizer=tokenizer, skip_corrupt=True)
    assert [fault.split(":")[0] for fault in done.origin.left_out] == ["corpus.jsonl", "document 2"]
    with pytest.raises(DataError, match="document 1: tiktoken cannot split a text"):
        packed(tmp_path / "b", texts[0], texts[2], tokenizer=tokenizer)


@pytest.mark.parametrize("texts", [(), ("", ""), (None,)])
def test_nothing_to_pack_is_an_error(tmp_path: Path, texts: tuple[str | None, ...]) -> None:
    with pytest.raises(DataError, match=r"there is nothing to pack; got \d empty and \d corrupt documents"):
        packed(tmp_path, *texts, skip_corrupt=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("processes", [1, 2])
def test_an_interruption_leaves_nothing_and_no_process(tmp_path: Path, processes: int) -> None:
    def interrupt(done: PackProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed(tmp_path, *TEXTS, processes=processes, report=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("small_batches")
def test_the_end_of_a_process_that_encodes_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(self: Child, request: object) -> object:
        raise ChildEndedError("was ended by SIGKILL")

    monkeypatch.setattr(Child, "ask", end)
    with pytest.raises(DataError, match="a process that encodes was ended by SIGKILL; fix: take fewer processes"):
        packed(tmp_path, *TEXTS, processes=2)
    assert list(tmp_path.iterdir()) == []


ORIGIN = replace(BYTES, documents=2, tokens=5, text_bytes=3, left_out=("corpus.jsonl:3 is not JSON",))
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
    assert origin_of(pair.prefix) == ORIGIN


def write_until(error: BaseException, prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, 300) as writer:
        writer.write(np.array([1, 2]), np.array([2]))
        assert [path.name[0] for path in prefix.parent.iterdir()] == ["."], "nothing is there before all is written"
        writer._content.close()
        writer._content = Mock(write=Mock(side_effect=error))
        writer.write(np.array([1, 2]), np.array([2]))


def test_a_full_disk_or_an_interruption_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot write .*a\.bin; got No space left"):
        write_until(OSError(28, "No space left on device"), tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        write_until(KeyboardInterrupt(), tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".packed.json"])
def test_a_pair_that_is_there_is_not_written_over(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a{suffix}").write_text("mine")
    with pytest.raises(DataError, match=f"a{suffix} is there already; fix: give another name, or remove it"):
        IndexedDatasetWriter(tmp_path / "a", 300)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write .*; got (Not a directory|File exists)"):
        IndexedDatasetWriter(tmp_path / "file" / "a", 300)


def test_an_index_may_leave_sequences_out_and_order_them_anew(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2]], [[3]], [[4, 5, 6]]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[34:46] = struct.pack("<3i", 3, 2, 0)  # lengths, in tokens
    index[46:70] = struct.pack("<3q", 6, 0, 0)  # first bytes in a.bin; ids have 2 bytes
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
    (HEADER + struct.pack("<BQQiq", 8, 1, 0, 1, 0), "got documents that do not follow each other"),
    (HEADER + struct.pack("<BQQiqqq", 8, 1, 2, 9, 0, 0, 1), r"not of one pair, or cut; got sequences outside .*a\.bin"),
    (HEADER + struct.pack("<BQQiqqq", 8, 1, 2, -1, 0, 0, 1), "sequences outside"),
    (HEADER + struct.pack("<BQQiqqq", 8, 1, 2, 1, -2, 0, 1), "sequences outside"),
    (HEADER + struct.pack("<BQQiqqq", 8, 1, 2, 1, 0, 0, 2), "got documents that do not follow each other"),
    (HEADER + struct.pack("<BQQiqqqq", 8, 1, 3, 1, 0, 0, 2, 1), "got documents that do not follow each other"),
    (HEADER + struct.pack("<BQQiqqqb", 8, 1, 2, 1, 0, 0, 1, 1), "is of images and text; only text can be read"),
]


@pytest.mark.parametrize(("index", "message"), DAMAGED)
def test_a_damaged_index_is_refused(tmp_path: Path, index: bytes, message: str) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2]], [[3]]])
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix)


def test_an_index_without_documents_or_with_modes_and_bytes_behind_the_last_sequence_are_read(tmp_path: Path) -> None:
    documents = [[1, 2], [3], [4, 5, 6]]
    write(tmp_path / "plain", *documents, origin=None)
    plain = (tmp_path / "plain.idx").read_bytes()
    # Code of the type, sequences, bounds; then lengths, first bytes, and of the bounds only the first.
    unmerged = HEADER + struct.pack("<BQQ", 8, 3, 1) + plain[34 : 34 + 12 * 3] + bytes(8)
    notes = {
        "unmerged": [f"data: {tmp_path}/unmerged.idx names no document: each of its 3 sequences is read as one"],
        "modes": [],
        "behind": [f"data: {tmp_path}/behind.bin has 5 bytes behind its last sequence, which are not read"],
    }
    for name, index in {"unmerged": unmerged, "modes": plain + bytes(3), "behind": plain}.items():
        content = (tmp_path / "plain.bin").read_bytes() + (bytes(5) if name == "behind" else b"")
        (tmp_path / f"{name}.bin").write_bytes(content)
        (tmp_path / f"{name}.idx").write_bytes(index)
        corrupt = CorruptRecords()
        source = open_packed([tmp_path / name], keep=ALL, vocab_size=1000, end_of_document="9", corrupt=corrupt)
        assert tokens_of(source) == documents
        assert corrupt.take_notices() == tuple(notes[name])


def test_an_empty_pair_is_left_out_and_a_pipe_is_refused(tmp_path: Path) -> None:
    names = ("a", "empty", "none")
    write(tmp_path / "a", [1, 2])
    (tmp_path / "empty.idx").touch()
    (tmp_path / "none.idx").write_bytes(HEADER + struct.pack("<BQQq", 8, 0, 1, 0))
    (tmp_path / "none.bin").touch()
    corrupt = CorruptRecords()
    source = open_packed([tmp_path / name for name in names], keep=ALL, vocab_size=1000, corrupt=corrupt)
    assert tokens_of(source) == [[1, 2]]
    assert corrupt.take_notices() == (f"data: {tmp_path}/empty is empty and left out, and 1 other file too",)
    (tmp_path / "a.bin").unlink()
    os.mkfifo(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"cannot read data file .*a\.bin: it is a pipe or a device, no file"):
        opened(tmp_path / "a")


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
    assert origin_of(pair.prefix) is None
    (tmp_path / "a.packed.json").write_text(content)
    with pytest.raises(DataError, match=r"a\.packed\.json does not describe packed tokens"):
        origin_of(pair.prefix)
