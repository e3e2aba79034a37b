"""Folders of safetensors, with dequantization of published 8-bit and 4-bit weights.

DeepSeek-V3 stores matrices in float8 (e4m3) with one scale for each block of 128 x 128 (arXiv 2412.19437, section 3.3):
`x.weight` and `x.weight_scale_inv`. `quantization_config` in config.json gives the size of a block, or none for one
scale for the whole tensor; scales are float32, or e8m0 exponents. gpt-oss stores experts in MXFP4 (OCP Microscaling
Formats 1.0): `x_blocks` has two 4-bit numbers in each byte, the lower half first, and `x_scales` one exponent, biased
by 127, for each 32 of them (`penstock.kernels.mxfp4`). Of these forms Penstock writes that of gpt-oss.

Tensors are read on access, so a folder may be larger than memory. `model.safetensors.index.json` says which files
belong to the model, where a folder has it.
"""

import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from penstock.base.errors import CheckpointError
from penstock.base.files import open_file, read_json
from penstock.config.load import CONFIG_FILE
from penstock.kernels.mxfp4 import E2M1
from penstock.models.huggingface.tensor_file import StoredTensor, TensorFile

INDEX = "model.safetensors.index.json"
BLOCKS, SCALES = "_blocks", "_scales"  # of a tensor in MXFP4, behind its name
_BLOCK = (128, 128)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALE_INV = "_scale_inv"
_METHODS = ("fp8", "mxfp4")
_LFS = b"version https://git-lfs"


