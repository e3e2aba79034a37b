"""`penstock data`: look at what a model is fed, and encode text once for many runs.

    penstock data inspect TARGET                        contents of the batches of a run
    penstock data pack corpus/*.jsonl --output packed/corpus --tokenizer tokenizer.json
    penstock data tokenizer train corpus/*.jsonl --vocabulary 32000 --output tokenizer.json
    penstock train debug data.source=packed 'data.files=["packed/corpus"]' ...

`inspect` needs PyTorch and has its own module. A pack does not depend on `--processes`; interrupted, it leaves no file.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

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

from penstock.base.interrupts import STOPPED
from penstock.base.numbers import bytes_text, count_text, counted, duration_text
from penstock.cli.output import check_output, print_next
from penstock.cli.verbs import Force, Json, Verb, group_app
from penstock.config.run import Data
from penstock.data.documents import TextDocuments
from penstock.data.indexed_dataset import prefix_of
from penstock.data.open import open_text
from penstock.data.packed import PackProgress, PackResult, pack
from penstock.data.sources import RecordError
from penstock.data.tokenizer_output import END_OF_DOCUMENT, train_tokenizer
from penstock.parallel.launch.environment import allowed_cores

Files = Annotated[list[str], typer.Argument(metavar="FILES", help="Files, folders or globs.")]
Source = Annotated[Literal["jsonl", "text", "parquet"], typer.Option("--source", help="Lines, whole files, or rows.")]
TextField = Annotated[str, typer.Option("--text-field", help="Field or column that holds the text.")]
Corrupt = Annotated[Literal["stop", "skip"], typer.Option("--corrupt", help="Stop at a damaged text, or leave it out.")]
Cache = Annotated[Path, typer.Option("--cache", help="Folder for decompressed copies of compressed files.")]

CACHE = Path("runs/cache")  # of runs too
_NAMED = 5  # damaged texts that are printed


def open_texts(files: list[str], source: Source, text_field: str, corrupt: Corrupt, cache: Path) -> TextDocuments:
    """Open the texts of files in order, as a run would read them."""
    settings = Data(source=source, files=tuple(files), text_field=text_field, corrupt=corrupt, validation_share=0.0)
    text = open_text(settings, "train", vocab_size=2**31, seed=0, cache=cache)  # no vocabulary is too small
    for line in text.corrupt.take_notices():
        print(line, file=sys.stderr)  # standard output may be for programs
    documents = text.parts[0].documents  # one source, no mixture
    assert isinstance(documents, TextDocuments), f"{source} is a source of text"
    return documents


def print_left_out(faults: Sequence[str], where: str = "") -> None:
    """Print the first texts that were left out; `where` names the full list."""
    if faults:
        print(f"{_left_out(len(faults), 'corrupt document')}{where}:")
    for fault in faults[:_NAMED]:
        print(f"  {fault}")


def _left_out(number: int, thing: str) -> str:
    return f"{counted(number, thing)} {'was' if number == 1 else 'were'} left out"


WIDE = 64  # columns of a terminal from which progress has a bar; its counts must never be cut

Output = Annotated[Path, typer.Option("--output", help="Prefix of the files: PREFIX.bin, PREFIX.idx.")]
TokenizerName = Annotated[str, typer.Option("--tokenizer", help="As data.tokenizer: a file or folder, or `bytes`.")]
End = Annotated[str | None, typer.Option("--end-of-document", help="Name of the token, if it is not a usual one.")]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, max=1024, help="That encode; one a core if left out.")
]


def pack_texts(  # noqa: PLR0913 - one argument for each option
    files: Files,
    output: Output,
    tokenizer: TokenizerName,
    source: Source = "jsonl",
    text_field: TextField = "text",
    end_of_document: End = None,
    processes: Processes = None,
    corrupt: Corrupt = "stop",
    cache: Cache = CACHE,
    as_json: Json = False,
) -> None:
    """Encode text once, into PREFIX.bin and PREFIX.idx, which Megatron reads too.

    Each document ends with the end-of-document token. PREFIX.packed.json names the tokenizer.
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
            processes=processes or len(allowed_cores()),  # the result does not depend on it
            skip_corrupt=corrupt == "skip",
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
        f"wrote {prefix}.bin and {prefix}.idx: {counted(origin.documents, 'document')}, {origin.tokens:,} tokens, "
        f"{bytes_text(origin.text_bytes)} of text"
    )
    print(
        f"{duration_text(seconds)}, {origin.text_bytes / seconds / 1e6:.2f} MB/s, "
        f"{count_text(origin.tokens / seconds)} tokens/s, {origin.text_bytes / origin.tokens:.2f} bytes a token"
    )
    if packed.empty:
        print(_left_out(packed.empty, "empty document"))
    print_left_out(origin.left_out, f", all of them named in {prefix}.packed.json")


