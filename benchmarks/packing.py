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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks import record
from benchmarks.runs import library_texts, make_tokenizer
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
Read = Callable[[int], Any]


def main() -> None:
    options = record.parser(
        __doc__,
        times=5,
        tries=(0, "of which the quietest count; as many as times if left out"),
        megatron=(Path, "folder with Megatron-Core"),
        folder=(Path, "for files; a temporary one if left out"),
        only=("", "questions whose names begin so"),
        case=("", "answer this one here"),
    ).parse_args()
    if options.case:
        if options.megatron:
            sys.path.insert(0, str(options.megatron))
        print(json.dumps(CASES[options.case](options.folder)))
        return
    has_megatron = options.megatron is not None
    names = [name for name in CASES if name.startswith(options.only) and (has_megatron or "megatron" not in name)]
    answers: dict[str, list[Answer]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as made:
        options.folder = options.folder or Path(made)
        prepare(options.folder)
        for _ in range(max(options.times, options.tries)):
            for name in names:
                answers[name].append(asked(name, options))
                record.show({"case": name, **answers[name][-1]})
    numbers = {}
    for name, several in answers.items():
        quietest = sorted(several, key=lambda answer: answer["others"])[: options.times]
        numbers[name] = {key: median(answer[key] for answer in quietest) for key in quietest[0]}
    environment = {"cpus": os.cpu_count(), "processor": processor_name(), "times": options.times}
    version = megatron_version(options.megatron)
    numbers = {"cases": numbers, "needed_tokens_per_second": NEEDED}
    record.write(options, numbers, megatron_core=version, **environment)


def processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def megatron_version(folder: Path | None) -> str:
    """Of the unpacked wheel, by the name of its folder of facts."""
    facts = sorted(folder.glob("megatron_core-*.dist-info")) if folder else []
    return facts[0].name.split("-")[1].removesuffix(".dist") if facts else "not measured"


def asked(name: str, options: argparse.Namespace) -> Answer:
    """The answer of a process of its own, and what others used of the processors meanwhile."""
    words = [sys.executable, "-m", "benchmarks.packing", "--case", name, "--folder", str(options.folder)]
    words += ["--megatron", str(options.megatron)] if options.megatron else []
    busy, used, begin = record.busy_seconds(), record.used_seconds(), time.perf_counter()
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    others = (record.busy_seconds() - busy) - (record.used_seconds() - used)
    return dict(json.loads(done.stdout.splitlines()[-1])) | {"others": others / (time.perf_counter() - begin)}


def prepare(folder: Path) -> None:
    """Text, tokenizer and a packed pair with `COPIES` of it, if they are not there."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, packed = folder / "tokenizer.json", folder / "made"
    if not tokenizer.exists():
        make_tokenizer(tokenizer)
    if not (folder / "corpus.jsonl").exists():
        lines = (text[start : start + LINE] for text in library_texts() for start in range(0, len(text), LINE))
        (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    if (folder / "read.idx").exists():
        return
    if not packed.with_suffix(".idx").exists():
        pack(lines_of(folder), packed, tokenizer=str(tokenizer))
    source = IndexedDataset(packed)
    documents = [source.document(number) for number in range(len(source))]
    with IndexedDatasetWriter(folder / "read", open_tokenizer(str(tokenizer)).vocab_size) as writer:
        for _ in range(COPIES):
            writer.write(np.concatenate(documents), np.array([len(document) for document in documents]))
        origin = origin_of(source.prefix)
        assert isinstance(origin, PackedMetadata), "a pair of ours says what it is"
        writer.finish(origin)


def lines_of(folder: Path) -> JsonLines:
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
    return JsonLines([folder / "corpus.jsonl"], tokenizer, corrupt=CorruptRecords())


@contextmanager
def timed() -> Iterator[Answer]:
    """Seconds of the clock and of the processor, of this process and those that it has waited for."""
    answer: Answer = {}
    begin, before = time.perf_counter(), record.used_seconds()
    yield answer
    answer.update(seconds=time.perf_counter() - begin, processor_seconds=record.used_seconds() - before)


def rates(answer: Answer, tokens: int, text_bytes: int = 0) -> Answer:
    rated = answer | {"tokens": tokens, "tokens_per_second": tokens / answer["seconds"]}
    rated["tokens_per_processor_second"] = tokens / answer["processor_seconds"]
    return rated | ({"mb_per_second": text_bytes / answer["seconds"] / 1e6} if text_bytes else {})


def pack_ours(processes: int, folder: Path) -> Answer:
    tokenizer = str(folder / "tokenizer.json")
    with tempfile.TemporaryDirectory() as target, timed() as answer:
        done = pack(lines_of(folder), Path(target, "a"), tokenizer=tokenizer, processes=processes)
    return rates(answer, done.origin.tokens, done.origin.text_bytes)


def pack_datasets(processes: int, folder: Path, *, through_transformers: bool = False) -> Answer:
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
            ids = [encoded.ids for encoded in plain.encode_batch_fast(batch["text"], add_special_tokens=False)]
        return {"input_ids": [document + end for document in ids]}

    with tempfile.TemporaryDirectory() as cache:
        with timed() as answer:
            files = str(folder / "corpus.jsonl")
            data = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
            done = data.map(encode, batched=True, num_proc=processes, remove_columns=["text"])
        tokens = sum(map(len, done["input_ids"]))
        text_bytes = sum(len(text.encode()) for text in data["text"])
    return rates(answer, tokens, text_bytes)


def read_documents(reader: Callable[[Path], tuple[Read, int]], folder: Path) -> Answer:
    read, count = reader(folder)
    order = list(range(count))
    random.Random(0).shuffle(order)
    for number in order[:2000]:
        read(number)
    tokens = 0
    with timed() as answer:
        for number in order:
            tokens += len(read(number).astype(np.int64))
    return rates(answer, tokens) | {"documents_per_second": count / answer["seconds"]}


def packed_of(folder: Path) -> PackedTokens:
    return open_packed([folder / "read"], keep=SplitFilter(), vocab_size=1 << 20)


def our_reader(folder: Path) -> tuple[Read, int]:
    source = packed_of(folder)
    return source.read, len(source)


def numpy_reader(folder: Path) -> tuple[Read, int]:
    """Reads the header, maps the ids, and slices: what any reader must do."""
    index = (folder / "read.idx").read_bytes()
    sequences = int(np.frombuffer(index, "<u8", 1, 18)[0])
    lengths = np.frombuffer(index, "<i4", sequences, 34)
    starts = np.frombuffer(index, "<i8", sequences, 34 + 4 * sequences) // 2
    tokens = np.memmap(folder / "read.bin", dtype="<u2", mode="r")
    return lambda number: tokens[starts[number] : starts[number] + lengths[number]], sequences


def megatron_reader(folder: Path) -> tuple[Read, int]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(folder / "read"), mmap=True)
    return data.get, len(data)


def our_rows(source: str, ranks: int, folder: Path, *, mask: bool) -> Answer:
    is_packed = source == "packed"
    documents = packed_of(folder) if is_packed else lines_of(folder)
    loader = Loader(documents, rows=ROWS, sequence_length=LENGTH, seed=0, document_mask=mask, ranks=ranks)
    loader.next_batch()
    batches = 400 if is_packed else 40
    with timed() as answer:
        for _ in range(batches):
            loader.next_batch()
    # Of several ranks, each sees all tokens of the batch go by.
    return rates(answer, batches * ROWS * LENGTH)


def megatron_rows(folder: Path, *, mask: bool) -> Answer:
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    samples, path = 400 * ROWS, str(folder / "read")
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=LENGTH,
        blend=([path], None),
        split="100,0,0",
        tokenizer=SimpleNamespace(eod=0, pad=-1, unique_identifiers={}, vocab_size=1 << 15),
        reset_position_ids=mask,
        reset_attention_mask=mask,
        eod_mask_loss=mask,
        create_attention_mask=False,
        path_to_cache=str(folder / "megatron"),
    )
    low = IndexedDataset(path, mmap=True)
    data = GPTDataset(low, path, np.arange(len(low), dtype=np.int32), samples + ROWS, Split.train, config)
    for number in range(ROWS):
        data[number]
    with timed() as answer:
        for number in range(ROWS, ROWS + samples):
            data[number]
    return rates(answer, samples * LENGTH)


MASKS = {"whole": False, "masked": True}
CASES: dict[str, Callable[[Path], Answer]] = {
    **{f"pack ours {count}": partial(pack_ours, count) for count in (1, 2)},
    **{f"pack datasets {count}": partial(pack_datasets, count) for count in (1, 2)},
    "pack datasets transformers 2": partial(pack_datasets, 2, through_transformers=True),
    "read ours": partial(read_documents, our_reader),
    "read numpy": partial(read_documents, numpy_reader),
    "read megatron": partial(read_documents, megatron_reader),
    **{
        f"rows {source} {seen} {ranks}": partial(our_rows, source, ranks, mask=mask)
        for source in ("packed", "jsonl")
        for seen, mask in MASKS.items()
        for ranks in (1, 8)
    },
    **{f"rows megatron {seen}": partial(megatron_rows, mask=mask) for seen, mask in MASKS.items()},
}


if __name__ == "__main__":
    main()
