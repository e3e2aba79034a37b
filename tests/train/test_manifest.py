"""A folder is a whole checkpoint of ours, or one clear line says why not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.base.errors import CheckpointError
from penstock.parallel.shard import whole
from penstock.train.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    SavedTensor,
    WrittenFiles,
    check_files,
    check_no_more_tensors,
    check_tensors,
    describe,
    files_of,
    merge,
    read_manifest,
    write_manifest,
)
from penstock.train.tensor_files import fingerprint

TENSORS = {"model.a": torch.zeros(2, 3), "model.b": torch.zeros((), dtype=torch.bfloat16)}
FILE = "a.safetensors"
A = SavedTensor("float32 [2, 3]", {"[0:1, 0:3]": FILE, "[1:2, 0:3]": FILE})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed folder of two files."""
    (tmp_path / FILE).write_bytes(bytes(range(256)) * 40)
    (tmp_path / "facts.json").write_text("{}")
    _seal(tmp_path, {"model.a": A, "model.b": SavedTensor("bfloat16 []", {"[]": FILE})})
    return tmp_path


def _seal(folder: Path, tensors: dict[str, SavedTensor]) -> None:
    files = {path.name: fingerprint(path) for path in folder.iterdir() if path.name != MANIFEST}
    write_manifest(folder, 7, WrittenFiles(tensors, files))


def _describe(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return describe({name: whole(tensor) for name, tensor in tensors.items()})


def _rewrite(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**content, **changes}))


def test_what_was_written_is_read(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert (manifest.format, manifest.version, manifest.step) == (FORMAT, VERSION, 7)
    assert manifest.kinds == {"model.a": "float32 [2, 3]", "model.b": "bfloat16 []"} == _describe(TENSORS)
    assert manifest.tensors["model.a"] == A
    assert files_of(manifest, ["model.a"]) == [FILE, "facts.json"]
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
            r"another format version; got 3; allowed: 2; .* wrote it \(9\.9\)",
        ),
        ({"version": 1}, r"another format version; got 1; allowed: 2; fix: use the Penstock that wrote it"),
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
        check_tensors(folder, read_manifest(folder).kinds, _describe(wanted))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (SavedTensor("float32 [2, 3]", {"[0:1, 0:3]": FILE}), r"a, float32 \[2, 3\], is not whole: 3 of 6 elements"),
        (SavedTensor("float32 [2]", {"[0:2]": FILE, "[1:2]": FILE}), r"\[0:2\] and \[1:2\] overlap"),
        (SavedTensor("float32 [2]", {"[1:3]": FILE}), r"\[1:3\] does not lie in \[2\]"),
        (SavedTensor("float32 [2]", {"[0:2]": "b.safetensors"}), "a is in a file that the manifest does not list"),
        (SavedTensor("float32", {"[0:2]": FILE}), "not what a manifest holds"),
        (SavedTensor("float32 [2]", {"0:2": FILE}), "not what a manifest holds: .*0:2 is no rectangle"),
        (SavedTensor("float32 [2]", 3), "not what a manifest holds"),  # type: ignore[arg-type]
    ],
)
def test_a_sealed_manifest_of_tensors_that_are_not_whole_is_refused(
    folder: Path, tensor: SavedTensor, reason: str
) -> None:
    (folder / MANIFEST).unlink()
    _seal(folder, {"a": tensor})
    with pytest.raises(CheckpointError, match=rf"manifest\.json is damaged; got .*{reason}"):
        read_manifest(folder)


def test_a_manifest_that_points_out_of_its_folder_is_refused(folder: Path) -> None:
    write_manifest(folder, 7, WrittenFiles({}, {"../secret": "2 bytes, crc32 00000000"}))
    with pytest.raises(CheckpointError, match=r"a file outside of the folder: \.\./secret"):
        read_manifest(folder)


def _rank(kind: str, *rectangles: str, file: str) -> WrittenFiles:
    return WrittenFiles({"a": SavedTensor(kind, dict.fromkeys(rectangles, file))}, {file: "1 bytes, crc32 00000000"})


def test_what_the_ranks_wrote_is_merged() -> None:
    merged = merge([_rank("float32 [4]", "[0:2]", file="x"), _rank("float32 [4]", "[2:4]", file="y")])
    assert merged.tensors == {"a": SavedTensor("float32 [4]", {"[0:2]": "x", "[2:4]": "y"})}
    assert merged.files.keys() == {"x", "y"}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (_rank("float32 [4]", file="y"), "the ranks together do not write a once, .*: 2 of 4 elements"),
        (_rank("float32 [4]", "[1:4]", file="y"), "overlap"),
        (_rank("float32 [4]", "[0:2]", file="y"), r"a\[0:2\] is written by two ranks"),
        (_rank("float32 [5]", "[2:4]", file="y"), r"a is float32 \[4\] on one rank, float32 \[5\] on another"),
        (_rank("float32 [4]", "[2:4]", file="x"), "ranks wrote the same files"),
    ],
)
def test_ranks_that_do_not_write_each_tensor_once_are_our_fault(other: WrittenFiles, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        merge([_rank("float32 [4]", "[0:2]", file="x"), other])
