"""Exports a checkpoint in Hugging Face form: safetensors with its names, `config.json`, and the tokenizer if possible.

Weights are read, converted and written a few at a time, so a model of any size passes. The folder is written under a
hidden name and then renamed. `verify_export` compares `transformers` with our own model on the exported files, in
float32 on the CPU.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.base.errors import CheckpointError, DeviceError
from penstock.base.files import sync
from penstock.config.model import Model
from penstock.config.run import Run
from penstock.data.tokenizer_output import export_tokenizer
from penstock.models.build import build_model, meta_model, to_dtype
from penstock.models.huggingface.config import huggingface_config
from penstock.models.huggingface.tensor_file import Make, TensorEntry, in_files, parts_of, write_entries
from penstock.models.huggingface.weights import (
    WEIGHTS_FILE,
    WeightMapping,
    by_file_tensor,
    join,
    load_huggingface,
    weight_mappings,
)
from penstock.train.checkpoint import CheckpointStore
from penstock.train.run_folder import complete_folder
from penstock.train.saved_weights import THREADS, SavedWeights, open_weights
from penstock.train.state import check_same_model, identity_of

Precision: TypeAlias = Literal["bf16", "fp32"]
"""As in `training.precision`."""

SHARD_BYTES = 5_000_000_000
"""Maximum file size; a larger model has several files and an index."""

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_METADATA = {"format": "pt"}


def export_huggingface(
    run: Run, store: CheckpointStore, step: int, folder: Path, precision: Precision, shard_bytes: int = SHARD_BYTES
) -> str:
    """Write the weights of a checkpoint for `transformers`, and the tokenizer; returns why it is not, else nothing.

    Router weights stay float32 in any `precision`, as in training. Only a file with one weight may be larger than
    `shard_bytes`. Raises a ConfigError if the model has no Hugging Face form, and a CheckpointError if the folder
    exists, the checkpoint cannot be used, or a write fails.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already", fix="give the name of a new folder")
    # Refuses a model without a Hugging Face form before anything is read.
    fields = huggingface_config(run.model, run.training.sequence_length)
    fields["dtype"] = "bfloat16" if precision == "bf16" else "float32"
    tokenizer = export_tokenizer(run.data, run.training.sequence_length)
    # Not pad_token_id: transformers keeps that token's embedding from learning. generation_config.json has it.
    fields["eos_token_id"] = tokenizer.end_of_document
    check_same_model(step, store.read_facts(step)["model"], identity_of(run))
    decoder = meta_model(run.model)
    to_dtype(decoder, torch.bfloat16 if precision == "bf16" else torch.float32)
    weights = decoder.state_dict()
    texts = {"config.json": json.dumps(fields, indent=2) + "\n", **tokenizer.files}
    try:
        with complete_folder(folder) as draft:
            with open_weights(store, step, weights) as saved:
                _write_files(_entries(run.model, saved, weights), draft, shard_bytes)
            for name, text in texts.items():
                (draft / name).write_text(text, encoding="utf-8")
                sync(draft / name)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}", got=error) from error
    return tokenizer.why_not


def _entries(model: Model, saved: SavedWeights, weights: Mapping[str, Tensor]) -> list[TensorEntry]:
    """Every weight in Hugging Face form, with the type that it has in `weights`, computed when it is written."""
    entries = []
    for lines in by_file_tensor(weight_mappings(model)):
        line, dtype = lines[0], weights[lines[0].name].dtype
        parts: Sequence[Make] = (partial(_values, lines, saved, dtype),)
        if line.is_copy and line.shape:
            parts = [partial(_rows, line, saved, dtype, rows) for rows in parts_of(line.shape, dtype.itemsize)]
        entries.append(TensorEntry(name=line.hf_name, dtype=dtype, shape=line.shape, parts=parts))
    return entries


def _values(lines: Sequence[WeightMapping], saved: SavedWeights, dtype: torch.dtype) -> Tensor:
    ours = ((line, saved.read(line.name, line.rectangle, dtype)) for line in lines)
    return join(lines, [line.write(values if line.expert is None else values[0]) for line, values in ours])


def _rows(line: WeightMapping, saved: SavedWeights, dtype: torch.dtype, rows: tuple[int, int]) -> Tensor:
    return saved.read(line.name, line.rectangle.rows(line.expert is not None, *rows), dtype)


def _write_files(entries: list[TensorEntry], folder: Path, shard_bytes: int) -> None:
    shards = list(in_files(entries, lambda entry: entry.nbytes, shard_bytes))
    if len(shards) == 1:
        write_entries(folder / WEIGHTS_FILE, entries, _METADATA, threads=THREADS, summed=False)
        return
    stem, suffix = WEIGHTS_FILE.split(".")
    places: dict[str, str] = {}
    blocks: list[np.ndarray] = []
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        write_entries(folder / name, shard, _METADATA, blocks, THREADS, summed=False)
        places |= {entry.name: name for entry in shard}
    index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    sync(folder / INDEX_FILE)


ROWS, POSITIONS = 2, 64
TOLERANCE = 1e-4
"""Of the largest difference of two logits, over the largest logit."""


@torch.no_grad()
def verify_export(run: Run, folder: Path) -> float:
    """Compare logits of random tokens; returns the largest difference over the largest logit.

    Raises a DeviceError if `transformers` is not installed, and a CheckpointError if it cannot read the folder, or
    computes other logits.
    """
    library = import_transformers()
    try:
        theirs = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot read {folder}", got=error) from error
    training = run.training.model_copy(update={"precision": "fp32"})
    ours = build_model(run.model_copy(update={"training": training, "device": "cpu"}), torch.device("cpu")).eval()
    load_huggingface(ours, folder)
    positions = min(POSITIONS, run.training.sequence_length)
    tokens_BS = torch.randint(run.model.vocab_size, (ROWS, positions), generator=torch.Generator().manual_seed(0))
    logits_BSV = ours.logits(tokens_BS, torch.arange(positions).expand(ROWS, -1))
    expected_BSV = theirs(tokens_BS, use_cache=False).logits
    apart = float((logits_BSV - expected_BSV).abs().max() / expected_BSV.abs().max())
    if not apart <= TOLERANCE:  # also for NaN
        raise CheckpointError(
            f"transformers computes other logits from {folder}", got=f"{apart:.1e} apart", allowed=f"{TOLERANCE:g}"
        )
    return apart


def import_transformers() -> Any:
    """The library. Raises a DeviceError if it is not installed."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise DeviceError(
            "--verify needs transformers", got=str(error), fix="pip install transformers, or leave --verify out"
        ) from error
