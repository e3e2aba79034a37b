"""Folders of safetensors: several files as one, and weights of 4 and 8 bits as what they stand for."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.base.errors import CheckpointError
from penstock.models.huggingface.weight_folder import WeightFolder, from_float8, from_mxfp4

ONE_BLOCK = torch.tensor([[[[*range(16)]]]], dtype=torch.uint8) * 17  # bytes 0x00, 0x11, ..., 0xff


def _random_mxfp4(*sizes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (*sizes, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(100, 140, sizes, generator=generator, dtype=torch.uint8)


def test_four_bits_stand_for_what_the_format_says() -> None:
    values = from_mxfp4(ONE_BLOCK, torch.tensor([[[128]]], dtype=torch.uint8))
    assert values.dtype == torch.bfloat16
    expected = [0, 1, 2, 3, 4, 6, 8, 12]  # twice as much, because the exponent is 1
    assert values[0, ::2, 0].tolist() == values[0, 1::2, 0].tolist() == expected + [-value for value in expected]


def test_stacks_of_four_bits_are_those_of_transformers() -> None:
    blocks, scales = _random_mxfp4(3, 6, 4)
    assert torch.equal(from_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales))


@given(rows=st.integers(1, 300), columns=st.integers(1, 300))
def test_each_block_of_eight_bits_has_its_scale(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows * columns)
    w_FD = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale_fd = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator)
    read = from_float8(w_FD, scale_fd)
    row, column = rows - 1, columns // 2
    expected = w_FD[row, column].float() * scale_fd[row // 128, column // 128]
    assert read.shape == w_FD.shape
    assert read[row, column] == expected.bfloat16()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files: plain weights, and weights of 8 and of 4 bits with their scales."""
    blocks, scales = _random_mxfp4(2, 6, 1)
    plain = {"model.norm.weight": torch.ones(3), "experts.down_proj_bias": torch.zeros(2, 6)}
    packed = {
        "q_proj.weight": torch.ones(130, 4).to(torch.float8_e4m3fn),
        "q_proj.weight_scale_inv": torch.tensor([[2.0], [3.0]]),
        "experts.down_proj_blocks": blocks,
        "experts.down_proj_scales": scales,
    }
    save_file(plain, tmp_path / "model-00001-of-00002.safetensors")
    save_file(packed, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_files_are_read_as_one_and_scales_are_not_seen(folder: Path) -> None:
    weights = WeightFolder(folder)
    shapes = {name: weights.shape(name) for name in weights}
    assert shapes == {
        "model.norm.weight": (3,),
        "experts.down_proj_bias": (2, 6),
        "q_proj.weight": (130, 4),
        "experts.down_proj": (2, 32, 6),
    }
    assert len(weights) == 4
    assert all(tuple(weights[name].shape) == shape for name, shape in shapes.items())
    assert weights["q_proj.weight"][[0, 129], 0].tolist() == [2.0, 3.0]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors file; got .*; fix: give a folder"):
        WeightFolder(tmp_path)


def test_a_file_that_is_cut_is_named(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"cannot read .*model-00002-of-00002\.safetensors"):
        WeightFolder(folder)


def test_a_tensor_that_is_there_twice_is_named(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(3)}, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"more\.safetensors repeats model\.norm\.weight; got it is in .*00001"):
        WeightFolder(folder)


def test_scales_that_are_missing_are_named(tmp_path: Path) -> None:
    save_file({"experts.down_proj_blocks": _random_mxfp4(2, 6, 1)[0]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor experts\.down_proj_scales"):
        WeightFolder(tmp_path)["experts.down_proj"]
