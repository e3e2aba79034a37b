"""Where lines lie in files, found block by block."""

from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import text
from penstock.data.sources import RecordError
from penstock.data.text import lines_in, require_utf8

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


def test_a_line_that_is_not_utf8_is_named_among_others_in_its_block(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n\n\xe4\xb8\x96\ntw\xff\nthree\n")
    with pytest.raises(RecordError, match="lines:4 is not UTF-8: invalid start byte at byte 2; got 0xff"):
        list(lines_in(path, path, require_utf8))


def test_half_a_character_at_the_end_of_the_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes("one\n\u4e16".encode()[:-1])
    with pytest.raises(RecordError, match="lines:2 is not UTF-8: unexpected end of data"):
        list(lines_in(path, path, require_utf8))
