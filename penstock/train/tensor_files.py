"""Tensors in safetensors files: written piece by piece with a checksum, read back by the `safetensors` library.

A file is a length (8 bytes, little-endian), a JSON header of that length, and the tensors' bytes one after another:

    {"weight[0:2, 0:3]": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

The library writes files too. This does it without a second pass for the checksum, syncs the file that it has open, lets
the system's errors through as they are, and leaves a file that others may read (docs/decisions/0012-any-layout.md).
"""

import json
import os
import zlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in the format."""

ALIGNMENT = 64
"""Bytes. The header is filled up with spaces, so that tensors lie well in a mapped file."""

BLOCK_BYTES = 4 << 20
"""Written and summed at once: small enough to be summed while it is in the cache."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a file and sync it to disk.

    Args:
        path: of a file that is not there yet.
        tensors: on any device; brought to the host and made contiguous one by one.

    Returns:
        Size and checksum of what was meant to be written, as `fingerprint` would read them.

    Raises:
        OSError: the file cannot be written.
    """
    header, offset = {}, 0
    for name, tensor in tensors.items():
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    checksum = size = 0
    with path.open("xb", buffering=0) as file:
        begin_of_file = memoryview(len(text).to_bytes(8, "little") + text)
        for view in chain([begin_of_file], map(_bytes_of, tensors.values())):
            for begin in range(0, len(view), BLOCK_BYTES):
                part = view[begin : begin + BLOCK_BYTES]
                checksum = zlib.crc32(part, checksum)
                size += len(part)
                while part:
                    part = part[file.write(part) :]
        os.fsync(file.fileno())
    return describe_file(size, checksum)


def fingerprint(path: Path) -> str:
    """Size and checksum of a file, from all of its bytes.

    Raises:
        OSError: it cannot be read.
    """
    checksum = size = 0
    block = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            checksum = zlib.crc32(block[:count], checksum)
            size += count
    return describe_file(size, checksum)


def describe_file(size: int, checksum: int) -> str:
    """Such as `120 bytes, crc32 0a1b2c3d`."""
    return f"{size} bytes, crc32 {checksum:08x}"


def _bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's values, row by row."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
