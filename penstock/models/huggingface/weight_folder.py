"""Folders of safetensors, with dequantization of published 8-bit and 4-bit weights.

DeepSeek-V3 stores matrices in float8 (e4m3) with one float32 scale for each 128 x 128 block (arXiv 2412.19437, section
3.3): `x.weight` and `x.weight_scale_inv`. gpt-oss stores experts in MXFP4 (OCP Microscaling Formats 1.0): `x_blocks`
has two 4-bit numbers in each byte, the lower half first, and `x_scales` one exponent, biased by 127, for each 32 of
them. Penstock reads both forms and writes neither.

Tensors are read on access, so a folder may be larger than memory.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.base.errors import CheckpointError

MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the sixteen 4-bit numbers (e2m1)."""

_BLOCK = 128
_SCALE_INV = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"


class WeightFolder(Mapping[str, Tensor]):
    """The tensors of all safetensors files of a folder, by name, each in its compute dtype.

    Raises a CheckpointError if there is no such file, if one is damaged, or if two have a tensor of the same name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Path] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError("no safetensors file", got=folder, fix="give a folder with Hugging Face weights")
        for file in files:
            names = set(_opened(file).keys())
            if twice := names & self._files.keys():
                raise CheckpointError(f"{file} repeats {min(twice)}", got=f"it is in {self._files[min(twice)]} too")
            self._files |= dict.fromkeys(names, file)
        self._names = {name: stored for stored in self._files if (name := _logical_name(stored)) is not None}
        self._open: tuple[Path, Any] | None = None

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor."""
        stored = self._names[name]
        tensor = self._read(stored)
        if stored.endswith(_BLOCKS):
            return from_mxfp4(tensor, self._read(stored.removesuffix(_BLOCKS) + _SCALES))
        if stored + _SCALE_INV in self._files:
            return from_float8(tensor, self._read(stored + _SCALE_INV))
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        stored = self._names[name]
        sizes = tuple(self._opened(stored).get_slice(stored).get_shape())
        if stored.endswith(_BLOCKS):  # as `from_mxfp4` unpacks it
            experts, outputs, groups, pairs = sizes
            return experts, 2 * groups * pairs, outputs
        return sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _read(self, stored: str) -> Tensor:
        try:
            tensor: Tensor = self._opened(stored).get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {self._files[stored]}", got=error) from error
        return tensor

    def _opened(self, stored: str) -> Any:
        """The file of a tensor. One file stays open, because consecutive reads mostly come from the same file."""
        if stored not in self._files:
            raise CheckpointError(f"{self.folder} has no tensor {stored}", fix="fetch the folder again")
        file = self._files[stored]
        if self._open is None or self._open[0] != file:
            self._open = file, _opened(file)
        return self._open[1]


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {file}", got=error, fix="fetch it again") from error


def _logical_name(stored: str) -> str | None:
    """The name of the dequantized tensor; None for a tensor of scales."""
    if stored.endswith((_SCALE_INV, f"_proj{_SCALES}")):
        return None
    return stored.removesuffix(_BLOCKS)


def from_float8(w_FD: Tensor, scale_fd: Tensor) -> Tensor:
    """Dequantize a float8_e4m3fn matrix to bfloat16; `scale_fd` is float32, one for each 128 x 128 block."""
    F, D = w_FD.shape
    scale_FD = scale_fd.repeat_interleave(_BLOCK, 0)[:F].repeat_interleave(_BLOCK, 1)[:, :D]  # border blocks are cut
    return (w_FD.float() * scale_FD).bfloat16()


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize a stack of MXFP4 matrices to bfloat16, experts x inputs x outputs."""
    numbers = torch.tensor(MXFP4, dtype=torch.bfloat16, device=blocks.device)
    experts, outputs, groups, half = blocks.shape  # uint8; inputs / 32 groups of 16 bytes, and as many scales (uint8)
    values = torch.empty(experts, outputs, 2 * groups * half, dtype=numbers.dtype, device=blocks.device)
    for expert in range(experts):  # one at a time: the lookup needs four times the memory of the result
        pairs = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), dim=-1).flatten(-2)  # the lower half first
        values[expert] = torch.ldexp(numbers[pairs.int()], scales[expert, ..., None].int() - 127).flatten(-2)
    return values.mT  # as `transformers` stores such a stack
