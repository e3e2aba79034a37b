"""Documents in columns: Parquet files with one document per row, and Arrow files from `datasets` and others.

Opening reads only the footers of Parquet files, which have the sizes of the row groups. Only the text column of a row
group is read, as a whole; the latest row groups are cached, and the order of documents takes this into account (see
`order`). Arrow files are memory-mapped, and their record batches are the blocks.

The split of a document is known only when it is read. The fingerprint is of the footers of Parquet files, with sizes
and extremes of every column of every row group, and of some evenly spaced documents of Arrow files: hashing everything
could mean to read a terabyte before the first step.
"""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.base.errors import DataError
from penstock.data.documents import CorruptRecords, TextDocuments, checked_text
from penstock.data.files import empty, unreadable
from penstock.data.order import InBlocks
from penstock.data.sources import RecordError, SplitFilter, fingerprint_of, require
from penstock.data.tokenizer_rules import Tokenizer

PARQUET, ARROW = ".parquet", (".arrow", ".feather", ".ipc")
"""Suffixes of the two kinds."""

POOL_BYTES = 128 << 20
"""Limit on the text of a pool, unless one block is larger."""

_SAMPLES = 64
_OPEN = 16
"""Files that stay open."""


class TableBlock(NamedTuple):
    """A row group or a record batch."""

    file: int  # index in the files
    number: int  # in its file
    rows: int
    size: int  # bytes of text


class Table(Protocol):
    """A file with a text column in blocks."""

    def blocks(self) -> list[tuple[int, int]]:
        """Returns (rows, bytes) of each block."""

    def column(self, block: int) -> Any:
        """Returns the column of a block, as a pyarrow Array or ChunkedArray."""

    def fingerprint(self) -> bytes:
        """Returns the identity of the file's content."""


