"""Parquet and Arrow files: rows by number, blocks that are read once, and damage."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.base.child import Child, ChildEndedError
from penstock.base.errors import DataError
from penstock.data import tables
from penstock.data.documents import CorruptRecords
from penstock.data.sources import SplitFilter
from penstock.data.stream import Stream
from penstock.data.tables import Tables
from penstock.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def rows(count: int, start: int = 0) -> pa.Table:
    texts = [f"row {start + number}" for number in range(count)]
    return pa.table({"id": pa.array(range(count), pa.int64()), "text": pa.array(texts, pa.string())})


def write_parquet(path: Path, table: pa.Table, block: int) -> None:
    pq.write_table(table, path, row_group_size=block)


def write_arrow(path: Path, table: pa.Table, block: int, *, kind: Any = pa.ipc.new_file, **options: Any) -> None:
    with kind(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in table.to_batches(max_chunksize=block):
            writer.write_batch(batch)


write_stream = partial(write_arrow, kind=pa.ipc.new_stream)


WRITERS: dict[str, tuple[str, Callable[..., None], dict[str, str]]] = {
    "Parquet": ("a.parquet", write_parquet, {}),
    "Arrow file": ("a.arrow", write_arrow, {}),
    "compressed Arrow file": ("a.feather", write_arrow, {"compression": "lz4"}),
    "Arrow stream": ("a.arrow", write_stream, {}),
    "compressed Arrow stream": ("a.arrow", write_stream, {"compression": "zstd"}),
}
KINDS = pytest.mark.parametrize("kind", WRITERS)


def written(folder: Path, kind: str, table: pa.Table, block: int = 10) -> Path:
    name, write, options = WRITERS[kind]
    write(folder / name, table, block, **options)
    return folder / name


def opened(
    *files: Path, text_field: str = "text", keep: SplitFilter | None = None, corrupt: CorruptRecords | None = None
) -> Tables:
    return Tables(files, BYTES, text_field=text_field, keep=keep or SplitFilter(), corrupt=corrupt or CorruptRecords())


@KINDS
def test_rows_are_read_by_number_in_any_order(tmp_path: Path, kind: str) -> None:
    source = opened(written(tmp_path, kind, rows(35)))
    assert len(source) == 35
    assert source.block_sizes.tolist() == [10, 10, 10, 5]
    assert [source.record(index) for index in (34, 0, 10, 9)] == ["row 34", "row 0", "row 10", "row 9"]
    assert BYTES.decode(source.read(20)) == "row 20"


def test_files_of_all_kinds_are_one_source(tmp_path: Path) -> None:
    files = [written(tmp_path, kind, rows(7, 7 * number)) for number, kind in enumerate(list(WRITERS)[:3])]
    write_parquet(tmp_path / "empty.parquet", rows(0), 10)
    source = opened(files[0], tmp_path / "empty.parquet", *files[1:])
    assert [source.record(index) for index in range(21)] == [f"row {number}" for number in range(21)]


@KINDS
def test_the_fingerprint_follows_the_content(tmp_path: Path, kind: str) -> None:
    table = rows(35)
    first = opened(written(tmp_path, kind, table)).fingerprint
    (tmp_path / "moved").mkdir()
    assert opened(written(tmp_path / "moved", kind, table)).fingerprint == first
    longer = table.set_column(1, "text", pa.array([*table["text"].to_pylist()[:-1], "another row"]))
    assert opened(written(tmp_path, kind, longer)).fingerprint != first
    assert opened(written(tmp_path, kind, table.slice(1))).fingerprint != first


@KINDS
def test_an_epoch_reads_each_block_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "POOL_BYTES", 200)  # a few of the 20 blocks
    source = opened(written(tmp_path, kind, rows(200)))
    assert 1 <= source.pool < 20  # blocks
    read: list[int] = []
    plain = Child.ask
    monkeypatch.setattr(Child, "ask", lambda self, request: read.append(request["block"]) or plain(self, request))
    stream = Stream(source, seed=0, shuffle=True, lanes=1)
    position = stream.start()
    while position.lanes[0].epoch == 0:
        position = stream.advance(position, 1, 16)
    again = [block for place, block in enumerate(read) if block in read[:place]]
    assert set(read) == set(range(20))
    assert len(again) <= source.pool, "only the next epoch reads a block again"


def test_a_row_without_text_stops_or_is_skipped_and_named(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", None, "b"]})
    with pytest.raises(DataError, match=r"a\.parquet: row 1 of block 0: column 'text' is not text; got NoneType"):
        opened(written(tmp_path, "Parquet", table)).read(1)
    corrupt = CorruptRecords("skip")
    source = opened(written(tmp_path, "Parquet", table), corrupt=corrupt)
    assert [len(source.read(index)) for index in range(3)] == [1, 0, 1]
    assert corrupt.skipped == 1


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "Parquet", rows(200), 100)
    chunk = pq.read_metadata(path).row_group(0).column(1)
    content, damaged = bytearray(path.read_bytes()), slice(chunk.dictionary_page_offset, chunk.data_page_offset)
    content[damaged] = bytes(len(content[damaged]))
    path.write_bytes(content)
    corrupt = CorruptRecords("skip")
    source = opened(path, corrupt=corrupt)
    assert source.record(150) == "row 150"
    assert len(source.read(3)) == 0
    (notice,) = corrupt.take_notices()
    assert "a.parquet: row 3 of block 0 cannot be read" in notice
    assert "\n" not in notice


@pytest.mark.parametrize("kind", [pa.string(), pa.dictionary(pa.int32(), pa.string())])
def test_one_wrong_number_of_an_arrow_file_spoils_its_block_only(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"text": pa.array([f"row {number:030}" for number in range(40)]).cast(kind)})
    write_arrow(tmp_path / "a.arrow", table, 20)
    content = bytearray((tmp_path / "a.arrow").read_bytes())
    numbers = np.arange(21, dtype=np.int32) * (34 if kind == pa.string() else 1)
    place = content.index(numbers[:20].tobytes())
    content[place + 40 : place + 44] = np.int32(2**30).tobytes()  # of row 10: no such byte, or text
    (tmp_path / "a.arrow").write_bytes(content)
    corrupt = CorruptRecords("skip")
    source = opened(tmp_path / "a.arrow", corrupt=corrupt)
    assert [len(source.read(index)) for index in (3, 9, 10, 30)] == [0, 0, 0, 34]
    assert "a.arrow: row 3 of block 0 cannot be read: " in corrupt.take_notices()[0]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    write_parquet(tmp_path / "a.parquet", table, 10)
    write_arrow(tmp_path / "a.arrow", table, 10)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=rf"{name} has 2 columns 'text'; got 'text', 'text'; fix: set data.text_f"):
            opened(tmp_path / name)


def test_a_library_that_ends_its_process_is_an_error_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "Parquet", rows(5))

    def end(self: Child, request: object) -> object:
        raise ChildEndedError("was ended by SIGABRT")

    source = opened(path)
    monkeypatch.setattr(Child, "ask", end)
    with pytest.raises(DataError, match=r"row 3 of block 0 cannot be read: Arrow was ended by SIGABRT"):
        source.record(3)
    with pytest.raises(DataError, match=r"a\.parquet is not a table: Arrow was ended by SIGABRT"):
        opened(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", None, "cannot read data file .*a.parquet: No such file or directory; fix: correct data.files"),
        ("a.parquet", b"no table", r"data file .*a.parquet is not a table: .*; allowed: Parquet, or Arrow IPC"),
        ("a.arrow", b"no table", r"data file .*a.arrow is not a table: .*; allowed: Parquet, or Arrow IPC"),
        ("a.parquet", b"", "data file .*a.parquet is empty; fix: take it out"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        opened(tmp_path / name)
    assert "\n" not in str(caught.value)


@KINDS
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, rows(2000), 1000)
    path.write_bytes(path.read_bytes()[:-3000])
    with pytest.raises(DataError, match="is not a table"):
        opened(path)


@KINDS
@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("body", r"has no column 'body'; got 'id', 'text'; fix: set data\.text_field"),
        ("id", r"a\..*has a column 'id' that is not text; got int64; fix: set data\.text_field"),
    ],
)
def test_a_table_without_a_column_of_text_is_refused(tmp_path: Path, kind: str, field: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(written(tmp_path, kind, rows(3)), text_field=field)


def test_tables_without_a_row_are_left_out_and_refused_if_there_is_no_other(tmp_path: Path) -> None:
    empty = written(tmp_path, "Parquet", rows(0))
    with pytest.raises(DataError, match=r"a\.parquet is empty"):
        opened(empty)
    (tmp_path / "b.parquet").touch()
    pq.write_table(pa.table({"text": [b"caf\xc3\xa9", b"\xff"]}), tmp_path / "c.parquet")
    files, corrupt = [empty, tmp_path / "b.parquet", tmp_path / "c.parquet"], CorruptRecords("skip")
    source = Tables(files, ByteTokenizer(), keep=SplitFilter(), corrupt=corrupt)
    assert [bytes(source.read(row).tolist()) for row in range(2)] == [b"caf\xc3\xa9", b""]
    assert corrupt.take_notices() == (
        f"data: {empty} is empty and left out, and 1 other file too",
        f"data: skipped a record: {files[2]}: row 1 of block 0 is not UTF-8: invalid start byte at byte 0",
    )


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())),
        *(pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())),
    ],
)
def test_every_kind_of_text_is_read(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"text": pa.array(["a", "b", "a"]).cast(kind)})
    write_arrow(tmp_path / "a.arrow", table, 10)
    source = opened(tmp_path / "a.arrow")
    assert [source.record(index) for index in range(3)] == ["a", "b", "a"]