@contextmanager
def _progress() -> Iterator[Callable[[int], Callable[[PackProgress], None]]]:
    """Give a function that draws a progress bar on a terminal and nothing elsewhere; it takes the number of texts."""
    console = Console(stderr=True)
    columns: list[ProgressColumn] = [MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn()]
    if console.width >= WIDE:
        columns = [TextColumn("packing"), BarColumn(None), *columns[:2], TimeElapsedColumn(), columns[2]]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:  # gone when done

        def show(texts: int) -> Callable[[PackProgress], None]:
            task = bars.add_task("", total=texts, speed="")
            begin, text_bytes = time.perf_counter(), 0

            def advance(done: PackProgress) -> None:
                nonlocal text_bytes
                text_bytes += done.text_bytes
                speed = text_bytes / (time.perf_counter() - begin) / 1e6  # decimal megabytes a second since the begin
                bars.update(task, advance=done.texts, speed=f"{speed:.1f} MB/s")

            return advance

        yield show


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does: child processes end, and no partial file stays."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(STOPPED)  # an exception, so that clean-up runs

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


Vocabulary = Annotated[
    int, typer.Option("--vocabulary", max=10_000_000, help="Tokens, 256 bytes and special ones among them.")
]
TokenizerOutput = Annotated[Path, typer.Option("--output", help="File to write, such as tokenizer.json.")]
Special = Annotated[list[str] | None, typer.Option("--special", help="One more special token; any number of times.")]

tokenizer_app = group_app("Train a tokenizer.")


@tokenizer_app.command("train")
def train_on_text(  # noqa: PLR0913 - one argument for each option
    files: Files,
    vocabulary: Vocabulary,
    output: TokenizerOutput,
    source: Source = "jsonl",
    text_field: TextField = "text",
    special: Special = None,
    corrupt: Corrupt = "stop",
    cache: Cache = CACHE,
    force: Force = False,
) -> None:
    """Train a byte-level BPE tokenizer on text and write its tokenizer.json."""
    check_output(output, "--output", force=force, makes_folder=True)
    texts = open_texts(files, source, text_field, corrupt, cache)
    left_out: list[str] = []
    size = train_tokenizer(
        _readable(texts, left_out, skip=corrupt == "skip"),
        output,
        vocab_size=vocabulary,
        special_tokens=special or (),
        show_progress=sys.stderr.isatty(),
    )
    print(f"wrote {output}: {size:,} tokens, {END_OF_DOCUMENT} ends a document")
    print_left_out(left_out)
    options = {"--source": source, "--text-field": text_field, "--corrupt": corrupt, "--cache": cache}
    usual = {"--source": "jsonl", "--text-field": "text", "--corrupt": "stop", "--cache": CACHE}
    said = [word for name, value in options.items() if value != usual[name] for word in (name, value)]
    print_next("data", "pack", *files, *said, "--output", "packed/text", "--tokenizer", output)


def _readable(texts: TextDocuments, left_out: list[str], *, skip: bool) -> Iterator[str]:
    for number in range(len(texts)):
        try:
            yield texts.record(number)
        except RecordError as error:
            if not skip:
                raise
            left_out.append(str(error))  # it names file and line


_INSPECT = Verb("inspect", "penstock.cli.data_inspect", "inspect", "Show what the batches of a run really hold.")

app = group_app("Inspect batches, pack text, train tokenizers.", _INSPECT)
app.command("pack", short_help="Encode text once, into files that Megatron reads too.")(pack_texts)
app.add_typer(tokenizer_app, name="tokenizer", help="Train a tokenizer.")
