"""Packed documents as a source: one end each, the right tokenizer, bytes of text, splits."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.data import packed as packed_data
from penstock.data.evaluation import evaluation_batches
from penstock.data.indexed_dataset import IndexedDataset, PackedMetadata
from penstock.data.packed import PackedTokens, PackProgress, PackResult, open_packed, pack
from penstock.data.sources import RecordError, Source, SplitFilter
from penstock.data.stream import Stream
from penstock.data.tokenizer import ByteTokenizer, open_tokenizer
from tests.data.megatron_files import write_pair
from tests.data.vocabularies import HARD_TEXTS, json_file, tiktoken_file

ALL = SplitFilter()
END = 256
BYTES = PackedMetadata(
    tokenizer="bytes",
    fingerprint=ByteTokenizer.fingerprint,
    vocabulary_size=257,
    end_of_document=END,
    documents=1,
    tokens=1,
    text_bytes=1,
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
    source = opened(
        write(tmp_path_factory.mktemp("a") / "a", [*tokens, *[0] * ends], [7, 0], origin=None), end_of_document="0"
    )
    assert tokens_of(source) == [tokens, [7]]
    stream = Stream(source, seed=0, shuffle=False, lanes=1)
    rows, _ = stream.read(stream.start(), 1, 20)
    line = [*tokens, 0, 7, 0] if tokens else [7, 0]
    assert rows.tokens[0].tolist() == (line * 21)[:21]


def test_several_pairs_are_one_source_and_a_pair_counts_once(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [1, END], [2, END]), write(tmp_path / "b", [3, END], origin=None)
    source = opened(tmp_path / "a.bin", tmp_path / "a.idx", tmp_path / "b.idx")
    assert tokens_of(source) == [[1], [2], [3]]
    assert source.place(2) == f"{b}.bin, document 0"
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
    assert (
        opened(long, keep=SplitFilter("train", 0.1)).fingerprint
        != opened(long, keep=SplitFilter("validation", 0.1)).fingerprint
    )


def origin_of(tokenizer: Path) -> PackedMetadata:
    read = open_tokenizer(str(tokenizer))
    return replace(
        BYTES,
        tokenizer=str(tokenizer),
        fingerprint=read.fingerprint,
        vocabulary_size=read.vocab_size,
        end_of_document=read.end_of_document,
    )


def test_without_the_tokenizer_a_run_can_train_and_not_judge(tmp_path: Path) -> None:
    tokenizer = json_file(tmp_path / "tokenizer.json")
    prefix = write(tmp_path / "a", [5, 6, 0], origin=origin_of(tokenizer))
    tokenizer.unlink()
    source = opened(prefix)
    assert (tokens_of(source), source.end_of_document, source.vocab_size) == ([[5, 6]], 0, 283)
    with pytest.raises(
        DataError, match=r"bits per byte of .*a need the tokenizer .*; fix: .*, or evaluation\.rows to 0"
    ):
        evaluation_batches(source, rows=1, sequence_length=4, limit_rows=1, document_mask=False)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [5, 6, END])
    other = json_file(tmp_path / "tokenizer.json")
    with pytest.raises(
        DataError, match=r"a was packed with another tokenizer.*; got data.tokenizer .*, and bytes in a"
    ):
        opened(prefix, tokenizer=str(other))
    mixed = write(tmp_path / "b", [5, 6, 0], origin=origin_of(other))
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
    with pytest.raises(
        DataError, match=r"document 0 of .*a\.bin has an id outside the vocabulary; got 300; .*0 to 256"
    ):
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
    monkeypatch.setattr(packed_data, "BATCH_CHARACTERS", 100)


def test_what_was_packed_is_what_the_tokenizer_gives(tmp_path: Path) -> None:
    tokenizer = str(json_file(tmp_path / "tokenizer.json"))
    done = packed(tmp_path, *TEXTS, tokenizer=tokenizer)
    source = open_packed([tmp_path / "a"], keep=SplitFilter(), vocab_size=500)
    encode = open_tokenizer(tokenizer).encode
    wanted = [encode(text).tolist() for text in TEXTS if text]
    assert [source.read(number).tolist() for number in range(len(source))] == wanted
    assert [source.bytes_per_token(number).sum() for number in range(len(source))] == [
        len(text.encode()) for text in TEXTS if text
    ]
    origin = IndexedDataset(tmp_path / "a").origin()
    assert origin == done.origin
    assert (origin.documents, done.empty) == (len(wanted), TEXTS.count(""))
    assert origin.tokens == sum(map(len, wanted)) + len(wanted)
    assert origin.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_a_token_that_was_named_to_end_documents_need_not_be_named_again(tmp_path: Path) -> None:
    tokenizer = str(json_file(tmp_path / "tokenizer.json", special=["<|endoftext|>", "<stop>"]))
    packed(tmp_path, "the town", tokenizer=tokenizer, end_of_document="<stop>")
    for settings in ({}, {"tokenizer": tokenizer}, {"tokenizer": tokenizer, "end_of_document": "<stop>"}):
        source = open_packed([tmp_path / "a"], keep=SplitFilter(), vocab_size=500, **settings)
        assert (source.end_of_document, source.bytes_per_token(0).sum()) == (1, len("the town"))
    with pytest.raises(DataError, match="packed with another tokenizer, or another end of a document"):
        open_packed(
            [tmp_path / "a"],
            keep=SplitFilter(),
            vocab_size=500,
            tokenizer=tokenizer,
            end_of_document="<|endoftext|>",
        )


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


def test_a_corrupt_text_stops_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl:2 is not JSON"):
        packed(tmp_path, "a", None, "b")
    assert list(tmp_path.iterdir()) == []


def test_corrupt_texts_are_left_out_and_named(tmp_path: Path) -> None:
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