class WeightSource(Mapping[str, Tensor]):
    """Weights by Hugging Face names, read on access, in any number of threads.

    Reading raises a CheckpointError if a tensor cannot be read, or if a value is infinite or NaN.
    """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor, without reading it."""

    @abstractmethod
    def has_rows(self, name: str) -> bool:
        """Whether `rows` reads no more than these."""

    @abstractmethod
    def rows(self, name: str, rows: tuple[int, int]) -> Tensor:
        """Rows [first, end) of a tensor."""


class WeightFolder(WeightSource):
    """The tensors of all safetensors files of a folder, by name, each in its compute dtype.

    Tensors without elements are left out. Raises a CheckpointError if there is no such file, if one is damaged or
    missing, if two have a tensor of the same name, or if weights are quantized in a way that is not known here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._block = _block_of(folder)
        self._files: dict[str, Path] = {}
        self._open = lru_cache(MOST_OPEN)(_opened)
        stored: dict[str, StoredTensor] = {}
        for file in _files_of(folder):
            for name, tensor in self._open(file).tensors.items():
                if name in self._files:
                    raise CheckpointError(f"{file} repeats {name}", got=f"it is in {self._files[name]} too")
                self._files[name], stored[name] = file, tensor
        self._shapes = {
            logical: _unpacked(name, tensor.shape)
            for name, tensor in stored.items()
            if (logical := _logical_name(name)) is not None and 0 not in tensor.shape
        }
        self._check_scales(stored)
        self._dtypes = {name: stored[name].dtype for name in self._shapes if self._is_plain(name)}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._dtypes:
            return self._finite(name, name, self._read(name))
        packed = name if name in self._files else name + BLOCKS
        tensor = self._read(packed)
        if packed.endswith(BLOCKS):
            tensor = from_mxfp4(tensor, self._read(packed.removesuffix(BLOCKS) + SCALES))
        else:
            tensor = from_float8(tensor, self._read(packed + _SCALE_INV), self._block)
        return self._finite(name, packed, tensor)

    def rows(self, name: str, rows: tuple[int, int]) -> Tensor:
        """Rows [first, end) of a tensor that is not quantized. Raises a CheckpointError as `__getitem__`."""
        return self._finite(name, name, self._read(name, rows))

    def _finite(self, name: str, stored: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and not is_finite(tensor):
            raise CheckpointError(f"{name} in {self._files[stored]} has values that are NaN or infinite", fix=_FETCH)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor, without reading it."""
        return self._dtypes.get(name, torch.bfloat16)

    def has_rows(self, name: str) -> bool:
        """Whether a tensor is not quantized; others are dequantized as a whole."""
        return name in self._dtypes

    def _is_plain(self, name: str) -> bool:
        return name in self._files and name + _SCALE_INV not in self._files

    def _check_scales(self, stored: Mapping[str, StoredTensor]) -> None:
        """Each float8 weight has a scale for each of its blocks, and each scale a weight."""
        types = {name: tensor.dtype for name, tensor in stored.items()}
        for name in self._shapes:
            if types.get(name) in _FLOAT8 and name + _SCALE_INV not in stored:
                raise CheckpointError(f"{name} is float8 and has no scale", allowed=f"{name}{_SCALE_INV}", fix=_FETCH)
        for scale, shape in ((name, tensor.shape) for name, tensor in stored.items()):
            name = scale.removesuffix(_SCALE_INV)
            if name == scale:
                continue
            if types.get(name) not in _FLOAT8:
                raise CheckpointError(f"{scale} is the scale of no float8 weight", got=types.get(name), fix=_FETCH)
            sizes = stored[name].shape
            parts = self._block or sizes[-2:]
            grid = (*sizes[:-2], *(-(-size // part) for size, part in zip(sizes[-2:], parts, strict=False)))
            is_one = self._block is None and shape in ((), (1,))
            if len(sizes) < 2 or not (shape == grid or is_one):
                whole = "one for the whole tensor" if self._block is None else f"blocks of {self._block}"
                raise CheckpointError(
                    f"the scales of {name} do not fit its shape {sizes}",
                    got=shape,
                    allowed=f"{grid}: {whole}",
                    fix=_FIX_BLOCK,
                )

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _read(self, stored: str, rows: tuple[int, int] | None = None) -> Tensor:
        if stored not in self._files:
            raise CheckpointError(f"{self.folder} has no tensor {stored}", fix="fetch the folder again")
        try:
            return self._open(self._files[stored]).read(stored, rows)
        except OSError as error:
            raise CheckpointError(f"cannot read {self._files[stored]}", got=error, fix=_FETCH) from error


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is infinite or NaN, without memory for a result per value.

    Read as integers, these are the largest values: of signed ones with the sign bit 0, of unsigned ones with 1.
    """
    tensor = tensor.float() if tensor.itemsize == 1 else tensor
    integers = _INTEGERS[tensor.itemsize]
    limit = int(torch.tensor(torch.inf, dtype=tensor.dtype).view(integers))
    values = tensor.view(integers).numpy()  # whose reductions start no threads
    sign = 1 << (8 * tensor.itemsize - 1)
    return bool(values.size == 0 or (values.max() < limit and values.view(f"u{tensor.itemsize}").max() < limit + sign))


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def _block_of(folder: Path) -> tuple[int, int] | None:
    """Rows and columns of a block of 8-bit weights; None if a tensor has one scale."""
    path = folder / CONFIG_FILE
    if not path.exists():  # a preset gives the model
        return _BLOCK
    try:
        fields = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}", got=error, fix=_FETCH) from error
    tables = [fields, fields.get("text_config")] if isinstance(fields, Mapping) else []
    sections = [table.get("quantization_config") for table in tables if isinstance(table, Mapping)]
    section = next((section for section in sections if section is not None), None)
    if section is None:
        return _BLOCK
    table = section if isinstance(section, Mapping) else {"quant_method": section}  # some write the name alone
    method = table.get("quant_method")
    if method not in _METHODS:
        raise CheckpointError(
            f"{path}: weights with quantization_config.quant_method {method} cannot be read",
            allowed=f"none, {', '.join(_METHODS)}",
            fix="fetch the bfloat16 weights, or dequantize these: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).dequantize().save_pretrained('NEW')",
        )
    block = table.get("weight_block_size", _BLOCK if method == "fp8" else None)
    match block:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0 and bool not in (type(rows), type(columns)):
            return rows, columns
    raise CheckpointError(
        f"{path}: quantization_config.weight_block_size cannot be used", got=block, allowed="[128, 128]"
    )


