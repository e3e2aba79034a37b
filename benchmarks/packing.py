"""Packing text and reading it back: beside Hugging Face's `datasets`, beside Megatron-Core, and beside what GPUs eat.

    python -m benchmarks.packing --megatron FOLDER --output benchmarks/results/packing.json

The text is the standard library in lines of 4,000 characters, the tokenizer one of 32,768 tokens made from it. Three
questions, each asked `--times` times in turn with the others, every answer in a process of its own:

    pack     from JSON Lines to tokens on disk: `penstock data pack`, and `datasets` (load, then map) with the same
             tokenizer, called directly and through transformers; on one process and on two
    read     documents of a .bin/.idx pair in random order, each copied to int64: ours, Megatron-Core's IndexedDataset,
             and the least that NumPy needs
    rows     batches of 8 rows of 4,096 tokens, ready for the model: our loader, of one rank and of the first of
             8 ranks (which reads what the others train on), and Megatron-Core's GPTDataset with the same fields

FOLDER holds Megatron-Core as its wheel does (`pip download --no-deps megatron-core`, unpacked); without it, its rows
are missing. Seconds of the processor are given beside seconds of the clock, which other programs lengthen. Where a
machine is shared, `--tries` asks more often, and of each case those answers count during which others used least of
the processors (`others`, in processors, from Linux's /proc/stat).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks import record
from benchmarks.layouts import make_tokenizer
from penstock.data.documents import CorruptRecords
from penstock.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, PackedMetadata, origin_of
from penstock.data.loader import Loader
from penstock.data.packed import PackedTokens, open_packed, pack
from penstock.data.sources import SplitFilter
from penstock.data.text import JsonLines
from penstock.data.tokenizer import open_tokenizer

LENGTH, ROWS = 4096, 8
LINE = 4000
COPIES = 8
"""Of the packed text, for reading: as many tokens as a processor's cache does not hold."""

NEEDED = 8 * 40_000
"""Tokens a second of 8 GPUs of the newest kind with a small model."""

Answer = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument(
        "--tries", type=int, default=0, help="of which the quietest count; as many as times if left out"
    )
    parser.add_argument("--megatron", type=Path, help="folder with Megatron-Core")
    parser.add_argument("--folder", type=Path, help="for files; a temporary one if left out")
    parser.add_argument("--only", default="", help="questions whose names begin so")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    record.add_arguments(parser)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(CASES[options.case](options.folder, options.megatron)))
        return
    with tempfile.TemporaryDirectory() as made:
        options.folder = options.folder or Path(made)
        prepare(options.folder)
        answers: dict[str, list[Answer]] = {name: [] for name in CASES if name.startswith(options.only)}
        for time_ in range(max(options.times, options.tries)):
            for name in answers:
                if "megatron" in name and options.megatron is None:
                    continue
                answers[name].append(asked(name, options))
                print(time_, name, json.dumps(answers[name][-1]), flush=True)
    numbers = {name: middle(found, options.times) for name, found in answers.items() if found}
    for name, row in numbers.items():
        print(f"{name:<34}" + "  ".join(f"{key} {value:,.3f}" for key, value in row.items()))
    record.write(
        options,
        {"cases": numbers, "needed_tokens_per_second": NEEDED},
        cpus=os.cpu_count(),
        processor=processor_name(),
        megatron_core=megatron_version(options.megatron),
        times=options.times,
    )


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def megatron_version(folder: Path | None) -> str:
    """Of the unpacked wheel, by the name of its folder of facts."""
    found = sorted(folder.glob("megatron_core-*.dist-info")) if folder else []
    return found[0].name.split("-")[1].removesuffix(".dist") if found else "not measured"


def asked(name: str, options: argparse.Namespace) -> Answer:
    """The answer of a process of its own, and what others used of the processors meanwhile."""
    words = [sys.executable, "-m", "benchmarks.packing", "--case", name, "--folder", str(options.folder)]
    words += ["--megatron", str(options.megatron)] if options.megatron else []
    busy, used, begin = record.busy_seconds(), record.used_seconds(), time.perf_counter()
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    others = (record.busy_seconds() - busy) - (record.used_seconds() - used)
    return dict(json.loads(done.stdout.splitlines()[-1])) | {"others": others / (time.perf_counter() - begin)}


