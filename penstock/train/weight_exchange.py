"""Exports a checkpoint in Hugging Face form, and turns weights of other programs into the start of a run.

Weights are read, converted and written a few at a time, so a model of any size passes. A folder is written under a
hidden name and then renamed. `verify_export` compares `transformers` with our own model on the exported files, in
float32 on the CPU. An import has four parts:

    1. model    from the folder's config.json (penstock/models/huggingface/config.py), or a preset
    2. check    every tensor of the family's table exists, in its shape; nothing has been written yet
    3. pieces   each tensor is a rectangle of one of ours (penstock/models/huggingface/weight_names.py)
    4. write    into a hidden folder, which is renamed when it is complete

A dense model can become an MoE model ("upcycling", arXiv 2212.05055, 2410.07524): see `Upcycling`.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.base.errors import CheckpointError, ConfigError, DeviceError
from penstock.base.files import sync, write_whole
from penstock.config.load import dump_toml
from penstock.config.model import Model, Moe, Router
from penstock.config.run import Run
from penstock.data.tokenizer_output import export_tokenizer
from penstock.kernels.mxfp4 import BLOCK, pack_mxfp4, to_mxfp4
from penstock.layout.sharding import Rectangle
from penstock.models.build import build_model, compute_dtype, meta_model, to_dtype
from penstock.models.huggingface.config import huggingface_config
from penstock.models.huggingface.families import family_of
from penstock.models.huggingface.tensor_file import Make, TensorEntry, in_files, parts_of, write_entries
from penstock.models.huggingface.weight_folder import BLOCKS, SCALES, WeightSource
from penstock.models.huggingface.weights import (
    WEIGHTS_FILE,
    WeightMapping,
    by_file_tensor,
    check_copies,
    check_weights,
    join,
    load_huggingface,
    names_of,
    weight_mappings,
)
from penstock.models.parameters import ParamInit
from penstock.parallel.shard import whole
from penstock.train.checkpoint import CheckpointStore
from penstock.train.run_folder import complete_folder
from penstock.train.saved_weights import (
    RUN_FILE,
    STEP,
    THREADS,
    WEIGHTS,
    SavedWeights,
    WeightPiece,
    open_weights,
    write_weights,
)
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

    Router weights stay float32 in any `precision`, as in training. Experts of `qat.experts` are the numbers that the
    run's products read, packed if the family has such files, else in the `precision`. Only a file with one weight may
    be larger than `shard_bytes`. Raises a ConfigError if the model has no Hugging Face form, and a CheckpointError
    if the folder exists, the checkpoint cannot be used, or a write fails.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already", fix="give the name of a new folder")
    # Refuses a model without a Hugging Face form before anything is read.
    fields = huggingface_config(run.model, run.training.sequence_length)
    fields["dtype"] = "bfloat16" if precision == "bf16" else "float32"
    if _is_packed(run):
        fields["quantization_config"] = dict(family_of(run.model).mxfp4)
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
                _write_files(_entries(run, saved, weights), draft, shard_bytes)
            for name, text in texts.items():
                (draft / name).write_text(text, encoding="utf-8")
                sync(draft / name)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}", got=error) from error
    return tokenizer.why_not


Read: TypeAlias = Callable[[str, Rectangle, torch.dtype], Tensor]
"""`SavedWeights.read`, or the same with experts rounded."""


def _entries(run: Run, saved: SavedWeights, weights: Mapping[str, Tensor]) -> list[TensorEntry]:
    """Every weight in Hugging Face form, with the type that it has in `weights`, computed when it is written."""
    read = saved.read if run.qat.experts == "none" else partial(_read_rounded, saved, compute_dtype(run))
    entries: list[TensorEntry] = []
    for lines in by_file_tensor(weight_mappings(run.model)):
        line, dtype = lines[0], weights[lines[0].name].dtype
        if _is_packed(run) and line.name.endswith(_MATRICES):
            entries += _packed(line, saved, compute_dtype(run))
            continue
        parts: Sequence[Make] = (partial(_values, lines, read, dtype),)
        if line.is_copy and line.shape:
            parts = [partial(_rows, line, read, dtype, rows) for rows in parts_of(line.shape, dtype.itemsize)]
        entries.append(TensorEntry(name=line.hf_name, dtype=line.dtype_of(dtype), shape=line.shape, parts=parts))
    return entries


def _values(lines: Sequence[WeightMapping], read: Read, dtype: torch.dtype) -> Tensor:
    ours = ((line, read(line.name, line.rectangle, dtype)) for line in lines)
    return join(lines, [line.write(values if line.expert is None else values[0]) for line, values in ours])


def _rows(line: WeightMapping, read: Read, dtype: torch.dtype, rows: tuple[int, int]) -> Tensor:
    return read(line.name, line.rectangle.rows(line.expert is not None, *rows), dtype)


def _is_packed(run: Run) -> bool:
    return run.qat.experts == "mxfp4" and bool(family_of(run.model).mxfp4)


def _read_rounded(
    saved: SavedWeights, computed: torch.dtype, name: str, rectangle: Rectangle, dtype: torch.dtype
) -> Tensor:
    """A rectangle of whole rows; experts' matrices as products round them, from the dtype of the computation."""
    if not name.endswith(_MATRICES):
        return saved.read(name, rectangle, dtype)
    values = saved.read(name, rectangle, computed)
    for matrix in values:  # one at a time: rounding needs several times its memory
        matrix.copy_(to_mxfp4(matrix))
    return values.to(dtype)


