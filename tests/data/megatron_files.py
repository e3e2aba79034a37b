"""Pairs of files byte by byte as Megatron-LM writes them, from the description of the format alone."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""NumPy's type of each code."""

Documents = Sequence[Sequence[Sequence[int]]]
"""Each a list of sequences, each a list of ids."""


def write_pair(prefix: Path, documents: Documents, code: int = 8) -> Path:
    """Write PREFIX.bin and PREFIX.idx."""
    width = np.dtype(TYPES[code]).itemsize
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    starts = [width * sum(lengths[:place]) for place in range(len(sequences))]
    bounds = [sum(map(len, documents[:place])) for place in range(len(documents) + 1)]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(sequences), len(bounds))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(starts)}q", *starts)
    index += struct.pack(f"<{len(bounds)}q", *bounds)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    content = b"".join(np.array(sequence, dtype=TYPES[code]).tobytes() for sequence in sequences)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(content)
    return prefix
