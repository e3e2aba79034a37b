"""Reads what W&B's own library has written offline: records in LevelDB's log format behind a header of seven bytes."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

HEADER, BLOCK, RECORD = 7, 32768, 7
WHOLE, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Every record of a file that is there whole; the library may still be writing the next one."""
    data, place, parts = path.read_bytes(), HEADER, b""
    while place + RECORD <= len(data):
        if BLOCK - place % BLOCK < RECORD:  # The rest of a block that no record's head fits in.
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if place + RECORD + length > len(data):
            return
        parts += data[place + RECORD : place + RECORD + length]
        place += RECORD + length
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
