"""How fast text is opened and read, source by source.

    python -m benchmarks.sources --output benchmarks/results/sources.json

The text is the standard library, cut into documents of about 2,000 or 200 characters, or with every tenth character
changed for one of another script. Each way is taken `--times` times in turn with the others; medians are kept, of
seconds of the processor, which other programs lengthen less than those of the clock.

    open      the pass over JSON Lines that finds, checks and sums up every document (with a share held out)
    copy      decompressed copies, by what they hold
    read      documents as text, in the order of an epoch, without encoding
    go on     a streamed shard, opened in the middle
"""

import gzip
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import zstandard

from benchmarks import record
from penstock.data.documents import CorruptRecords, TextDocuments
from penstock.data.files import readable_copies
from penstock.data.hub import DatasetName, DatasetOnDisk, StreamedDataset
from penstock.data.sources import SplitFilter, order_of
from penstock.data.tables import Tables
from penstock.data.text import JsonLines
from penstock.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
KEEP = SplitFilter("train", 0.02)
OTHER_SCRIPT = "\u4e16"


def main() -> None:
    options = record.parser(__doc__, times=5, megabytes=(200, "of text in each file")).parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write(folder, options.megabytes * 10**6)
        seconds: dict[str, list[float]] = {}
        for _ in range(options.times):
            for name, run, prepare in ways(folder):
                prepare()
                begin = time.process_time()
                run()
                seconds.setdefault(name, []).append(time.process_time() - begin)
        rows = figures(folder, {name: statistics.median(times) for name, times in seconds.items()})
    record.show(rows)
    record.write(options, rows, megabytes=options.megabytes, times=options.times)


def documents(characters: int, total: int) -> Iterator[str]:
    """Texts of about so many characters, so many in all."""
    files = [path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    text, written = "".join(files), 0
    while written < total:
        for start in range(0, len(text) - characters, characters):
            yield text[start : start + characters]
            written += characters
            if written >= total:
                return


def write(folder: Path, total: int) -> None:
    """The same text in all forms."""
    texts = list(documents(2000, total))
    lines(folder / "long.jsonl", texts)
    lines(folder / "short.jsonl", documents(200, total))
    lines(folder / "script.jsonl", (OTHER_SCRIPT.join(text[i : i + 10] for i in range(0, 2000, 10)) for text in texts))
    content = (folder / "long.jsonl").read_bytes()
    (folder / "long.jsonl.gz").write_bytes(gzip.compress(content, 6))
    (folder / "long.jsonl.zst").write_bytes(zstandard.compress(content))
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / "long.parquet", row_group_size=1000)
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(str(folder / "set"), num_shards=8)


def lines(path: Path, texts: Iterator[str] | list[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def ways(folder: Path) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """What is timed, and what comes before."""
    corrupt = CorruptRecords()
    name = DatasetName(str(folder / "set"), "", "train", "")

    def open_lines(stem: str) -> JsonLines:
        return JsonLines([folder / f"{stem}.jsonl"], BYTES, keep=KEEP)

    for stem in ("long", "short", "script"):
        yield f"open_{stem}", lambda stem=stem: open_lines(stem), nothing
    for suffix in ("gz", "zst"):
        path = folder / f"long.jsonl.{suffix}"
        yield f"copy_{suffix}", lambda path=path: readable_copies([path], folder / "cache"), lambda: empty(folder)
    sources: dict[str, Callable[[], TextDocuments]] = {
        "jsonl": lambda: open_lines("long"),
        "parquet": lambda: Tables([folder / "long.parquet"], BYTES, keep=KEEP, corrupt=corrupt),
        "dataset": lambda: DatasetOnDisk(name, BYTES, text_field="text", keep=KEEP, corrupt=corrupt),
    }
    for kind, make in sources.items():
        source = make()
        yield f"read_{kind}", lambda source=source: read(source), nothing
    yield "open_parquet", sources["parquet"], nothing
    stream = StreamedDataset(name, BYTES, text_field="text", block=1024, keep=KEEP, corrupt=corrupt)
    yield "read_stream", lambda: [len(block) for shard in range(8) for block in stream.blocks(shard, 0)], nothing
    middle = len(list(stream.blocks(0, 0))) // 2
    yield "go_on_stream", lambda: next(stream.blocks(0, middle)), nothing


def nothing() -> None:
    """There is nothing to prepare."""


def empty(folder: Path) -> None:
    for copy in (folder / "cache").glob("*"):
        copy.unlink()


def read(source: TextDocuments) -> None:
    order = order_of(source, seed=0, epoch=0)
    for number in range(len(source)):
        source.record(int(order[number]))


def figures(folder: Path, seconds: dict[str, float]) -> dict[str, float]:
    """GB of text a second; of what takes no time for its size, milliseconds."""
    sizes = {stem: (folder / f"{stem}.jsonl").stat().st_size / 1e9 for stem in ("long", "short", "script")}
    text = sum(map(len, documents(2000, int(sizes["long"] * 1e9)))) / 1e9
    rows = {}
    for name, taken in seconds.items():
        kind, _, what = name.partition("_")
        if name in ("open_parquet", "go_on_stream"):
            rows[f"{name}_ms"] = taken * 1e3
        else:
            rows[f"{name}_gb_per_second"] = (sizes.get(what, sizes["long"]) if kind != "read" else text) / taken
    return rows


if __name__ == "__main__":
    main()
