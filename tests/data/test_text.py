"""Text files: where documents are in them, plain text and JSON Lines, whole and damaged."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.data import text
from penstock.data.documents import NAMED, CorruptPolicy, CorruptRecords
from penstock.data.loader import Loader, Prefetch
from penstock.data.mixture import Text, TextPart
from penstock.data.sources import RecordError, SplitFilter
from penstock.data.text import JsonLines, PlainText, lines_in, require_utf8
from penstock.data.tokenizer import ByteTokenizer
from tests.data.in_memory import loader_of

pieces = st.lists(st.sampled_from([b"a", b"bc ", b"\n", b"\r\n", b"\t", b" ", b"\x0b", "\u4e16".encode(), b"      "]))


@given(pieces.map(b"".join), st.integers(1, 9))
def test_lines_are_those_that_python_finds_whatever_the_size_of_blocks(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, block: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "_BLOCK", block)
        found = [entry for part in lines_in(path, path, require_utf8) for entry in zip(*part, strict=True)]
    wanted, start = [], 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        stripped = line.rstrip()
        if stripped:
            wanted.append((number, start, len(stripped), crc32(stripped)))
        start += len(line) + 1
    assert found == wanted


BYTES = ByteTokenizer()
BOTH = [PlainText, JsonLines]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def texts(source: PlainText | JsonLines) -> list[str]:
    return [BYTES.decode(source.read(index)) for index in range(len(source))]


def test_a_plain_file_is_one_document_as_it_is(tmp_path: Path) -> None:
    contents = ["one\r\ntwo\n", "\ufeffgr\u00fc\u00dfe \u4e16\u754c", " "]
    files = [write(tmp_path / f"{number}.txt", content) for number, content in enumerate(contents)]
    source = PlainText(files, BYTES)
    assert texts(source) == contents
    assert [source.bytes_per_token(index).sum() for index in range(3)] == [len(text.encode()) for text in contents]
    assert (source.vocab_size, source.end_of_document) == (257, 256)


UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(UNICODE), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_json_lines_give_their_texts_in_order(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[str], ascii_only: bool, end: str
) -> None:
    wanted = ["first", *wanted]
    lines = end.join(json.dumps({"id": 1, "text": text}, ensure_ascii=ascii_only) for text in wanted)
    path = write(tmp_path_factory.mktemp("lines") / "corpus.jsonl", lines)
    source = JsonLines([path, path], BYTES)
    assert texts(source) == wanted * 2


def test_json_lines_can_be_read_in_any_order_and_from_another_field(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", '\n  {"body": "a"}\n\n{"body": "\\u4e16"}  \n{"body": ""}')
    source = JsonLines([path], BYTES, text_field="body")
    assert [source.record(index) for index in (2, 0, 1)] == ["", "a", "\u4e16"]
    marked = write(tmp_path / "marked.jsonl", b'\xef\xbb\xbf{"text": "a"}')
    assert texts(JsonLines([marked], BYTES)) == ["a"], "a byte-order mark is dropped"


def test_fingerprints_follow_content_and_order_and_not_names(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", "one"), write(tmp_path / "b", "two")
    moved = write(tmp_path / "elsewhere", "one")
    joined = write(tmp_path / "joined", "onetwo")
    base = PlainText([a, b], BYTES).fingerprint
    assert PlainText([moved, b], BYTES).fingerprint == base
    assert PlainText([b, a], BYTES).fingerprint != base
    assert PlainText([joined], BYTES).fingerprint != base


@pytest.mark.parametrize(
    ("kinds", "content", "message"),
    [
        (BOTH, None, "cannot read data file .*corpus: No such file or directory; fix: correct data.files"),
        (BOTH, b"", "data file .*corpus is empty; fix: take it out of data.files"),
        (
            BOTH,
            b'{"text": "\xe9"}',
            r"corpus(:1)? is not UTF-8: invalid continuation byte at byte 10; got 0xe9; fix: conv",
        ),
        ([JsonLines], b"\n \r\n\n", "is empty"),
        ([JsonLines], b'{"text": "a"}\n\n{"text": "\xff"}\n', "corpus:3 is not UTF-8: invalid start byte at byte 10"),
        ([JsonLines], b'{"text": "a"}\n\xe4\xb8', "corpus:2 is not UTF-8: unexpected end of data"),
    ],
)
def test_files_without_text_are_refused_when_opened(
    tmp_path: Path, kinds: list[type[PlainText] | type[JsonLines]], content: bytes | None, message: str
) -> None:
    path = tmp_path / "corpus"
    if content is not None:
        write(path, content)
    for kind in kinds:
        with pytest.raises(DataError, match=message):
            kind([path], BYTES)
    with pytest.raises(DataError, match=r"cannot read data file .*: Is a directory"):
        PlainText([tmp_path], BYTES)


@pytest.mark.parametrize("kind", [PlainText, JsonLines])
def test_an_empty_file_among_others_is_left_out_with_a_note(
    tmp_path: Path, kind: type[PlainText] | type[JsonLines]
) -> None:
    files = [write(tmp_path / name, text) for name, text in {"a": "", "b": '{"text": "b"}', "c": ""}.items()]
    corrupt = CorruptRecords()
    assert len(kind(files, BYTES, corrupt=corrupt)) == 1
    assert corrupt.take_notices() == (f"data: {tmp_path}/a is empty and left out, and 1 other file too",)


BAD_LINES = [
    ('{"text": "a"', "is not JSON: Expecting ',' delimiter.*; allowed: one JSON object a line"),
    ("[" * 100_000, "is not JSON: .*recursion"),
    ('{"text": ' + "1" * 5000 + "}", "is not JSON: .*digits"),
    ('["a"]', "is not a JSON object; got list; allowed: one JSON object a line"),
    ('{"body": "a", "id": 1}', "has no field 'text'; got 'body', 'id'; fix: set data.text_field"),
    ("{}", "has no field 'text'; got no field"),
    ('{"text": null}', "field 'text' is not text; got NoneType"),
    ('{"text": "\\ud800"}', "field 'text' holds half of a surrogate pair"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_first_line_is_refused_when_opened_and_another_when_read(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=r"corpus:2:? " + message):
        JsonLines([write(tmp_path / "corpus", f"\n{line}\n")], BYTES)
    source = JsonLines([write(tmp_path / "corpus", '{"text": "a"}\n\n{"text": "b"}\n' + line)], BYTES)
    assert source.record(1) == "b"
    with pytest.raises(DataError, match=r"corpus:4:? " + message):
        source.read(2)


def test_a_file_that_changes_while_in_use_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus", "some text")
    source = PlainText([path], BYTES)
    write(path, "some")
    with pytest.raises(DataError, match="corpus became shorter while it was in use"):
        source.read(0)
    path.unlink()
    with pytest.raises(DataError, match="cannot read data file"):
        source.read(0)


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
    assert corrupt.skipped == 13  # 40 documents, a bad line after every third
    notices = corrupt.take_notices()
    assert notices[:2] == (
        f"data: skipped a record: {tmp_path}/c.jsonl:4 is not UTF-8: invalid continuation byte at byte 13",
        f"data: skipped a record: {tmp_path}/c.jsonl:8: field 'text' is not text",
    )
    assert notices[NAMED:] == ("data: 10 records were skipped so far",)
    assert corrupt.take_notices() == ()


def test_a_file_in_which_nothing_can_be_read_is_refused_also_where_records_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"body": "a"}\n' * 200)
    with pytest.raises(DataError, match=r"c\.jsonl:1 has no field 'text'; got 'body'; fix: set data\.text_field"):
        JsonLines([tmp_path / "c.jsonl"], BYTES, corrupt=CorruptRecords("skip"))
    (tmp_path / "c.jsonl").write_text('{"body": "a"}\n' * 20 + '{"text": "a"}\n')
    assert len(JsonLines([tmp_path / "c.jsonl"], BYTES, corrupt=CorruptRecords("skip"))) == 21


def test_a_file_of_plain_text_that_is_not_utf8_is_skipped(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.txt", "good"), write(tmp_path / "b.txt", b"caf\xe9")]
    corrupt = CorruptRecords("skip")
    source = PlainText(files, BYTES, corrupt=corrupt)
    assert [len(source.read(index)) for index in range(2)] == [4, 0]
    assert corrupt.skipped == 1
    with pytest.raises(RecordError, match=r"b\.txt is not UTF-8"):
        PlainText(files, BYTES)


def lines_loader(files: list[Path], policy: CorruptPolicy = "skip", **changes: Any) -> Loader:
    corrupt = CorruptRecords(policy)
    text = Text((TextPart(documents=JsonLines(files, BYTES, corrupt=corrupt)),), corrupt)
    return loader_of(text, sequence_length=50, **changes)


def test_all_ranks_count_the_same_and_the_count_is_saved(tmp_path: Path) -> None:
    files = corpus(tmp_path / "c.jsonl")
    whole = lines_loader(files)
    ranks = [lines_loader(files, rank=rank, ranks=2) for rank in range(2)]
    for _ in range(12):
        rows = whole.next_batch().tokens_BS.tolist()
        assert [row for rank in ranks for row in rank.next_batch().tokens_BS.tolist()] == rows
        assert [rank.state() for rank in ranks] == [whole.state()] * 2
    assert whole.skipped() == whole.state()["skipped"] > 0
    resumed = lines_loader(files)
    resumed.restore(whole.state())
    assert resumed.next_batch().tokens_BS.tolist() == whole.next_batch().tokens_BS.tolist()
    assert resumed.state() == whole.state()


def test_a_run_that_stopped_at_a_record_goes_on_without_it(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"document {number} " * 3}) for number in range(40)]
    lines[-1] = "no json"
    files = [write(tmp_path / "c.jsonl", "\n".join(lines))]
    stopping, whole, going_on = (
        lines_loader(files, policy, rows=1, shuffle=False) for policy in ("stop", "skip", "skip")
    )
    while whole.skipped() == 0:
        before = whole.state()
        expected = whole.next_batch().tokens_BS
        if whole.skipped() == 0:
            assert torch.equal(stopping.next_batch().tokens_BS, expected)
    with pytest.raises(RecordError, match=r"c\.jsonl:40 is not JSON"):
        stopping.next_batch()
    assert stopping.state() == before
    going_on.restore(stopping.state())
    assert torch.equal(going_on.next_batch().tokens_BS, expected)
    assert going_on.skipped() == 1


def test_a_prefetched_loader_tells_what_was_handed_out(tmp_path: Path) -> None:
    files = corpus(tmp_path / "c.jsonl")
    plain, told = lines_loader(files), list[str]()
    with closing(Prefetch(lines_loader(files))) as prefetch:
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
