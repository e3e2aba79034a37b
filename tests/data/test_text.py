"""Text files: where documents are in them, plain text and JSON Lines, whole and damaged."""

import json
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.data import text
from penstock.data.text import JsonLines, PlainText, lines_in, require_utf8
from penstock.data.tokenizer import ByteTokenizer

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


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n"])
)
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \r\n\n", "is empty"),
        (b'{"text": "a"}\n\n{"text": "\xff"}\n', "corpus:3 is not UTF-8: invalid start byte at byte 10; got 0xff"),
        (b'{"text": "a"}\n\xe4\xb8', "corpus:2 is not UTF-8: unexpected end of data"),
    ],
)
def test_json_lines_without_text_are_refused_when_opened(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        JsonLines([write(tmp_path / "corpus", content)], BYTES)
    with pytest.raises(DataError, match=r"cannot read data file .*: Is a directory"):
        PlainText([tmp_path], BYTES)


def test_fingerprints_follow_content_and_order_and_not_names(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", "one"), write(tmp_path / "b", "two")
    moved = write(tmp_path / "elsewhere", "one")
    joined = write(tmp_path / "joined", "onetwo")
    base = PlainText([a, b], BYTES).fingerprint
    assert PlainText([moved, b], BYTES).fingerprint == base
    assert PlainText([b, a], BYTES).fingerprint != base
    assert PlainText([joined], BYTES).fingerprint != base


@pytest.mark.parametrize("kind", [PlainText, JsonLines])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read data file .*corpus: No such file or directory; fix: correct data.files"),
        (b"", "data file .*corpus is empty; fix: take it out of data.files"),
        (
            b'{"text": "caf\xe9"}',
            r"corpus(:1)? is not UTF-8: invalid continuation byte at byte 13; got 0xe9; fix: convert it to UTF-8",
        ),
    ],
)
def test_files_without_text_are_refused_when_opened(
    tmp_path: Path, kind: type[PlainText] | type[JsonLines], content: bytes | None, message: str
) -> None:
    path = tmp_path / "corpus"
    if content is not None:
        write(path, content)
    with pytest.raises(DataError, match=message) as caught:
        kind([path], BYTES)
    assert "\n" not in str(caught.value)


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
def test_a_bad_first_line_is_refused_when_opened(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(DataError, match=r"corpus:2:? " + message):
        JsonLines([write(tmp_path / "corpus", f"\n{line}\n")], BYTES)


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_further_down_is_named_when_read(tmp_path: Path, line: str, message: str) -> None:
    source = JsonLines([write(tmp_path / "corpus", '{"text": "a"}\n\n{"text": "b"}\n' + line)], BYTES)
    assert source.record(1) == "b"
    with pytest.raises(DataError, match=r"corpus:4:? " + message) as caught:
        source.read(2)
    assert "\n" not in str(caught.value)


def test_a_file_that_changes_while_in_use_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus", "some text")
    source = PlainText([path], BYTES)
    write(path, "some")
    with pytest.raises(DataError, match="corpus became shorter while it was in use"):
        source.read(0)
    path.unlink()
    with pytest.raises(DataError, match="cannot read data file"):
        source.read(0)
