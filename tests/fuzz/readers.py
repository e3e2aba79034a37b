"""Every reader of files that others may have made: its valid material, how a case damages it, and what reads it.

Material lies in a folder of its own; `damage` and `read` get a copy, which is the present folder.
"""

import bz2
import gzip
import json
import lzma
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from penstock.cli.import_weights import import_
from penstock.config.load import dump_toml, load_run
from penstock.config.run import Data
from penstock.data.open import open_text
from penstock.data.packed import pack
from penstock.data.text import JsonLines
from penstock.data.tokenizer import ByteTokenizer, open_tokenizer
from penstock.kernels.choose import load as load_measured
from penstock.models.huggingface.config import class_defaults
from penstock.models.huggingface.tensor_file import fingerprint
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import project
from penstock.report.run_evidence import gather
from penstock.report.run_page import run_page
from penstock.trace.analysis import analyse_files, analysis_json
from penstock.trace.replay import replay_script
from penstock.train import manifest as manifest_module
from penstock.train.loop import Progress, open_store, resume, train_run
from penstock.train.manifest import MANIFEST
from penstock.train.metrics import drop_after
from penstock.train.run_folder import RunFolder
from penstock.train.saved_weights import chosen_step, open_saved
from penstock.train.setup import Session, prepare
from penstock.train.step import StopRequest
from penstock.train.weight_exchange import export_huggingface
from penstock.tune.ladder import load_ladder_steps
from tests.data.vocabularies import HARD_TEXTS, SENTENCES, json_file, sentencepiece_model, tiktoken_file
from tests.fuzz.damage import TOKENS, VALUES, of_bytes, of_json, of_text, packed
from tests.models.families import save_huggingface, tiny_decoder
from tests.models.huggingface.family_models import VARIANTS
from tests.report.made_runs import run_folder
from tests.trace.test_experts import grouped_events, recording
from tests.trace.test_replay import split
from tests.trace.tiny import load_trace, text_of, tiny, trace_of
from tests.train.tiny_run import ENVIRONMENT, byte_run

MOST_BYTES = 4 * 10**9
Damage = Callable[[bytes, random.Random], bytes]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in (*HARD_TEXTS, *SENTENCES) if text)
PRESET = "debug-2l"


@dataclass(frozen=True)
class Reader:
    """A reader of files."""

    make: Callable[[Path], object]  # writes the material into a folder
    damage: Callable[[Path, random.Random], object]
    read: Callable[[Path], object]
    most_bytes: int = MOST_BYTES  # of memory


def _one_of(pattern: str, change: Damage) -> Callable[[Path, random.Random], None]:
    """Damage to one of the files of a pattern."""

    def damage(folder: Path, draw: random.Random) -> None:
        path = draw.choice(sorted(path for path in folder.rglob(pattern) if path.is_file()))
        path.write_bytes(change(path.read_bytes(), draw))

    return damage


# ------------------------------------------------------------------------------------------------------------ settings


def _make_config(folder: Path) -> None:
    run = byte_run(Path("runs"))
    (folder / "run.toml").write_text(dump_toml(run))
    (folder / "preset.toml").write_text(
        f'preset = "{PRESET}"\ntraining.steps = 3\n[data]\nsource = "text"\nfiles = ["a", "b"]\n'
    )


def _make_override(folder: Path) -> None:
    (folder / "override.txt").write_text("seed=3")


def _draw_override(folder: Path, draw: random.Random) -> None:
    table = dump_toml(byte_run(Path("runs"))).splitlines()
    section, lines = "", []
    for line in table:
        if line.startswith("["):
            section = line.strip("[]") + "."
        elif " = " in line:
            name, _, value = line.partition(" = ")
            lines.append((f"{section}{name}", value))
    name, value = draw.choice(lines)
    if draw.random() < 0.3:
        text = of_text(f"{name}={value}".encode(), draw).decode(errors="surrogateescape")
    else:
        text = f"{name}={draw.choice(TOKENS)}"
    (folder / "override.txt").write_bytes(text.encode(errors="surrogateescape"))


