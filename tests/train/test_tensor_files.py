"""Files of tensors are what the safetensors library reads, and their checksum is that of their bytes."""

import stat
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from penstock.train import tensor_files
from penstock.train.tensor_files import ALIGNMENT, DTYPES, fingerprint, write_tensors


def test_the_library_reads_every_type_and_shape(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "turned": torch.randn(3, 5).t(),
        "slice [0:2]": torch.randn(4, 4)[1:3, ::2],
    }
    write_tensors(tmp_path / "a", tensors)
    loaded = load_file(tmp_path / "a")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_part_of_a_tensor_can_be_read(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(4, 6)
    write_tensors(tmp_path / "a", {"w": tensor, "s": torch.tensor(1.0)})
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert torch.equal(file.get_slice("w")[1:3, 2:5], tensor[1:3, 2:5])
        assert file.get_slice("s")[()].item() == 1.0


@pytest.mark.parametrize("block", [64, 4 << 20])
def test_the_checksum_is_of_what_was_written(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", block)
    said = write_tensors(tmp_path / "a", {"w": torch.randn(30, 7), "v": torch.randn(5).bfloat16()})
    content = (tmp_path / "a").read_bytes()
    assert said == fingerprint(tmp_path / "a") == f"{len(content)} bytes, crc32 {zlib.crc32(content):08x}"


def test_tensors_begin_where_a_mapped_file_is_aligned(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"w": torch.ones(3)})
    length = int.from_bytes((tmp_path / "a").read_bytes()[:8], "little")
    assert (8 + length) % ALIGNMENT == 0


def test_a_file_can_be_read_by_those_who_may_read_the_folder(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a", {"w": torch.ones(3)})
    (tmp_path / "plain").write_text("")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "a", {})
    assert (tmp_path / "a").read_text() == "mine"


def test_a_file_larger_than_one_read_is_summed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytes(range(200))
    (tmp_path / "a").write_bytes(content)
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 64)
    assert fingerprint(tmp_path / "a") == f"200 bytes, crc32 {zlib.crc32(content):08x}"
