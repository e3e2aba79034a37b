"""A folder is a whole checkpoint of ours, or one clear line says why not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.base.errors import CheckpointError
from penstock.train.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    check_files,
    check_no_more_tensors,
    check_tensors,
    describe,
    read_manifest,
    write_manifest,
)

TENSORS = {"model.a": torch.zeros(2, 3), "model.b": torch.zeros((), dtype=torch.bfloat16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed folder of two files."""
    (tmp_path / "a.safetensors").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "facts.json").write_text("{}")
    write_manifest(tmp_path, 7, describe(TENSORS))
    return tmp_path


def _rewrite(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**content, **changes}))


def test_what_was_written_is_read(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert (manifest.format, manifest.version, manifest.step) == (FORMAT, VERSION, 7)
    assert manifest.tensors == {"model.a": "float32 [2, 3]", "model.b": "bfloat16 []"}
    assert manifest.files["facts.json"] == f"2 bytes, crc32 {_crc(b'{}')}"
    check_files(folder, manifest.files)
    check_no_more_tensors(folder, manifest)


def _crc(content: bytes) -> str:
    """CRC-32 bit by bit, as its standard defines it (reflected polynomial 0xEDB88320)."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
    return f"{value ^ 0xFFFFFFFF:08x}"


def test_any_flipped_bit_in_any_file_is_found(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for _ in range(20):
            place = int(torch.randint(len(whole), (), generator=generator))
            if whole[place : place + 1].isspace():
                continue
            broken = bytearray(whole)
            broken[place] ^= 1
            path.write_bytes(broken)
            with pytest.raises(CheckpointError):
                check_files(folder, read_manifest(folder).files)
        path.write_bytes(whole)
    check_files(folder, read_manifest(folder).files)


def test_a_cut_file_is_named_with_what_it_should_be(folder: Path) -> None:
    path = folder / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged; got 10239 bytes, .* instead of 10240 bytes"):
        check_files(folder, read_manifest(folder).files)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged; got no such file; fix: delete .*"):
        check_files(folder, read_manifest(folder).files)


def test_tensors_that_somebody_added_are_refused(folder: Path) -> None:
    (folder / "b.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"was not saved with it; got b\.safetensors"):
        check_no_more_tensors(folder, read_manifest(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not a Penstock checkpoint: its manifest.json is something else's"),
        (
            {"version": VERSION + 1, "penstock": "9.9"},
            r"another format version; got 2; allowed: 1; .* wrote it \(9\.9\)",
        ),
        ({"step": 8}, "manifest.json is damaged; got a checksum that does not match"),
        ({"seal": None}, "manifest.json is damaged"),
    ],
)
def test_a_manifest_that_is_not_ours_not_of_this_version_or_changed_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    _rewrite(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b'{"format": "other"}'])
def test_a_manifest_that_is_no_manifest_is_refused(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged; got no JSON|something else's"):
        read_manifest(folder)


def test_a_folder_without_manifest_is_foreign(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a Penstock checkpoint; allowed: a folder with manifest\.json"):
        read_manifest(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="got a pickled one, which is never loaded"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {**TENSORS, "model.c": torch.zeros(1)},
            r"tensor model\.c; got none in the checkpoint; allowed: float32 \[1\] in",
        ),
        ({"model.a": TENSORS["model.a"]}, r"tensor model\.b; got bfloat16 \[\] in the checkpoint; allowed: none in"),
        ({**TENSORS, "model.a": torch.zeros(3, 2)}, r"tensor model\.a; got float32 \[2, 3\] in .* float32 \[3, 2\] in"),
        ({**TENSORS, "model.b": torch.zeros(())}, r"tensor model\.b; got bfloat16 \[\] in .* float32 \[\] in this run"),
        ({"x": torch.zeros(1)}, r"tensor x \(and 2 more\); got none"),
    ],
)
def test_other_tensors_are_refused_and_the_first_is_named(
    folder: Path, wanted: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_tensors(folder, read_manifest(folder).tensors, describe(wanted))


def test_a_file_larger_than_one_read_is_summed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(range(200)))
    monkeypatch.setattr("penstock.train.manifest.READ_BYTES", 64)
    write_manifest(tmp_path, 0, {})
    assert read_manifest(tmp_path).files["a"] == f"200 bytes, crc32 {_crc(bytes(range(200)))}"
