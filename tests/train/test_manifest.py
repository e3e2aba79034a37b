"""A folder is a whole checkpoint of ours, or one clear line says why not."""

import errno
import fcntl
import json
import os
import stat
import tempfile
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from penstock.base.errors import CheckpointError
from penstock.layout.sharding import LocalSlice
from penstock.models.huggingface import tensor_file
from penstock.models.huggingface.tensor_file import ALIGNMENT, DTYPES, fingerprint, tensor_entry, write_entries
from penstock.parallel.shard import ShardedTensor, whole
from penstock.train import manifest
from penstock.train.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    CheckpointFiles,
    SavedTensor,
    WrittenFiles,
    check_files,
    check_no_more_tensors,
    check_tensors,
    describe,
    files_of,
    fill_parts,
    merge,
    read_manifest,
    write_manifest,
    write_parts,
)
from tests.closeness import assert_equal
from tests.examples import examples
from tests.train.layouts import Layout, ranks_of, write_ranks

TENSORS = {"model.a": torch.zeros(2, 3), "model.b": torch.zeros((), dtype=torch.bfloat16)}
FILE = "a.safetensors"
FLOAT8 = [dtype for dtype in DTYPES.values() if dtype.itemsize == 1 and dtype.is_floating_point]
A = SavedTensor("float32 [2, 3]", {"[0:1, 0:3]": FILE, "[1:2, 0:3]": FILE})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / FILE).write_bytes(bytes(range(256)) * 40)
    (tmp_path / "facts.json").write_text("{}")
    _seal(tmp_path, {"model.a": A, "model.b": SavedTensor("bfloat16 []", {"[]": FILE})})
    return tmp_path


def _seal(folder: Path, tensors: dict[str, SavedTensor]) -> None:
    files = {path.name: fingerprint(path) for path in folder.iterdir() if path.name != MANIFEST}
    write_manifest(folder, 7, WrittenFiles(tensors, files))


def _describe(tensors: dict[str, Tensor]) -> dict[str, str]:
    return describe({name: whole(tensor) for name, tensor in tensors.items()})


