"""Documents in columns: Parquet files with one document per row, and Arrow files from `datasets` and others.

Opening reads only the footers of Parquet files, which have the sizes of the row groups. Only the text column of a row
group is read, as a whole; the latest row groups are cached, and the order of documents takes this into account (see
`sources`). Arrow files are memory-mapped, and their record batches are the blocks. Arrow itself runs in a child
(`table_process`), because a damaged file may end its process.

The split of a document is known only when it is read. The fingerprint is of the footers of Parquet files, with sizes
and extremes of every column of every row group, and of some evenly spaced documents of Arrow files: hashing everything
could mean to read a terabyte before the first step.
"""

import os
from collections.abc import Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.base.child import Child, ChildEndedError
from penstock.base.errors import DataError
from penstock.data.documents import CorruptRecords, TextDocuments, checked_text
from penstock.data.files import unreadable
from penstock.data.sources import InBlocks, RecordError, SplitFilter, fingerprint_of, require
from penstock.data.tokenizer_rules import Tokenizer

PARQUET, ARROW = ".parquet", (".arrow", ".feather", ".ipc")
"""Suffixes of the two kinds."""

POOL_BYTES = 128 << 20
"""Limit on the text of a pool, unless one block is larger."""


_MODULE = "penstock.data.table_process"
"""Not imported here: it needs pyarrow."""


class TableBlock(NamedTuple):
    """A row group or a record batch."""

    file: int  # index in the files
    number: int  # in its file
    rows: int
    size: int  # bytes of text


class BlockTexts(NamedTuple):
    """The texts of a block, one after another."""

    starts: NDArray[np.int64]  # first byte of each
    sizes: NDArray[np.int64]  # bytes; negative for a null
    content: bytes


@cache
def _reader(process: int) -> Child:
    """The child of a process: a fork has one of its own."""
    del process
    return Child(_MODULE)


class Tables(TextDocuments, InBlocks):
    """The rows of Parquet and Arrow files, in the order of the files.

    Files without a row are left out. Raises a DataError if pyarrow is missing, a file cannot be read, is not a table or
    lacks the column, or if no file has a row.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        *,
        text_field: str = "text",
        keep: SplitFilter,
        corrupt: CorruptRecords,
    ) -> None:
        require("pyarrow", extra="parquet", purpose="data.source parquet")
        self._files = tuple(files)
        self._text_field = text_field
        self._blocks: list[TableBlock] = []
        digest = blake2b(digest_size=16)
        empties: list[Path] = []
        for number, path in enumerate(self._files):
            if path.is_file() and path.stat().st_size == 0:
                empties.append(path)
                continue
            opened = self._open(number)
            if not any(rows for rows, _ in opened["blocks"]):
                empties.append(path)
            self._blocks += [TableBlock(number, index, *sizes) for index, sizes in enumerate(opened["blocks"])]
            digest.update(bytes.fromhex(opened["fingerprint"]))
        self.block_sizes = np.array([block.rows for block in self._blocks], dtype=np.int64)
        self._ends = np.cumsum(self.block_sizes)  # number behind the last document of each block
        corrupt.leave_out(empties, self._files)
        # As many blocks as fit into POOL_BYTES on average.
        mean = max(1, sum(block.size for block in self._blocks) // len(self._blocks))
        self.pool = max(1, min(len(self._blocks), POOL_BYTES // mean))
        self._texts = lru_cache(self.pool)(self._read_block)
        super().__init__(tokenizer, fingerprint_of(digest.digest(), text_field), corrupt=corrupt, keep=keep)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def record(self, index: int) -> str:
        number = int(np.searchsorted(self._ends, index, side="right"))
        block = self._blocks[number]
        row = index - int(self._ends[number]) + block.rows  # in its block
        location = f"{self._files[block.file]}: row {row} of block {block.number}"
        texts = self._texts(number)
        if isinstance(texts, str):
            raise RecordError(f"{location} cannot be read: {texts}")
        size = int(texts.sizes[row])
        start = int(texts.starts[row])
        try:
            value = texts.content[start : start + size].decode() if size >= 0 else None
        except UnicodeDecodeError as error:
            raise RecordError(f"{location} is not UTF-8: {error.reason} at byte {error.start}") from error
        return checked_text(value, f"{location}: column {self._text_field!a}")

    def _read_block(self, number: int) -> BlockTexts | str:
        """Returns the texts of a block, or why they cannot be read."""
        block = self._blocks[number]
        path = self._files[block.file]
        try:
            head, content = self._ask(path, block=block.number)
        except ChildEndedError as error:
            return f"Arrow {error}"
        if head.get("errno") is not None:  # the system has lost the file
            raise _unreadable(path, head)
        if "rows" not in head:
            return str(head.get("error") or head["column"][0])
        if head["rows"] != block.rows:
            return f"it has {head['rows']} rows instead of {block.rows}"
        sizes = np.frombuffer(content, np.int64, head["rows"])
        ends = np.cumsum(np.where(sizes < 0, ~sizes, sizes))
        starts = np.append(0, ends)[:-1]
        return BlockTexts(starts + 8 * len(sizes), sizes, content)

    def _open(self, number: int) -> dict[str, Any]:
        path = self._files[number]
        try:
            head, _ = self._ask(path)
        except ChildEndedError as error:
            head = {"error": f"Arrow {error}"}
        if head.get("errno") is not None:
            raise _unreadable(path, head)
        if "column" in head:
            what, got = head["column"]
            raise DataError(f"data file {path} {what}", got=got, fix="set data.text_field to the column with the text")
        if "error" in head:
            why = " ".join(head["error"].split())
            raise DataError(f"data file {path} is not a table: {why}", allowed="Parquet, or Arrow IPC")
        return head

    def _ask(self, path: Path, **request: int) -> tuple[dict[str, Any], bytes]:
        return _reader(os.getpid()).ask(
            {"path": os.path.abspath(path), "is_parquet": path.suffix == PARQUET, "field": self._text_field, **request}
        )


def _unreadable(path: Path, head: dict[str, Any]) -> DataError:
    return unreadable(path, OSError(head["errno"], head["error"]))
