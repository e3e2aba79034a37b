"""The bundled corpus: this Python's own source files."""

import sysconfig
import time
from pathlib import Path

import pytest

from penstock.base.errors import DataError
from penstock.data.open import open_standard_library
from penstock.data.sources import Split
from penstock.data.text import PlainText
from penstock.data.tokenizer import ByteTokenizer


def open_split(split: Split) -> PlainText:
    return open_standard_library(split, ByteTokenizer(), validation_share=0.03)


def make_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    folder.mkdir(exist_ok=True)
    return folder


def test_it_is_large_and_opens_fast() -> None:
    start = time.perf_counter()
    train, validation = open_split("train"), open_split("validation")
    seconds = time.perf_counter() - start
    assert len(train) > 400
    assert 0.01 < len(validation) / (len(train) + len(validation)) < 0.05
    assert seconds < 5, f"opening both splits took {seconds:.1f} s"


def test_the_splits_share_no_file_and_cover_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = make_library(tmp_path / "lib", monkeypatch)
    for number in range(200):
        (library / f"module_{number}.py").write_text(f"number = {number}\n")
    parts = {
        split: {source.record(index) for index in range(len(source))}
        for split in ("train", "validation")
        for source in [open_split(split)]
    }
    assert not parts["train"] & parts["validation"]
    assert parts["train"] | parts["validation"] == {f"number = {number}\n" for number in range(200)}
    assert len(parts["validation"]) > 0


def test_only_source_files_that_every_build_has_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = make_library(tmp_path / "lib", monkeypatch)
    for name in [
        "b.py",
        "a/z.py",
        "a.py",
        "a/tests/test_z.py",
        "notes.txt",
        "__pycache__/b.py",
        "site-packages/numpy/core.py",
        "dist-packages/apt.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "sitecustomize.py",
    ]:
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (library / "empty.py").touch()
    (library / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\n")
    source = open_standard_library("train", ByteTokenizer(), validation_share=0.0)
    assert [source.record(index) for index in range(len(source))] == ["a/tests/test_z.py", "a/z.py", "a.py", "b.py"]


def test_two_machines_with_the_same_files_have_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = set()
    for name in ("first", "second"):
        library = make_library(tmp_path / name, monkeypatch)
        for number in reversed(range(20)) if name == "second" else range(20):
            (library / f"module_{number}.py").write_text(f"number = {number}\n")
        fingerprints.add(open_split("train").fingerprint)
    assert len(fingerprints) == 1


def test_a_python_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_library(tmp_path / "lib", monkeypatch)
    with pytest.raises(DataError, match=r'this Python has no source files in .*lib; fix: set data.source to "text"'):
        open_split("train")