class Tables(TextDocuments, InBlocks):
    """The rows of Parquet and Arrow files, in the order of the files.

    Raises a DataError if pyarrow is missing, a file cannot be read, is not a table or lacks the column, or is empty.
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
        self._arrow = require("pyarrow", extra="parquet", purpose="data.source parquet")
        self._parquet = require("pyarrow.parquet", extra="parquet", purpose="data.source parquet")
        self._files = tuple(files)
        self._text_field = text_field
        self._table = lru_cache(_OPEN)(self._open_table)
        self._blocks: list[TableBlock] = []
        digest = blake2b(digest_size=16)
        for number in range(len(self._files)):
            table = self._table(number)
            self._blocks += [TableBlock(number, place, *sizes) for place, sizes in enumerate(table.blocks())]
            digest.update(table.fingerprint())
        self._block_sizes = np.array([block.rows for block in self._blocks], dtype=np.int64)
        self._ends = np.cumsum(self._block_sizes)  # number behind the last document of each block
        if len(self) == 0:
            raise empty(self._files[0])
        # As many blocks as fit into POOL_BYTES on average.
        mean = max(1, sum(block.size for block in self._blocks) // len(self._blocks))
        self._pool = max(1, min(len(self._blocks), POOL_BYTES // mean))
        self._column = lru_cache(self._pool)(self._read_column)
        super().__init__(tokenizer, fingerprint_of(digest.digest(), text_field), corrupt=corrupt, keep=keep)

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """Documents of each block."""
        return self._block_sizes

    @property
    def pool(self) -> int:
        """Blocks that are held at a time."""
        return self._pool

    def __len__(self) -> int:
        """Number of documents."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def record(self, index: int) -> str:
        """Returns the text of a row."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        block = self._blocks[number]
        row = index - int(self._ends[number]) + block.rows  # in its block
        place = f"{self._files[block.file]}: row {row} of block {block.number}"
        try:
            value = self._column(number)[row].as_py()
        except OSError as error:
            if error.errno is not None:  # The system has lost the file. Arrow's own word for damage is an OSError too.
                raise unreadable(self._files[block.file], error) from error
            raise RecordError(f"{place} cannot be read: {error}") from error
        except self._arrow.ArrowException as error:
            raise RecordError(f"{place} cannot be read: {error}") from error
        except UnicodeDecodeError as error:
            raise RecordError(f"{place} is not UTF-8: {error.reason} at byte {error.start}") from error
        return checked_text(value, f"{place}: column {self._text_field!a}")

    def _read_column(self, number: int) -> Any:
        block = self._blocks[number]
        return self._table(block.file).column(block.number)

    def _open_table(self, number: int) -> Table:
        path = self._files[number]
        try:
            with path.open("rb"):  # For the words of the system if it cannot be read.
                pass
            if path.suffix == PARQUET:
                return ParquetTable(self._parquet, path, self._text_field)
            return ArrowTable(self._arrow, path, self._text_field)
        except (OSError, self._arrow.ArrowException) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise unreadable(path, error) from error
            raise DataError(f"data file {path} is not a table: {error}", allowed="Parquet, or Arrow IPC") from error


class ParquetTable:
    """A Parquet file; its row groups are the blocks."""

    def __init__(self, parquet: Any, path: Path, text_field: str) -> None:
        self._path = path
        self._file = parquet.ParquetFile(path)
        self._field = text_field
        check_column(self._file.schema_arrow, text_field, path)

    def blocks(self) -> list[tuple[int, int]]:
        """Returns (rows, bytes) of each row group."""
        metadata = self._file.metadata
        names = [metadata.schema.column(place).path for place in range(metadata.num_columns)]
        place = names.index(self._field)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [(group.num_rows, group.column(place).total_uncompressed_size) for group in groups]

    def column(self, block: int) -> Any:
        """Reads the text of a row group."""
        return self._file.read_row_group(block, columns=[self._field]).column(0)

    def fingerprint(self) -> bytes:
        """Returns the size of the file and a hash of its footer, whose length is in the last 8 bytes."""
        with self._path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(size - 8)
            length = int.from_bytes(file.read(4), "little")
            file.seek(size - 8 - length)
            return size.to_bytes(8, "little") + blake2b(file.read(length)).digest()


class ArrowTable:
    """An Arrow IPC file or stream; its record batches are the blocks.

    Uncompressed data stays on disk. Of a compressed file one batch is decompressed at a time; a compressed stream has
    no random access and is decompressed whole.
    """

    def __init__(self, arrow: Any, path: Path, text_field: str) -> None:
        source = arrow.memory_map(str(path))
        try:
            reader = arrow.ipc.open_file(source)
            self._batches, self._batch = reader.num_record_batches, reader.get_batch
        except arrow.ArrowInvalid:
            source.seek(0)
            reader = arrow.ipc.open_stream(source)
            batches = list(reader)
            self._batches, self._batch = len(batches), batches.__getitem__
        check_column(reader.schema, text_field, path)
        self._place = reader.schema.get_field_index(text_field)

    def blocks(self) -> list[tuple[int, int]]:
        """Returns (rows, bytes) of each batch."""
        columns = map(self.column, range(self._batches))
        return [(len(column), column.nbytes) for column in columns]

    def column(self, block: int) -> Any:
        """Returns the text of a batch."""
        return self._batch(block).column(self._place)

    def fingerprint(self) -> bytes:
        """Returns a hash of rows and bytes of each batch, and of some documents."""
        sizes = self.blocks()
        filled = [block for block, (rows, _) in enumerate(sizes) if rows]
        step = max(1, len(filled) // _SAMPLES)
        samples = [self.column(block)[sizes[block][0] // 2].as_py() for block in filled[::step]]
        return fingerprint_of(sizes, samples).to_bytes(8, "little")


def check_column(schema: Any, text_field: str, path: Path) -> None:
    """Raises DataError for a table without the column, or with one that is not text."""
    fix = "set data.text_field to the column with the text"
    if text_field not in schema.names:
        names = ", ".join(map(ascii, schema.names[:10])) or "no column"
        raise DataError(f"data file {path} has no column {text_field!a}", got=names, fix=fix)
    kind = str(schema.field(text_field).type)
    if "string" not in kind or kind.startswith(("list", "struct", "map")):
        raise DataError(f"data file {path}: column {text_field!a} is not text", got=kind, fix=fix)
