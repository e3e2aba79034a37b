"""The process that reads Parquet and Arrow files (penstock/base/child.py); `tables` asks it.

    {"path": ..., "field": name, ...}           {"blocks": [[rows, bytes of text], ...], "fingerprint": hex}
    the same with "block": 3                    {"rows": n}; n int64, bytes of each text (~bytes of a null); the texts
    either                                      {"error": ..., "errno": null or a number}, or {"column": [what, got]}

Arrow trusts the offsets inside of a file: one wrong number is a read of memory that does not exist. So each array is
validated whole before it is used, and what still ends the process is an error line of the caller.
"""

from collections import OrderedDict
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.child import MOST_BYTES, Answer, serve
from penstock.base.files import open_file
from penstock.data.sources import fingerprint_of

arrow: Any = import_module("pyarrow")  # it has no types
ipc: Any = import_module("pyarrow.ipc")
parquet: Any = import_module("pyarrow.parquet")

_SAMPLES = 64
_OPEN = 16
"""Files that stay open."""


class WrongColumnError(Exception):
    """The text column is missing, ambiguous, or no text. The arguments are what, got."""


class ParquetTable:
    """A Parquet file; its row groups are the blocks."""

    def __init__(self, path: Path, text_field: str) -> None:
        self._path = path
        self._file = parquet.ParquetFile(path)
        self._field = text_field
        check_column(self._file.schema_arrow, text_field)

    def blocks(self) -> list[tuple[int, int]]:
        """Returns (rows, bytes) of each row group."""
        metadata = self._file.metadata
        names = [metadata.schema.column(column).path for column in range(metadata.num_columns)]
        column = names.index(self._field)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [(group.num_rows, group.column(column).total_uncompressed_size) for group in groups]

    def column(self, block: int) -> Any:
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

    def __init__(self, path: Path, text_field: str) -> None:
        source = arrow.memory_map(str(path))
        try:
            reader = ipc.open_file(source)
            self._batches, self._batch = reader.num_record_batches, reader.get_batch
        except arrow.ArrowInvalid:
            source.seek(0)
            reader = ipc.open_stream(source)
            batches = list(reader)
            self._batches, self._batch = len(batches), batches.__getitem__
        check_column(reader.schema, text_field)
        self._place = reader.schema.get_field_index(text_field)

    def blocks(self) -> list[tuple[int, int]]:
        """Returns (rows, bytes) of each batch."""
        columns = map(self.column, range(self._batches))
        return [(len(column), column.nbytes) for column in columns]

    def column(self, block: int) -> Any:
        return self._batch(block).column(self._place)

    def fingerprint(self) -> bytes:
        """Returns a hash of rows and bytes of each batch, and of some documents."""
        sizes = self.blocks()
        filled = [block for block, (rows, _) in enumerate(sizes) if rows]
        step = max(1, len(filled) // _SAMPLES)
        samples = [_sample(self.column(block), sizes[block][0] // 2) for block in filled[::step]]
        return fingerprint_of(sizes, samples).to_bytes(8, "little")


def _sample(column: Any, row: int) -> str | None:
    """A text of an array that may be damaged elsewhere; None if this one is."""
    try:
        value = as_binary(column.slice(row, 1))[0].as_py()
        return None if value is None else value.decode()
    except (arrow.ArrowException, UnicodeDecodeError):
        return None


def check_column(schema: Any, text_field: str) -> None:
    """Raises WrongColumnError for a table without the column, with two of this name, or with one that is not text."""
    columns = schema.get_all_field_indices(text_field)
    if len(columns) != 1:
        has = f"has {len(columns)} columns {text_field!a}" if columns else f"has no column {text_field!a}"
        raise WrongColumnError(has, ", ".join(map(ascii, schema.names[:10])) or "no column")
    kind = schema.field(columns[0]).type
    if (kind.value_type if arrow.types.is_dictionary(kind) else kind) not in _BINARY:
        raise WrongColumnError(f"has a column {text_field!a} that is not text", str(kind))


_BINARY = {
    arrow.string(): arrow.binary(),
    arrow.large_string(): arrow.large_binary(),
    arrow.string_view(): arrow.binary_view(),
}
_BINARY |= {kind: kind for kind in _BINARY.values()}
"""Types of text, and of the same bytes, which may be no UTF-8: that is a fault of one text, not of its block."""


def as_binary(part: Any) -> Any:
    """An array of texts as bytes, with each offset in its range. Raises ArrowInvalid."""
    if isinstance(part, arrow.DictionaryArray):
        part = arrow.DictionaryArray.from_arrays(part.indices, part.dictionary.cast(_BINARY[part.dictionary.type]))
        part.validate(full=True)
        part = part.dictionary_decode()
    else:
        part = part.cast(_BINARY[part.type])
    part.validate(full=True)
    return part.cast(arrow.large_binary())


def texts_of(column: Any) -> Answer:
    """The texts of a column, one after another. Raises ArrowInvalid."""
    lengths, content = [np.zeros(0, dtype=np.int64)], []
    for part in column.chunks if isinstance(column, arrow.ChunkedArray) else [column]:
        whole = as_binary(part)
        if not len(whole):
            continue
        offsets = np.frombuffer(whole.buffers()[1], np.int64)[whole.offset : whole.offset + len(whole) + 1]
        sizes = np.diff(offsets)
        lengths.append(np.where(np.asarray(whole.is_null()), ~sizes, sizes))
        content.append(memoryview(whole.buffers()[2] or b"")[offsets[0] : offsets[-1]])
    numbers = np.concatenate(lengths)
    return {"rows": len(numbers)}, b"".join([numbers.tobytes(), *content])


_tables: "OrderedDict[tuple[str, str], ParquetTable | ArrowTable]" = OrderedDict()
"""The latest files, by path and field."""


def _table(request: dict[str, Any]) -> ParquetTable | ArrowTable:
    path, field = request["path"], request["field"]
    if "block" not in request or (path, field) not in _tables:
        with open_file(Path(path)):  # for the words of the system if it cannot be read
            pass
        kind = ParquetTable if request["is_parquet"] else ArrowTable
        _tables[path, field] = kind(Path(path), field)
    _tables.move_to_end((path, field))
    if len(_tables) > _OPEN:
        _tables.popitem(last=False)
    return _tables[path, field]


def _answer(request: dict[str, Any]) -> Answer:
    try:
        table = _table(request)
        if "block" in request:
            return texts_of(table.column(request["block"]))
        return {"blocks": table.blocks(), "fingerprint": table.fingerprint().hex()}, b""
    except WrongColumnError as error:
        return {"column": error.args}, b""
    except OSError as error:
        return {"errno": error.errno, "error": error.strerror or str(error)}, b""
    except MemoryError:
        return {"error": f"it needs more than {MOST_BYTES / 2**30:.0f} GiB of memory"}, b""
    except (arrow.ArrowException, ValueError, LookupError, TypeError, OverflowError) as error:
        return {"error": str(error)}, b""


if __name__ == "__main__":
    serve(_answer)