def _read_config(folder: Path) -> None:
    for path in folder.glob("*.toml"):
        dump_toml(load_run(str(path)))


def _read_override(folder: Path) -> None:
    text = (folder / "override.txt").read_bytes().decode(errors="surrogateescape")
    dump_toml(load_run(PRESET, [text]))


def _make_hardware(folder: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "penstock/base/hardware_data"
    for name in ("h200", "mi300x"):
        shutil.copy(source / f"{name}.toml", folder)


def _read_hardware(folder: Path) -> None:
    for path in sorted(folder.glob("*.toml")):
        project(
            load_run(PRESET, ["device=cpu", "parallel.expert=2", "training.micro_batch=2"]), parse_cluster(f"2x{path}")
        )


def _make_ladder(folder: Path) -> None:
    step = '[[step]]\nname = "{}"\nwhat = "{}"\nchange = ["{}"]\nneeds = ["experts"]\n'
    (folder / "ladder.toml").write_text(
        step.format("a", "eager", "kernels.experts=torch") + step.format("b", "more", "training.micro_batch=2")
    )


def _make_measured(folder: Path) -> None:
    source = Path(__file__).resolve().parents[2] / "penstock/kernels/measured_data/nvidia-h200.json"
    content = json.loads(source.read_text())
    for key, value in content.items():
        content[key] = value[:20] if isinstance(value, list) else value
    (folder / "measured.json").write_text(json.dumps(content))


# ----------------------------------------------------------------------------------------------------------------- runs


def _session(folder: Path) -> Session:
    return prepare(byte_run(folder / "runs"), ENVIRONMENT)


def _make_run(folder: Path) -> None:
    run = byte_run(folder / "runs")
    path = RunFolder(folder / "runs/tiny")
    path.checkpoints.mkdir(parents=True)
    session = _session(folder)
    with StopRequest() as stop:
        train_run(session, path, open_store(session.run, path), Progress(), [], stop)
    shutil.rmtree(path.checkpoints / "step-000002")
    path.write_config(run.model_copy(update={"record": run.record.model_copy(update={"folder": "runs"})}))
    run_folder(folder / "made", steps=4)
    shutil.copy(folder / "made/metrics.jsonl", path.metrics)


@cache
def _cached_session() -> Session:
    return _session(Path())


def _damage_checkpoint(folder: Path, draw: random.Random) -> None:
    """Damage to a file of a checkpoint; half of the time its checksums are made to fit."""
    (place,) = folder.glob("runs/tiny/checkpoints/*")
    path = draw.choice(sorted(place.iterdir()))
    path.write_bytes((of_json if path.suffix == ".json" else of_bytes)(path.read_bytes(), draw))
    if draw.random() < 0.5:
        return
    try:
        content = json.loads((place / MANIFEST).read_bytes())
        content.pop("seal", None)
        for name in content["files"]:
            content["files"][name] = fingerprint(place / name)
        (place / MANIFEST).write_text(json.dumps({**content, "seal": manifest_module._seal(content)}))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return  # it stays as damaged as it is


def _read_checkpoint(folder: Path) -> None:
    session = _cached_session()
    resume(session, RunFolder(folder / "runs/tiny"), open_store(session.run, RunFolder(folder / "runs/tiny")))


def _read_saved(folder: Path) -> None:
    run, store = open_saved(folder / "runs/tiny")
    export_huggingface(run, store, chosen_step(store, folder, None), folder / "out", "fp32")


def _of_header(content: bytes, draw: random.Random) -> bytes:
    """Damage to the JSON header of a safetensors file, whose length fits."""
    size = int.from_bytes(content[:8], "little")
    header = of_json(content[8 : 8 + size], draw)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def _make_weights(variant: str, folder: Path) -> None:
    save_huggingface(tiny_decoder(VARIANTS[variant]), folder / "weights")


_ODD_VALUES = (
    *(
        *VALUES,
        -8,
        3,
        8.0,
        65_536,
        10_000,
        10**7,
        0.25,
        "silu",
        "gelu",
        "yarn",
        "fp8",
        "gptq",
        [0, 1],
        [8, 8],
        [[8, 8]],
    ),
    *(
        {"rope_type": "yarn", "factor": 0},
        {"rope_type": "llama3"},
        {"quant_method": "fp8", "weight_block_size": [0, 8]},
    ),
)
_ODD_KEYS = ("quantization_config", "text_config", "rope_scaling", "rope_parameters", "model_type", "layer_types")


def _damage_weights(folder: Path, draw: random.Random) -> None:
    """Damage to `config.json`, to the header of the weights, or to both; in some cases there is a damaged index."""
    config, weights = folder / "weights/config.json", folder / "weights/model.safetensors"
    kind = draw.random()
    if kind < 0.6:
        fields = json.loads(config.read_bytes())
        keys = [*fields, *class_defaults()[fields["model_type"]]["defaults"], *_ODD_KEYS]
        for _ in range(draw.choice((1, 1, 2))):
            fields[draw.choice(keys)] = draw.choice(_ODD_VALUES)
        content = json.dumps(fields).encode()
        config.write_bytes(content if draw.random() < 0.7 else of_json(config.read_bytes(), draw))
    if kind > 0.5:
        weights.write_bytes(draw.choice((_of_header, of_bytes))(weights.read_bytes(), draw))
    if draw.random() < 0.1:
        index = {"metadata": {"total_size": 3}, "weight_map": {"lm_head.weight": weights.name, "b": "b.safetensors"}}
        (folder / "weights/model.safetensors.index.json").write_bytes(of_json(json.dumps(index).encode(), draw))


def _read_weights(folder: Path) -> None:
    synthetic = ["data.source=synthetic-learnable", "training.sequence_length=16"]
    import_(folder / "weights", synthetic, output=folder / "alone", config_only=True)
    import_(folder / "weights", synthetic, output=folder / "start")


WEIGHTS: Mapping[str, Reader] = {
    f"weights of {variant}": Reader(partial(_make_weights, variant), _damage_weights, _read_weights, 2 * 10**9)
    for variant in VARIANTS
    if "," not in variant
}
"""Folders of Hugging Face weights, one of each family."""


def _read_metrics(folder: Path) -> None:
    drop_after(folder / "made/metrics.jsonl", 2)


def _read_report(folder: Path) -> None:
    run_page(gather(folder / "made", plans=False))


# ----------------------------------------------------------------------------------------------------------------- text


def _make_lines(folder: Path) -> None:
    content = LINES.encode()
    (folder / "a.jsonl").write_bytes(content)
    (folder / "a.txt").write_text("the town\n" * 40)
    for suffix, compress in {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}.items():
        (folder / f"a.jsonl.{suffix}").write_bytes(compress(content))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(content))


