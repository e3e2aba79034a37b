"""Names of files, folders and globs, and the files that they stand for."""

from pathlib import Path

import pytest

from penstock.base.errors import DataError
from penstock.data.files import matched


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "b/2.jsonl",
        "b/1.jsonl.gz",
        "b.jsonl",
        "b/deep/x.jsonl",
        "b/notes.md",
        "b/.hidden.jsonl",
        ".git/c.jsonl",
        "a[1].jsonl",
    ):
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
