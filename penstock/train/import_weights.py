"""Turns weights of other programs into the start of a run, a few tensors at a time.

    1. model    from the folder's config.json (penstock/models/huggingface/config.py), or a preset
    2. check    every tensor of the family's table exists, in its shape; nothing has been written yet
    3. pieces   each tensor is a rectangle of one of ours (penstock/models/huggingface/weight_names.py)
    4. write    into a hidden folder, which is renamed when it is complete

A dense model can become an MoE model ("upcycling", arXiv 2212.05055, 2410.07524): see `Upcycling`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.base.errors import CheckpointError, ConfigError
from penstock.base.files import write_whole
from penstock.config.load import dump_toml
from penstock.config.model import Model, Moe, Router
from penstock.config.run import Run
from penstock.layout.sharding import Rectangle
from penstock.models.huggingface.tensor_file import Make, parts_of
from penstock.models.huggingface.weight_folder import WeightSource
from penstock.models.huggingface.weights import WeightMapping, check_copies, check_weights, names_of, weight_mappings
from penstock.models.init import ParamInit
from penstock.parallel.shard import whole
from penstock.train.run_folder import complete_folder
from penstock.train.saved_weights import RUN_FILE, STEP, WEIGHTS, WeightPiece, write_weights
from penstock.train.state import identity_of

_DENSE = re.compile(r"(?P<layer>blocks\.\d+)\.ffn\.(?P<product>gate_up|down)\.weight")
_TARGETS = {"gate_up": "gate_up_eFD", "down": "down_eDF"}


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
    return (_piece(line, weights, names[line.hf_name]) for line in lines)


def _piece(line: WeightMapping, weights: WeightSource, name: str) -> WeightPiece:
    dtype = torch.bfloat16 if weights.dtype(name) == torch.bfloat16 else torch.float32
    parts: Sequence[Make] = (lambda: line.read(weights[name]).to(dtype).reshape(line.rectangle.sizes),)
    if line.is_copy and line.shape and weights.has_rows(name):
        blocks = parts_of(line.shape, dtype.itemsize)
        parts = [partial(_rows, weights, name, rows, dtype) for rows in blocks]
    return WeightPiece(name=line.name, shape=line.whole, rectangle=line.rectangle, dtype=dtype, parts=parts)


def _rows(weights: WeightSource, name: str, rows: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return weights.rows(name, rows).to(dtype)