def _make_tables(folder: Path) -> None:
    table = pa.table({"id": list(range(60)), "text": [text or "x" for text in HARD_TEXTS[:12]] * 5})
    pq.write_table(table, folder / "a.parquet", row_group_size=20)
    pq.write_table(table, folder / "b.parquet", row_group_size=20, compression="zstd", use_dictionary=False)
    dictionary = table.set_column(1, "text", table["text"].dictionary_encode())
    for name, one, compression in (("a", table, None), ("b", table, "lz4"), ("c", dictionary, None)):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        make = pa.ipc.new_stream if name == "b" else pa.ipc.new_file
        with make(str(folder / f"{name}.arrow"), one.schema, options=options) as writer:
            for batch in one.to_batches(max_chunksize=20):
                writer.write_batch(batch)


def _read_texts(source: str, pattern: str, folder: Path) -> None:
    """Read every document of every file, without those that are damaged."""
    for path in sorted(folder.glob(pattern)):
        settings = Data(source=source, files=(str(path),), corrupt="skip", validation_share=0.0)  # type: ignore[arg-type]
        text = open_text(settings, "train", vocab_size=300, seed=0, cache=folder / "cache")
        for documents in (part.documents for part in text.parts):
            for number in range(len(documents)):
                documents.read(number)


def _make_packed(folder: Path) -> None:
    (folder / "a.jsonl").write_text(LINES)
    pack(JsonLines([folder / "a.jsonl"], ByteTokenizer()), folder / "a", tokenizer="bytes")
    (folder / "a.jsonl").unlink()