def _files_of(folder: Path) -> list[Path]:
    """The files of the model: those of the index, or all."""
    index = folder / INDEX
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        try:
            table = read_json(index)["weight_map"]
            names = sorted(set(table.values()))
            is_sound = bool(names) and all(isinstance(name, str) and Path(name).name == name for name in names)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"cannot read {index}", got=error, fix=_FETCH) from error
        if not is_sound:
            raise CheckpointError(f"{index} names files outside of its folder, or none", fix=_FETCH)
        if missing := [name for name in names if not os.path.exists(folder / name)]:  # a name may be too long
            raise CheckpointError(f"{folder / missing[0]} is missing", got=f"{index} names it", fix=_FETCH)
        return [folder / name for name in names]
    if (whole := folder / "model.safetensors") in files:  # beside it Mistral has the same weights under other names
        files = [file for file in files if file == whole or not file.name.startswith("consolidated")]
    if not files:
        raise CheckpointError("no safetensors file", got=folder, fix="give a folder with Hugging Face weights")
    return files


def _opened(file: Path) -> TensorFile:
    try:
        with open_file(file) as regular:
            if regular.read(len(_LFS)) == _LFS:
                raise CheckpointError(
                    f"{file} is a pointer of Git LFS, no weights", fix="run `git lfs pull` in its folder"
                )
        return TensorFile(file, direct=True)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}", got=error, fix=_FETCH) from error


MOST_OPEN = 64  # files that stay open

_FETCH = "fetch it again"
_FIX_BLOCK = "correct quantization_config.weight_block_size in config.json"


def _logical_name(stored: str) -> str | None:
    """The name of the dequantized tensor; None for a tensor of scales."""
    if stored.endswith((_SCALE_INV, f"_proj{SCALES}")):
        return None
    return stored.removesuffix(BLOCKS)


def _unpacked(stored: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a tensor, as `from_mxfp4` unpacks it."""
    if not stored.endswith(BLOCKS):
        return sizes
    if len(sizes) != 4:
        raise CheckpointError(
            f"{stored} has another shape", got=sizes, allowed="experts, outputs, groups, 16", fix=_FETCH
        )
    experts, outputs, groups, pairs = sizes
    return experts, 2 * groups * pairs, outputs


def from_float8(weight: Tensor, scale: Tensor, block: tuple[int, int] | None = _BLOCK) -> Tensor:
    """Dequantize float8 matrices to bfloat16. `scale` has a value for each block, or one for all; uint8 is e8m0."""
    if scale.dtype == torch.uint8:
        scale = torch.ldexp(torch.ones_like(scale, dtype=torch.float32), scale.int() - 127)
    scale = scale.float()
    if block is not None:
        *_, rows, columns = weight.shape
        scale = scale.repeat_interleave(block[0], -2)[..., :rows, :]  # border blocks are cut
        scale = scale.repeat_interleave(block[1], -1)[..., :columns]
    return (weight.float() * scale).bfloat16()


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize a stack of MXFP4 matrices to bfloat16, experts x inputs x outputs."""
    numbers = torch.tensor(E2M1, dtype=torch.bfloat16, device=blocks.device)
    experts, outputs, groups, half = blocks.shape  # uint8; inputs / 32 groups of 16 bytes, and as many scales (uint8)
    values = torch.empty(experts, outputs, 2 * groups * half, dtype=numbers.dtype, device=blocks.device)
    for expert in range(experts):  # one at a time: the lookup needs four times the memory of the result
        pairs = torch.stack((blocks[expert] & 15, blocks[expert] >> 4), dim=-1).flatten(-2)  # the lower half first
        values[expert] = torch.ldexp(numbers[pairs.int()], scales[expert, ..., None].int() - 127).flatten(-2)
    return values.mT  # as `transformers` stores such a stack
