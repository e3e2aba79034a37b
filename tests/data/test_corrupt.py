"""Records that cannot be read: they stop the run, or are skipped, counted and named, and places stay what they are."""

import json
from pathlib import Path

import pytest
import torch

from penstock.base.errors import DataError
from penstock.data.documents import NAMED, CorruptRecords
from penstock.data.loader import Loader, Prefetch
from penstock.data.mixture import Text, TextPart
from penstock.data.sources import RecordError, SplitFilter
from penstock.data.text import JsonLines, PlainText
from penstock.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
BAD = (b'{"text": "caf\xe9"}', b'{"text": 3}', b"no json", b'{"text": "half \\ud800"}')


def corpus(path: Path, *, every: int = 3, documents: int = 40) -> list[Path]:
    """Good lines, and a bad one after every so many."""
    lines = []
    for number in range(documents):
        lines.append(json.dumps({"text": f"document {number} " * 3}).encode())
        if number % every == every - 1:
            lines.append(BAD[number // every % len(BAD)])
    path.write_bytes(b"\n".join(lines))
    return [path]


def test_skipped_lines_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    corrupt = CorruptRecords("skip")
    source = JsonLines(corpus(tmp_path / "c.jsonl"), BYTES, corrupt=corrupt)
    texts = [BYTES.decode(source.read(index)) for index in range(len(source))]
    assert [text for text in texts if text] == [f"document {number} " * 3 for number in range(40)]
    assert corrupt.skipped == 13
    notices = corrupt.take_notices()
    assert notices[:2] == (
        f"data: skipped a record: {tmp_path}/c.jsonl:4 is not UTF-8: invalid continuation byte at byte 13",
        f"data: skipped a record: {tmp_path}/c.jsonl:8: field 'text' is not text",
    )
    assert notices[NAMED:] == ("data: 10 records were skipped so far",)
    assert corrupt.take_notices() == ()


def test_a_line_that_is_not_utf8_stops_before_the_run_and_another_when_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"c\.jsonl:4 is not UTF-8"):
        JsonLines(corpus(tmp_path / "c.jsonl"), BYTES)
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "a"}\nno json')
    source = JsonLines([tmp_path / "c.jsonl"], BYTES)
    with pytest.raises(RecordError, match=r"c\.jsonl:2 is not JSON"):
        source.read(1)


def test_a_file_in_which_nothing_can_be_read_is_refused_also_where_records_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"body": "a"}\n' * 200)
    with pytest.raises(DataError, match=r"c\.jsonl:1 has no field 'text'; got 'body'; fix: set data\.text_field"):
        JsonLines([tmp_path / "c.jsonl"], BYTES, corrupt=CorruptRecords("skip"))
    (tmp_path / "c.jsonl").write_text('{"body": "a"}\n' * 20 + '{"text": "a"}\n')
    assert len(JsonLines([tmp_path / "c.jsonl"], BYTES, corrupt=CorruptRecords("skip"))) == 21


def test_a_file_of_plain_text_that_is_not_utf8_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    corrupt = CorruptRecords("skip")
    source = PlainText(files, BYTES, corrupt=corrupt)
    assert [len(source.read(index)) for index in range(2)] == [4, 0]
    assert corrupt.skipped == 1
    with pytest.raises(RecordError, match=r"b\.txt is not UTF-8"):
        PlainText(files, BYTES)


def loader_of(path: Path, *, rows: int = 4, rank: int = 0, ranks: int = 1) -> Loader:
    corrupt = CorruptRecords("skip")
    text = Text((TextPart(documents=JsonLines(corpus(path), BYTES, corrupt=corrupt)),), corrupt)
    return Loader(text, rows=rows, sequence_length=50, seed=0, document_mask=True, rank=rank, ranks=ranks)


def test_all_ranks_count_the_same_and_the_count_is_saved(tmp_path: Path) -> None:
    whole = loader_of(tmp_path / "c.jsonl")
    ranks = [loader_of(tmp_path / "c.jsonl", rank=rank, ranks=2) for rank in range(2)]
    for _ in range(12):
        rows = whole.next_batch().tokens_BS.tolist()
        assert [row for rank in ranks for row in rank.next_batch().tokens_BS.tolist()] == rows
        assert [rank.state() for rank in ranks] == [whole.state()] * 2
    assert whole.skipped() == whole.state()["skipped"] > 0
    resumed = loader_of(tmp_path / "c.jsonl")
    resumed.restore(whole.state())
    assert resumed.next_batch().tokens_BS.tolist() == whole.next_batch().tokens_BS.tolist()
    assert resumed.state() == whole.state()


def test_a_run_that_stopped_at_a_record_goes_on_without_it(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {number} " * 3}) for number in range(40)]
    lines[-1] = "no json"
    (tmp_path / "c.jsonl").write_text("\n".join(lines))

    def loader(corrupt: CorruptRecords) -> Loader:
        text = Text((TextPart(documents=JsonLines([tmp_path / "c.jsonl"], BYTES, corrupt=corrupt)),), corrupt)
        return Loader(text, rows=1, sequence_length=50, seed=0, document_mask=True, shuffle=False)

    stopping, whole = loader(CorruptRecords("stop")), loader(CorruptRecords("skip"))
    while whole.skipped() == 0:
        before = whole.state()
        expected = whole.next_batch().tokens_BS
        if whole.skipped() == 0:
            assert torch.equal(stopping.next_batch().tokens_BS, expected)
    with pytest.raises(RecordError, match=r"c\.jsonl:40 is not JSON"):
        stopping.next_batch()
    assert stopping.state() == before
    going_on = loader(CorruptRecords("skip"))
    going_on.restore(stopping.state())
    assert torch.equal(going_on.next_batch().tokens_BS, expected)
    assert going_on.skipped() == 1


def test_a_prefetched_loader_tells_what_was_handed_out(tmp_path: Path) -> None:
    plain = loader_of(tmp_path / "c.jsonl")
    told: list[str] = []
    with Prefetch(loader_of(tmp_path / "c.jsonl")) as prefetch:
        for _ in range(15):
            prefetch.next_batch()
            plain.next_batch()
            assert prefetch.skipped() == plain.skipped()
            told += prefetch.take_notices()
    assert told == list(plain.take_notices())


def test_documents_of_the_other_split_are_not_met(tmp_path: Path) -> None:
    corrupt = CorruptRecords("skip")
    sources = [
        JsonLines(corpus(tmp_path / "c.jsonl"), BYTES, keep=SplitFilter(split, 0.4), corrupt=corrupt)
        for split in ("train", "validation")
    ]
    for source in sources:
        for index in range(len(source)):
            source.read(index)
    assert corrupt.skipped == 13, "a corrupt line belongs to one split"