def _make_tokenizers(folder: Path) -> None:
    json_file(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')


def _make_tiktoken(folder: Path) -> None:
    tiktoken_file(folder / "a.tiktoken")
    (folder / "a.tiktoken.json").write_text('{"pattern": "cl100k", "special_tokens": {"<|endoftext|>": 300}}')


def _read_tokenizer(name: str, folder: Path) -> None:
    tokenizer = open_tokenizer(str(folder / name))
    for text in HARD_TEXTS:
        tokens = tokenizer.encode(text)
        tokenizer.bytes_per_token(text)
        tokenizer.decode(tokens)


# --------------------------------------------------------------------------------------------------------------- traces


def _make_traces(folder: Path) -> None:
    (folder / "a.json.gz").write_bytes(gzip.compress(text_of(tiny())))
    counts = trace_of(split(80, [7, 0, 5]), *grouped_events()) | {"penstock": recording()}
    (folder / "b.json.gz").write_bytes(gzip.compress(text_of(counts)))


def _read_traces(folder: Path) -> None:
    for path in (folder / "a.json.gz", folder / "b.json.gz"):
        json.dumps(analysis_json(analyse_files([path])), allow_nan=False)
    replay_script(load_trace(path), "aten::_grouped_mm")


def _damage_trace(content: bytes, draw: random.Random) -> bytes:
    return of_json(content, draw) if draw.random() < 0.8 else of_text(content, draw)


READERS: Mapping[str, Reader] = {
    "config": Reader(_make_config, _one_of("*.toml", of_text), _read_config),
    "override": Reader(_make_override, _draw_override, _read_override),
    "hardware": Reader(_make_hardware, _one_of("*.toml", of_text), _read_hardware),
    "ladder": Reader(
        _make_ladder, _one_of("*.toml", of_text), lambda folder: load_ladder_steps(folder / "ladder.toml")
    ),
    "measured": Reader(
        _make_measured, _one_of("*.json", of_json), lambda folder: load_measured(folder / "measured.json")
    ),
    "checkpoint": Reader(_make_run, _damage_checkpoint, _read_checkpoint),
    "saved weights": Reader(_make_run, _damage_checkpoint, _read_saved),
    "metrics": Reader(_make_run, _one_of("metrics.jsonl", of_text), _read_metrics),
    "report": Reader(_make_run, _one_of("made/*", of_text), _read_report),
    "text": Reader(_make_lines, _one_of("a.txt", of_bytes), partial(_read_texts, "text", "a.txt")),
    "jsonl": Reader(_make_lines, _one_of("a.jsonl*", of_bytes), partial(_read_texts, "jsonl", "a.jsonl*")),
    "parquet": Reader(_make_tables, _one_of("*.parquet", of_bytes), partial(_read_texts, "parquet", "*.parquet")),
    "arrow": Reader(_make_tables, _one_of("*.arrow", of_bytes), partial(_read_texts, "parquet", "*.arrow")),
    "packed": Reader(_make_packed, _one_of("a.*", of_bytes), partial(_read_texts, "packed", "*.idx")),
    "tokenizer": Reader(_make_tokenizers, _one_of("*.json", of_json), partial(_read_tokenizer, ".")),
    "sentencepiece": Reader(
        lambda folder: sentencepiece_model(folder / "a.model"),
        _one_of("*.model", of_bytes),
        partial(_read_tokenizer, "a.model"),
    ),
    "tiktoken": Reader(_make_tiktoken, _one_of("*", of_text), partial(_read_tokenizer, "a.tiktoken")),
    "trace": Reader(_make_traces, _one_of("*.gz", packed(_damage_trace)), _read_traces),
}
