"""`penstock data pack`: encode text once, into a pair of files that Megatron reads too.

    penstock data pack corpus/*.jsonl --output packed/corpus --tokenizer tokenizer.json
    penstock train debug data.source=packed 'data.files=["packed/corpus"]' ...

The result does not depend on `--processes`. Interrupted, it leaves nothing behind.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from penstock.base.numbers import bytes_text, count_text, duration_text
from penstock.cli.data_texts import (
    CACHE,
    CacheOption,
    CorruptOption,
    CorruptTexts,
    FieldOption,
    Files,
    SourceOption,
    TextSource,
    open_texts,
    print_left_out,
)
from penstock.cli.next import print_next
from penstock.data.indexed_dataset import prefix_of
from penstock.data.pack_files import PackProgress, PackResult, pack
from penstock.parallel.launch.host import allowed_cores

STOPPED = 143

WIDE = 64
"""Columns of a terminal from which on progress has a bar; what it counts must never be cut."""

Output = Annotated[Path, typer.Option("--output", help="Prefix of the files: PREFIX.bin, PREFIX.idx.")]
TokenizerName = Annotated[str, typer.Option("--tokenizer", help="As data.tokenizer: a file or folder, or `bytes`.")]
End = Annotated[str | None, typer.Option("--end-of-document", help="Name of the token, if it is not a usual one.")]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, max=1024, help="That encode; one a core if left out.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def pack_texts(  # noqa: PLR0913 - one argument for each option
    files: Files,
    output: Output,
    tokenizer: TokenizerName,
    source: SourceOption = TextSource.JSONL,
    text_field: FieldOption = "text",
    end_of_document: End = None,
    processes: Processes = None,
    corrupt: CorruptOption = CorruptTexts.STOP,
    cache: CacheOption = CACHE,
    as_json: Json = False,
) -> None:
    """Encode text once, into PREFIX.bin and PREFIX.idx, which Megatron reads too.

    Each document ends with the end-of-document token. PREFIX.packed.json says which tokenizer it was.
    """
    prefix = prefix_of(output)
    with _ended_by_signals(), _progress() as show:
        texts = open_texts(files, source, text_field, corrupt, cache)
        begin = time.perf_counter()
        packed = pack(
            texts,
            prefix,
            tokenizer=tokenizer,
            end_of_document=end_of_document,
            processes=processes or len(allowed_cores()),
            skip_corrupt=corrupt is CorruptTexts.SKIP,
            report=show(len(texts)),
        )
        seconds = time.perf_counter() - begin
    if as_json:
        summary = {"prefix": str(prefix), "seconds": seconds, "empty": packed.empty, **asdict(packed.origin)}
        print(json.dumps(summary, indent=2))
    else:
        _print_summary(prefix, packed, seconds)
        size = f"model.vocab_size={packed.origin.vocabulary_size}"
        print_next("train", "debug", "data.source=packed", f"data.files={prefix}", size)


def _print_summary(prefix: Path, packed: PackResult, seconds: float) -> None:
    origin = packed.origin
    print(
        f"wrote {prefix}.bin and {prefix}.idx: {origin.documents:,} documents, {origin.tokens:,} tokens, "
        f"{bytes_text(origin.text_bytes)} of text"
    )
    print(
        f"{duration_text(seconds)}, {origin.text_bytes / seconds / 1e6:.2f} MB/s, "
        f"{count_text(origin.tokens / seconds)} tokens/s, {origin.text_bytes / origin.tokens:.2f} bytes a token"
    )
    if packed.empty:
        print(f"{packed.empty:,} empty documents were left out")
    print_left_out(origin.left_out, f", all of them named in {prefix}.packed.json")


@contextmanager
def _progress() -> Iterator[Callable[[int], Callable[[PackProgress], None]]]:
    """Gives what draws a bar on a terminal, and nothing elsewhere: called with the texts that there are."""
    console = Console(stderr=True)
    columns: list[ProgressColumn] = [MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn()]
    if console.width >= WIDE:
        columns = [TextColumn("packing"), BarColumn(None), *columns[:2], TimeElapsedColumn(), columns[2]]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def show(texts: int) -> Callable[[PackProgress], None]:
            task = bars.add_task("", total=texts, speed="")
            begin, text_bytes = time.perf_counter(), 0

            def advance(done: PackProgress) -> None:
                nonlocal text_bytes
                text_bytes += done.text_bytes
                speed = text_bytes / (time.perf_counter() - begin) / 1e6
                bars.update(task, advance=done.texts, speed=f"{speed:.1f} MB/s")

            return advance

        yield show


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Lets SIGTERM end this process as Ctrl-C does: the other processes are ended, and nothing is left."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(STOPPED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