def test_what_was_written_is_read(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert (manifest.format, manifest.version, manifest.step) == (FORMAT, VERSION, 7)
    assert manifest.kinds == {"model.a": "float32 [2, 3]", "model.b": "bfloat16 []"} == _describe(TENSORS)
    assert manifest.tensors["model.a"] == A
    assert files_of(manifest, ["model.a"]) == [FILE, "facts.json"]
    assert manifest.files["facts.json"] == "2 bytes, crc32 a3a6bf43"
    check_files(folder, manifest.files)
    check_no_more_tensors(folder, manifest)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "not a Penstock checkpoint: its manifest.json is something else's"),
        ({"version": 3, "penstock": "9.9"}, r"another format version; got 3; allowed: 2; .* wrote it \(9\.9\)"),
        ({"version": 1}, r"another format version; got 1; allowed: 2; fix: use the Penstock that wrote it"),
        ({"step": 8}, "manifest.json is damaged; got a checksum that does not match"),
    ],
)
def test_a_manifest_that_is_not_ours_not_of_this_version_or_changed_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b'{"format": "other"}'])
def test_a_manifest_that_is_no_manifest_is_refused(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged; got no JSON|something else's"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({**TENSORS, "model.c": torch.zeros(1)}, r"tensor model\.c; got none in .*; allowed: float32 \[1\] in"),
        ({"model.a": TENSORS["model.a"]}, r"tensor model\.b; got bfloat16 \[\] in the checkpoint; allowed: none in"),
        ({**TENSORS, "model.a": torch.zeros(3, 2)}, r"tensor model\.a; got float32 \[2, 3\] in .* float32 \[3, 2\] in"),
        ({"x": torch.zeros(1)}, r"tensor x \(and 2 more\); got none"),
    ],
)
def test_other_tensors_are_refused_and_the_first_is_named(
    folder: Path, wanted: dict[str, Tensor], message: str
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


PART_DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@st.composite
def tensors_and_layouts(draw: st.DrawFn) -> tuple[Tensor, Layout, Layout]:
    """A tensor, and two layouts whose cuts divide it. Rows may be fewer than the ranks that divide them."""
    cuts = st.tuples(st.integers(1, 3), st.integers(1, 2))
    dims = draw(st.integers(0, 3))
    first, second = (draw(st.lists(cuts, min_size=dims, max_size=dims)) for _ in range(2))
    sizes = [draw(st.integers(1, 2)) * a * b * c * d for (a, b), (c, d) in zip(first, second, strict=True)]
    values = torch.randint(0, 2**15, sizes, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    tensor = values.to(draw(st.sampled_from(PART_DTYPES)))
    layouts = [
        Layout(tuple(c for c, _ in one), tuple(b for _, b in one), draw(st.integers(1, 4)), draw(st.integers(1, 2)))
        for one in (first, second)
    ]
    return tensor, layouts[0], layouts[1]


@examples(30)  # each waits for the disk
@given(tensors_and_layouts())
def test_what_one_layout_wrote_every_other_reads(case: tuple[Tensor, Layout, Layout]) -> None:
    tensor, before, after = case
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = write_ranks(folder, [{"w": part} for part in before.parts(tensor)])
        for expected in after.parts(tensor):
            target = replace(expected, tensor=torch.zeros_like(expected.tensor))
            fill_parts(folder, written.tensors, {"w": target})
            assert torch.equal(target.tensor, expected.tensor)


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(64.0).view(8, 8)
    written = write_ranks(tmp_path, ranks_of({"w": tensor}, {"w": Layout((4, 1), (1, 1))}, 4))
    wanted = ShardedTensor(tensor=torch.zeros(4, 4), shape=(8, 8), pieces=(LocalSlice(0, (4, 1), (1, 2), (4, 4)),))
    columns = slice(2, 6)
    reads, fill = [], tensor_file.TensorFile.fill

    def noted(file: tensor_file.TensorFile, key: str, source: tuple[slice, ...], target: Tensor) -> None:
        reads.append((key, source))
        fill(file, key, source, target)

    monkeypatch.setattr(tensor_file.TensorFile, "fill", noted)
    fill_parts(tmp_path, written.tensors, {"w": wanted})
    assert reads == [
        ("w[0:2, 0:8]", (slice(1, 2), columns)),
        ("w[2:4, 0:8]", (slice(0, 2), columns)),
        ("w[4:6, 0:8]", (slice(0, 1), columns)),
    ]
    assert torch.equal(wanted.tensor, tensor[1:5, 2:6])


def test_a_rank_that_writes_nothing_leaves_no_file_and_says_what_it_holds(tmp_path: Path) -> None:
    written = write_parts(tmp_path, {"w": whole(torch.ones(3), writes=False), "n": whole(torch.ones(0, 2))}, 5)
    assert list(tmp_path.iterdir()) == []
    assert {name: one.kind for name, one in written.tensors.items()} == {"w": "float32 [3]", "n": "float32 [0, 2]"}
    assert not any(one.rectangles for one in written.tensors.values())


def test_files_hold_as_many_tensors_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FILE_BYTES", 100)  # 25 floats
    sizes = [10, 15, 1, 60, 5, 20]  # floats: 40 60 | 4 | 240 | 20 80
    tensors = {str(index): torch.full((size,), float(index)) for index, size in enumerate(sizes)}
    written = write_parts(tmp_path, {name: whole(tensor) for name, tensor in tensors.items()}, 1)
    files = [next(iter(one.rectangles.values())) for one in written.tensors.values()]
    assert [int(file[14:19]) for file in files] == [0, 0, 1, 2, 3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written.files) == sorted(set(files))
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    fill_parts(tmp_path, written.tensors, {name: whole(tensor) for name, tensor in into.items()})
    assert_equal(into, tensors)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    return write_entries(path, [tensor_entry(name, tensor) for name, tensor in tensors.items()])


def test_the_library_reads_every_type_and_shape_and_a_file_is_aligned_readable_and_never_overwritten(
    tmp_path: Path,
) -> None:
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES.values() if dtype not in FLOAT8}
    tensors |= {"scalar": torch.tensor(2.5), "turned": torch.randn(3, 5).t(), "part": torch.randn(4, 4)[1:3, ::2]}
    path, plain = tmp_path / "a", tmp_path / "plain"
    write_tensors(path, tensors)
    assert_equal(load_file(path), tensors)
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % ALIGNMENT == 0
    plain.write_text("mine")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    with pytest.raises(FileExistsError):
        write_tensors(plain, {})
    assert plain.read_text() == "mine"


@pytest.mark.parametrize("block", [64, 16 << 20])
def test_the_checksum_is_of_what_was_written(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", block)
    said = write_tensors(tmp_path / "a", {"w": torch.randn(30, 7), "v": torch.randn(5).bfloat16()})
    content = (tmp_path / "a").read_bytes()
    assert said == fingerprint(tmp_path / "a") == f"{len(content)} bytes, crc32 {zlib.crc32(content):08x}"


@pytest.mark.parametrize("refuses", ["nothing", "the flag", "the write", "writes at once"])
@pytest.mark.parametrize("elements", [1 << 13, 12_345])
def test_a_large_file_is_written_past_the_page_cache_where_the_file_system_can(
    tmp_path: Path, elements: int, refuses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", tensor_file.PAGE_BYTES)
    monkeypatch.setattr(tensor_file, "DIRECT_BYTES", 0)
    set_flags, write = fcntl.fcntl, os.pwrite
    together = threading.Barrier(tensor_file.WRITES)  # all have begun before the first one fails

    def fcntl_of_a_file_system(file: Any, command: int, flags: int = 0) -> int:
        if refuses == "the flag" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes")
        return set_flags(file, command, flags)

    def pwrite_of_a_file_system(file: int, block: memoryview, offset: int) -> int:
        if refuses in ("the write", "writes at once") and set_flags(file, fcntl.F_GETFL) & os.O_DIRECT:
            if refuses == "writes at once":
                together.wait()
            raise OSError(errno.EINVAL, "no direct writes")
        return write(file, block, offset)

    monkeypatch.setattr(tensor_file.fcntl, "fcntl", fcntl_of_a_file_system)
    monkeypatch.setattr(os, "pwrite", pwrite_of_a_file_system)
    tensors = {"w": torch.randn(elements), "v": torch.randn(3, 5).t()}
    said = write_tensors(tmp_path / "a", tensors)
    assert said == fingerprint(tmp_path / "a")
    assert_equal(load_file(tmp_path / "a"), tensors)


@pytest.mark.parametrize("along", [False, True])
def test_each_file_is_checked_once_and_damage_is_named(
    along: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is read, or `along` with the reading and before the next one is read."""
    monkeypatch.setattr(manifest, "FILE_BYTES", 100)
    tensors = {str(index): torch.full((20,), float(index)) for index in range(8)}
    written = write_parts(tmp_path, {name: whole(tensor) for name, tensor in tensors.items()}, 0)
    names, happened, check, opens = sorted(written.files), list[str](), manifest.check_files, manifest.TensorFile
    monkeypatch.setattr(
        manifest, "check_files", lambda folder, files: (check(folder, files), happened.extend(f"+{f}" for f in files))
    )
    monkeypatch.setattr(manifest, "TensorFile", lambda path: (happened.append(path.name), opens(path))[1])
    into = {name: whole(torch.zeros(20)) for name in tensors}
    assert manifest.files_to_read(written.tensors, into) == names

    def fill(count: int) -> None:
        expected = {name: written.files[name] for name in names[:count]}
        with CheckpointFiles(tmp_path, expected, along=along) as files:
            for name, part in into.items():
                files.fill(name, part, written.tensors[name])
            files.finish()

    fill(8)
    assert [one for one in happened if one[0] != "+"] == names
    assert sorted(one[1:] for one in happened if one[0] == "+") == names
    later = zip(names, names[along:], strict=False)
    assert all(happened.index(f"+{checked}") < happened.index(opened) for checked, opened in later)
    assert_equal({name: part.tensor for name, part in into.items()}, tensors)
    for place, name in enumerate(names):  # the last file too, whose check may end behind the reading
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-4] + b"1234")
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            fill(place + 1)
        (tmp_path / name).write_bytes(content)


def test_float32_values_are_read_from_a_file_that_has_them_as_bfloat16(tmp_path: Path) -> None:
    stored = torch.randn(6, 5).bfloat16()
    written = write_parts(tmp_path, {"w": whole(stored)}, 0)
    target = ShardedTensor(tensor=torch.zeros(2, 3), shape=(6, 5), pieces=(LocalSlice(0, (3, 1), (3, 1), (2, 3)),))
    fill_parts(tmp_path, written.tensors, {"w": target})
    assert torch.equal(target.tensor, stored[3:5, 1:4].float())
    with pytest.raises(CheckpointError, match=r"w\[0:6, 0:5\] gives bfloat16 \[6, 5\] instead of int32 \[6, 5\]"):
        fill_parts(tmp_path, written.tensors, {"w": whole(torch.zeros(6, 5, dtype=torch.int32))})
