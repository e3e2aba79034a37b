"""From names to files, and decompressed copies, which are made once and whole."""

import bz2
import gzip
import lzma
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from penstock.base.errors import DataError
from penstock.data import files
from penstock.data.files import matched, readable_copies
from penstock.data.text import JsonLines, PlainText
from penstock.data.tokenizer import ByteTokenizer


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = "b/2.jsonl", "b/1.jsonl.gz", "b.jsonl", "b/deep/x.jsonl", "a[1].jsonl"
    for name in (*lines, "b/notes.md", "b/.hidden.jsonl", ".git/c.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["b.jsonl"], ["b.jsonl"]),
        (["."], ["a[1].jsonl", "b/1.jsonl.gz", "b/2.jsonl", "b/deep/x.jsonl", "b.jsonl"]),
        (["b"], ["b/1.jsonl.gz", "b/2.jsonl", "b/deep/x.jsonl"]),
        (["b/*.jsonl"], ["b/2.jsonl"]),
        (["**/*.jsonl"], ["a[1].jsonl", "b/2.jsonl", "b/deep/x.jsonl", "b.jsonl"]),
        (["b/*"], ["b/1.jsonl.gz", "b/2.jsonl", "b/notes.md"]),
        (["b/2.jsonl", "b", "./b/2.jsonl"], ["b/2.jsonl", "b/1.jsonl.gz", "b/deep/x.jsonl"]),
        (["a[1].jsonl"], ["a[1].jsonl"]),
        (["gone.jsonl"], ["gone.jsonl"]),
    ],
)
def test_names_stand_for_files_in_the_order_of_their_paths(corpus: Path, names: list[str], wanted: list[str]) -> None:
    assert [path.as_posix() for path in matched(names, [".jsonl"])] == wanted


def test_without_suffixes_a_folder_stands_for_every_file_that_is_not_hidden(corpus: Path) -> None:
    assert Path("b/notes.md") in matched(["b"])
    assert not [path for path in matched(["."]) if "hidden" in path.name or ".git" in path.parts]


def test_links_that_form_a_loop_are_files_that_cannot_be_read(corpus: Path) -> None:
    (corpus / "loop.jsonl").symlink_to("loop.jsonl")
    assert matched(["loop.jsonl"]) == [Path("loop.jsonl")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("c/*.jsonl", r"data\.files: the glob c/\*\.jsonl has no file; fix: correct data\.files"),
        ("b", r"data\.files: the folder b has no file that ends in \.parquet or \.arrow"),
        ("empty", r"data\.files: the folder empty has no file"),
    ],
)
def test_what_stands_for_no_file_is_refused(corpus: Path, name: str, message: str) -> None:
    (corpus / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        matched([name], [".parquet", ".arrow"])


TEXT = b"some text that repeats itself\n" * 20_000
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
KINDS = pytest.mark.parametrize("suffix", COMPRESS)


@KINDS
def test_a_copy_holds_what_was_compressed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT) + COMPRESS[suffix](b"and more"))  # two streams in a file are one text
    (copy,) = readable_copies([path], tmp_path / "deep" / "cache")
    assert copy.read_bytes() == TEXT + b"and more"
    assert copy.suffix == ".txt"
    assert os.listdir(copy.parent) == [copy.name], "no lock and no draft stays"


def test_other_files_are_read_where_they_are(tmp_path: Path) -> None:
    assert readable_copies([tmp_path / "a.txt"], tmp_path / "cache") == [tmp_path / "a.txt"]
    assert not (tmp_path / "cache").exists()


def test_a_copy_is_made_once_and_anew_if_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"one", mtime=0))
    (first,) = readable_copies([path], tmp_path / "cache")
    before = first.stat()
    assert readable_copies([path], tmp_path / "cache") == [first]
    assert first.stat().st_mtime_ns == before.st_mtime_ns
    path.write_bytes(gzip.compress(b"two", mtime=0))
    (second,) = readable_copies([path], tmp_path / "cache")
    assert (first.read_bytes(), second.read_bytes()) == (b"one", b"two")


@KINDS
@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_damaged_file_leaves_nothing_behind(tmp_path: Path, suffix: str, damage: str) -> None:
    whole = COMPRESS[suffix](TEXT)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(whole[: len(whole) * 2 // 3] if damage == "cut" else b"no such thing")
    with pytest.raises(DataError, match=rf"a\{suffix} cannot be decompressed: .*; fix: it is damaged or cut"):
        readable_copies([path], tmp_path / "deep" / "cache")
    assert os.listdir(tmp_path) == [path.name]


def test_copies_that_find_no_place_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"one"))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be written to .*file/cache: .*; fix: set data\.cache"):
        readable_copies([path], tmp_path / "file" / "cache")


def test_ranks_share_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"{number}.gz" for number in range(6)]
    for number, path in enumerate(paths):
        path.write_bytes(gzip.compress(b"%d" % number * 10_000))
    made: list[Path] = []
    meet = threading.Barrier(2)
    plain = files.contents

    def content(path: Path) -> object:
        made.append(path)
        if len(made) <= 2:
            meet.wait()  # Both are at work before either goes on.
        return plain(path)

    monkeypatch.setattr(files, "contents", content)
    ranks = [threading.Thread(target=readable_copies, args=(paths, tmp_path / "cache")) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert sorted(made) == paths, "each file is decompressed by one rank"
    copies = readable_copies(paths, tmp_path / "cache")
    assert b"".join(copy.read_bytes()[:1] for copy in copies) == b"012345"


def test_a_file_that_becomes_far_too_large_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for suffix, packed in COMPRESS.items():
        (tmp_path / f"bomb.jsonl{suffix}").write_bytes(packed(bytes(80 << 20)))
        with pytest.raises(DataError, match=rf"bomb\.jsonl\{suffix} becomes more than 100 times as large"):
            readable_copies([tmp_path / f"bomb.jsonl{suffix}"], tmp_path / "cache")
        assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"pipe.jsonl{suffix}")
    for open_text in (PlainText, JsonLines):
        with pytest.raises(DataError, match=rf"cannot read data file .*pipe\.jsonl{suffix}: it is a pipe or a device"):
            open_text([tmp_path / f"pipe.jsonl{suffix}"], ByteTokenizer(), cache=tmp_path)