def middle(answers: list[Answer], times: int) -> Answer:
    """The median of each figure over the quietest answers."""
    quietest = sorted(answers, key=lambda answer: answer["others"])[:times]
    return {key: statistics.median(answer[key] for answer in quietest) for key in answers[0]}


def prepare(folder: Path) -> None:
    """Text, tokenizer and a packed pair, if they are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.json").exists():
        make_tokenizer(folder / "tokenizer.json")
    if not (folder / "corpus.jsonl").exists():
        files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        texts = (file.read_text(errors="ignore") for file in files if "-packages" not in str(file))
        lines = (text[start : start + LINE] for text in texts for start in range(0, len(text), LINE))
        (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    if not (folder / "read.idx").exists():
        write_copies(folder)


def write_copies(folder: Path) -> None:
    tokenizer = str(folder / "tokenizer.json")
    made = folder / "made"
    if not made.with_suffix(".idx").exists():
        pack(lines_of(folder), made, tokenizer=tokenizer)
    one = IndexedDataset(made)
    documents = [one.document(number) for number in range(len(one))]
    opened = open_tokenizer(tokenizer)
    with IndexedDatasetWriter(folder / "read", opened.vocab_size) as writer:
        for _ in range(COPIES):
            writer.write(np.concatenate(documents), np.array([len(document) for document in documents]))
        origin = origin_of(one.prefix)
        assert isinstance(origin, PackedMetadata), "a pair of ours says what it is"
        writer.finish(origin)


def lines_of(folder: Path) -> JsonLines:
    return JsonLines(
        [folder / "corpus.jsonl"], open_tokenizer(str(folder / "tokenizer.json")), corrupt=CorruptRecords()
    )


@contextmanager
def timed() -> Iterator[Answer]:
    """Seconds of the clock and of the processor, of this process and those that it has waited for."""

    found: Answer = {}
    begin, before = time.perf_counter(), record.used_seconds()
    yield found
    found.update(seconds=time.perf_counter() - begin, processor_seconds=record.used_seconds() - before)


def rates(found: Answer, tokens: int, text_bytes: int | None = None) -> Answer:
    rated = found | {"tokens": tokens, "tokens_per_second": tokens / found["seconds"]}
    rated["tokens_per_processor_second"] = tokens / found["processor_seconds"]
    if text_bytes is not None:
        rated["mb_per_second"] = text_bytes / found["seconds"] / 1e6
    return rated


# ----------------------------------------------------------------------------------------------------------- pack


def ours(processes: int) -> Callable[[Path, Path | None], Answer]:
    def measure(folder: Path, megatron: Path | None) -> Answer:
        with tempfile.TemporaryDirectory() as target, timed() as found:
            done = pack(
                lines_of(folder),
                Path(target, "a"),
                tokenizer=str(folder / "tokenizer.json"),
                processes=processes,
            )
        return rates(found, done.origin.tokens, done.origin.text_bytes)

    return measure


def datasets_map(processes: int, *, through_transformers: bool) -> Callable[[Path, Path | None], Answer]:
    def measure(folder: Path, megatron: Path | None) -> Answer:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        import datasets
        from transformers import PreTrainedTokenizerFast

        datasets.disable_progress_bars()
        path = str(folder / "tokenizer.json")
        plain, wrapped = Tokenizer.from_file(path), PreTrainedTokenizerFast(tokenizer_file=path)
        end = [plain.token_to_id("<|endoftext|>")]

        def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            if through_transformers:
                ids = wrapped(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
            else:
                ids = [one.ids for one in plain.encode_batch_fast(batch["text"], add_special_tokens=False)]
            return {"input_ids": [one + end for one in ids]}

        with tempfile.TemporaryDirectory() as cache:
            with timed() as found:
                files = str(folder / "corpus.jsonl")
                data = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
                done = data.map(encode, batched=True, num_proc=processes, remove_columns=["text"])
            tokens = sum(map(len, done["input_ids"]))
            text_bytes = sum(len(text.encode()) for text in data["text"])
        return rates(found, tokens, text_bytes)

    return measure


# ----------------------------------------------------------------------------------------------------------- read


def read_documents(kind: str) -> Callable[[Path, Path | None], Answer]:
    def measure(folder: Path, megatron: Path | None) -> Answer:
        read, count = READERS[kind](folder, megatron)
        order = list(range(count))
        random.Random(0).shuffle(order)
        for number in order[:2000]:
            read(number)
        tokens = 0
        with timed() as found:
            for number in order:
                tokens += len(read(number).astype(np.int64))
        return rates(found, tokens) | {"documents_per_second": count / found["seconds"]}

    return measure


Reader = tuple[Callable[[int], Any], int]


def packed_of(folder: Path) -> PackedTokens:
    return open_packed([folder / "read"], keep=SplitFilter(), vocab_size=1 << 20)


def our_reader(folder: Path, megatron: Path | None) -> Reader:
    source = packed_of(folder)
    return source.read, len(source)


def numpy_reader(folder: Path, megatron: Path | None) -> Reader:
    """Reads the header, maps the ids, and slices: what any reader must do."""
    index = (folder / "read.idx").read_bytes()
    sequences = int(np.frombuffer(index, "<u8", 1, 18)[0])
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    starts = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences) // 2
    tokens = np.memmap(folder / "read.bin", dtype="<u2", mode="r")
    return lambda number: tokens[starts[number] : starts[number] + lengths[number]], sequences


def megatron_reader(folder: Path, megatron: Path | None) -> Reader:
    sys.path.insert(0, str(megatron))
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(folder / "read"), mmap=True)
    return data.get, len(data)


READERS: dict[str, Callable[[Path, Path | None], Reader]] = {
    "ours": our_reader,
    "numpy": numpy_reader,
    "megatron": megatron_reader,
}


# ----------------------------------------------------------------------------------------------------------- rows


def our_rows(source: str, *, mask: bool, ranks: int) -> Callable[[Path, Path | None], Answer]:
    def measure(folder: Path, megatron: Path | None) -> Answer:
        loader = Loader(
            packed_of(folder) if source == "packed" else lines_of(folder),
            rows=ROWS,
            sequence_length=LENGTH,
            seed=0,
            document_mask=mask,
            ranks=ranks,
        )
        loader.next_batch()
        batches = 400 if source == "packed" else 40
        with timed() as found:
            for _ in range(batches):
                loader.next_batch()
        # Of several ranks, each sees all tokens of the batch go by.
        return rates(found, batches * ROWS * LENGTH)

    return measure


def megatron_rows(*, mask: bool) -> Callable[[Path, Path | None], Answer]:
    def measure(folder: Path, megatron: Path | None) -> Answer:
        sys.path.insert(0, str(megatron))
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

        samples = 400 * ROWS
        config = GPTDatasetConfig(
            random_seed=0,
            sequence_length=LENGTH,
            blend=([str(folder / "read")], None),
            split="100,0,0",
            tokenizer=SimpleNamespace(eod=0, pad=-1, unique_identifiers={}, vocab_size=1 << 15),
            reset_position_ids=mask,
            reset_attention_mask=mask,
            eod_mask_loss=mask,
            create_attention_mask=False,
            path_to_cache=str(folder / "megatron"),
        )
        low = IndexedDataset(str(folder / "read"), mmap=True)
        every = np.arange(len(low), dtype=np.int32)
        data = GPTDataset(low, str(folder / "read"), every, samples + ROWS, Split.train, config)
        for number in range(ROWS):
            data[number]
        with timed() as found:
            for number in range(ROWS, ROWS + samples):
                data[number]
        return rates(found, samples * LENGTH)

    return measure


CASES: dict[str, Callable[[Path, Path | None], Answer]] = {
    "pack ours 1": ours(1),
    "pack ours 2": ours(2),
    "pack datasets 1": datasets_map(1, through_transformers=False),
    "pack datasets 2": datasets_map(2, through_transformers=False),
    "pack datasets transformers 2": datasets_map(2, through_transformers=True),
    **{f"read {kind}": read_documents(kind) for kind in READERS},
    **{
        f"rows {source} {'masked' if mask else 'whole'} {ranks}": our_rows(source, mask=mask, ranks=ranks)
        for source in ("packed", "jsonl")
        for mask in (False, True)
        for ranks in (1, 8)
    },
    "rows megatron whole": megatron_rows(mask=False),
    "rows megatron masked": megatron_rows(mask=True),
}


if __name__ == "__main__":
    main()