def _packed(line: WeightMapping, saved: SavedWeights, computed: torch.dtype) -> list[TensorEntry]:
    """Both tensors of a stack in MXFP4, made expert by expert."""
    experts, inputs, outputs = line.shape

    def make(index: int, expert: int) -> Tensor:
        values = saved.read(line.name, line.rectangle.rows(0, expert, expert + 1), computed)
        return pack_mxfp4(line.write(values).mT)[index]

    sizes = (experts, outputs, inputs // BLOCK)
    return [
        TensorEntry(
            name=f"{line.hf_name}{ending}",
            dtype=torch.uint8,
            shape=shape,
            parts=[partial(make, index, expert) for expert in range(experts)],
        )
        for index, (ending, shape) in enumerate({BLOCKS: (*sizes, BLOCK // 2), SCALES: sizes}.items())
    ]


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
        options = {"quantization_config": library.Mxfp4Config(dequantize=True)} if _is_packed(run) else {}
        kind = getattr(library, family_of(run.model).architecture)
        theirs = kind.from_pretrained(folder, dtype=torch.float32, **options).eval()
    except (AttributeError, OSError, ValueError, KeyError, RuntimeError) as error:
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


_DENSE = re.compile(r"(?P<layer>blocks\.\d+)\.ffn\.(?P<product>gate_up|down)\.weight")
_TARGETS = {"gate_up": "gate_up_eFD", "down": "down_eDF"}
_MATRICES = tuple(f".experts.{name}" for name in _TARGETS.values())


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """An MoE model from a dense one that computes the same function at first.

    Every expert is a copy of the dense network, and the weights of the chosen ones sum to 1. With `granularity` G a
    copy is cut into G experts, each with a part of its width. The G parts have the same logit at first, so a token
    chooses all parts of a copy or none; each has 1 / G of the copy's weight, which the router's scale compensates.
    """

    copies: int  # of the dense network in each layer
    chosen: int  # copies for each token
    granularity: int = 1  # experts for each copy
    seed: int = 0  # of the routers' weights

    def model(self, dense: Model) -> Model:
        """The MoE model. Raises a ConfigError if the source is not dense, or cannot be cut this way."""
        if dense.moe is not None:
            raise ConfigError("only a dense model can be made one with experts", got=f"a {dense.family} with experts")
        if not 1 <= self.chosen <= self.copies or dense.intermediate_size % self.granularity:
            raise ConfigError(
                "a dense model cannot be made one with such experts",
                got=f"{self.chosen} of {self.copies} copies, each cut into {self.granularity}",
                allowed=f"1 to {self.copies} of {self.copies}; a number that divides {dense.intermediate_size}",
            )
        family = {"llama": "mixtral", "qwen3": "qwen3-moe"}.get(dense.family, "plain")
        after = family == "mixtral"
        # A normalized weight of a single choice is always 1; only a softmax over all experts lets the router learn.
        normalize = not after and self.chosen * self.granularity > 1
        moe = Moe(
            experts=self.copies * self.granularity,
            top_k=self.chosen * self.granularity,
            moe_intermediate_size=dense.intermediate_size // self.granularity,
            router=Router(
                softmax_after_top_k=after, norm_topk_prob=normalize, routed_scaling_factor=float(self.granularity)
            ),
        )
        return dense.model_copy(update={"family": family, "dense_layers": 0, "intermediate_size": 0, "moe": moe})

    def pieces(self, dense: Model, pieces: Iterator[WeightPiece]) -> Iterator[WeightPiece]:
        for piece in pieces:
            match = _DENSE.fullmatch(piece.name)
            if match is None:
                yield piece
                continue
            yield from self._experts(dense, piece, match["layer"], match["product"])
            if match["product"] == "down":
                yield self._router(dense, f"{match['layer']}.ffn.router.weight_ED")

    def _experts(self, dense: Model, piece: WeightPiece, layer: str, product: str) -> Iterator[WeightPiece]:
        width = dense.intermediate_size // self.granularity  # F of an expert
        dim = 0 if product == "gate_up" else 1  # of the F of a matrix: gate_up is 2F x D, down is D x F
        experts = self.copies * self.granularity
        shape = (experts, 2 * width, dense.hidden_size) if dim == 0 else (experts, dense.hidden_size, width)
        half = piece.rectangle.begin[0] // dense.intermediate_size if dim == 0 else 0
        for expert in range(experts):
            part = expert % self.granularity
            begin, sizes = [expert, 0, 0], [1, *shape[1:]]
            begin[1 + dim], sizes[1 + dim] = half * width, width
            yield WeightPiece(
                name=f"{layer}.ffn.experts.{_TARGETS[product]}",
                shape=shape,
                rectangle=Rectangle(tuple(begin), tuple(sizes)),
                dtype=piece.dtype,
                parts=(partial(_part_of, piece, dim, part * width, width),),
            )

    def _router(self, dense: Model, name: str) -> WeightPiece:
        experts = self.copies * self.granularity
        shape = (experts, dense.hidden_size)

        def make() -> Tensor:
            copies = torch.zeros(self.copies, dense.hidden_size)
            draw = ParamInit(seed=self.seed, name=name, std=dense.initializer_range, device=torch.device("cpu"))
            draw.fill(whole(copies))
            return copies.repeat_interleave(self.granularity, 0)

        return WeightPiece(
            name=name, shape=shape, rectangle=Rectangle((0, 0), shape), dtype=torch.float32, parts=(make,)
        )


def _part_of(piece: WeightPiece, dim: int, begin: int, size: int) -> Tensor:
    return piece.values().narrow(dim, begin, size)[None]


def import_weights(
    weights: WeightSource | None, source: Model, run: Run, upcycling: Upcycling | None, folder: Path
) -> None:
    """Write the weights of a `source` model as the start of a run, whose `training.initial_weights` names the folder.

    Without weights the run alone is written. `upcycling` makes the run's model of `source`; None if they are the same.
    Raises a CheckpointError if the weights are not those of the model, cannot be read, or a write fails.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already", fix="give the name of a new folder")
    pieces = None if weights is None else _checked_pieces(weights, source)
    if pieces is not None and upcycling is not None:
        pieces = upcycling.pieces(source, pieces)
    facts: dict[str, Any] = {"step": STEP, "model": identity_of(run)}
    try:
        with complete_folder(folder) as draft:
            if pieces is not None:
                write_weights(draft / WEIGHTS / f"step-{STEP:06d}", pieces, facts)
            write_whole(draft / RUN_FILE, dump_toml(run))
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}", got=error) from error


def _checked_pieces(weights: WeightSource, source: Model) -> Iterator[WeightPiece]:
    names = names_of(source, weights)
    lines = weight_mappings(source, names.keys())
    check_weights(lines, weights, names)
    check_copies(source, weights)
    return (_weight_piece(line, weights, names[line.hf_name]) for line in lines)


def _weight_piece(line: WeightMapping, weights: WeightSource, name: str) -> WeightPiece:
    dtype = torch.bfloat16 if weights.dtype(name) == torch.bfloat16 else torch.float32
    parts: Sequence[Make] = (lambda: line.read(weights[name]).to(dtype).reshape(line.rectangle.sizes),)
    if line.is_copy and line.shape and weights.has_rows(name):
        blocks = parts_of(line.shape, dtype.itemsize)
        parts = [partial(_file_rows, weights, name, rows, dtype) for rows in blocks]
    return WeightPiece(name=line.name, shape=line.whole, rectangle=line.rectangle, dtype=dtype, parts=parts)


def _file_rows(weights: WeightSource, name: str, rows: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return weights.rows(name, rows).to(dtype)
