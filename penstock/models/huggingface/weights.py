"""Weights in Hugging Face's form, bit for bit: which tensor of a file fills which of ours, and whole models in and out.

    for line in weight_mappings(config):
        line.place(state[line.name]).copy_(line.read(stored[line.hf_name]))      # in
        stored[line.hf_name] = line.write(line.place(state[line.name]))          # out, and `join` of divided tensors

One mapping per tensor of the file, or one per part of a tensor that several of ours fill (`Division`), so weights can
be converted one at a time. The meta model lists our parameters; the
family names them (`families`).
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from penstock.base.errors import CheckpointError, ConfigError
from penstock.config.model import Model
from penstock.layout.sharding import Rectangle
from penstock.models.build import meta_model
from penstock.models.decoder import Decoder
from penstock.models.huggingface.families import family_of
from penstock.models.huggingface.family import Family
from penstock.models.huggingface.weight_folder import WeightFolder, WeightSource
from penstock.models.huggingface.weight_names import Division, Rearrangement

WEIGHTS_FILE = "model.safetensors"
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COPY = re.compile(r"model\.layers\.\d+\.(?P<copy>embed_tokens|shared_head\.head)\.weight")
_OTHER_MODEL = "choose the preset that these weights belong to"

_LAYER = re.compile(r"(?:blocks\.(?P<layer>\d+)|mtp\.(?P<depth>\d+)\.block)\.(?P<rest>.+)")
_SUFFIX = re.compile(r"model\.layers\.\d+\.")
_PREDICTION = re.compile(r"mtp\.(?P<depth>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True, kw_only=True)
class WeightMapping:
    """One tensor of a file, and the part of our tensor that it fills."""

    name: str  # of our tensor in `Decoder.state_dict()`
    hf_name: str
    expert: int | None = None  # index of our dim 0 that it fills; None for all of it
    part: tuple[int, int] = (0, 1)  # (index, count): it fills one of `count` equal parts of the first remaining dim
    forms: tuple[Rearrangement, ...] = ()  # in the order of reading
    division: Division | None = None  # of the file's tensor, if several of ours fill it
    share: int = 0  # index of ours in the division
    whole: tuple[int, ...]  # shape of our tensor

    def place(self, ours: Tensor) -> Tensor:
        """The part of our tensor that it fills, as a view."""
        index, count = self.part
        return (ours if self.expert is None else ours[self.expert]).chunk(count)[index]

    @property
    def rectangle(self) -> Rectangle:
        """That part in our tensor."""
        begin, sizes, dim = [0] * len(self.whole), list(self.whole), 0
        if self.expert is not None:
            begin[0], sizes[0], dim = self.expert, 1, 1
        index, count = self.part
        sizes[dim] //= count
        begin[dim] = index * sizes[dim]
        return Rectangle(tuple(begin), tuple(sizes))

    @property
    def is_copy(self) -> bool:
        """Whether the values have the same order here and there."""
        return not self.forms and self.division is None

    def read(self, stored: Tensor) -> Tensor:
        """Convert from the layout of the file: our rows of its tensor."""
        if self.division is not None:
            stored = self.division.take(stored, self.share)
        for form in self.forms:
            stored = form.read(stored)
        return stored

    def write(self, target: Tensor) -> Tensor:
        """Convert that part of our tensor to the layout of the file; `join` makes a divided tensor of such parts."""
        for form in reversed(self.forms):
            target = form.write(target)
        return target

    def dtype_of(self, ours: torch.dtype) -> torch.dtype:
        """The type of the file's tensor, from that of ours."""
        return next((form.dtype for form in self.forms if form.dtype is not None), ours)

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *rest = self.write(self.place(torch.empty(self.whole, device="meta"))).shape
        return (rows if self.division is None else self.division.rows, *rest)


def by_file_tensor(lines: Iterable[WeightMapping]) -> list[tuple[WeightMapping, ...]]:
    """The mappings of each tensor of a file, mostly one, in the order of `join`."""
    mappings: dict[str, list[WeightMapping]] = {}
    for line in lines:
        mappings.setdefault(line.hf_name, []).append(line)
    return [tuple(sorted(many, key=lambda line: line.share)) for many in mappings.values()]


def join(lines: Sequence[WeightMapping], written: Sequence[Tensor]) -> Tensor:
    """The tensor of a file, from what its mappings `write`."""
    division = lines[0].division
    return written[0] if division is None else division.join(written)


def weight_mappings(config: Model, file_names: Collection[str] | None = None) -> list[WeightMapping]:
    """The mappings of a model, in the order of our tensors; `file_names` tell which of two forms a file has.

    Raises a ConfigError if the model's family has no Hugging Face names, or none for one of its parameters, and a
    CheckpointError if a file has far too few names: the model is not built then, which a `config.json` makes large.
    """
    family = family_of(config)
    known = {name for names in family.names.values() for name in names}
    others = {name for names in family.instead.values() for name in names} - known
    if file_names is not None and any(_is_there(name, file_names) for name in others):
        family = replace(family, names={**family.names, **family.instead}, instead={})
    least = config.layers
    if config.moe is not None and "{expert}" in family.names["ffn.experts.down_eDF"][0]:
        least += config.moe.experts * sum(not config.is_dense(layer) for layer in range(config.layers))
    if file_names is not None and len(file_names) < least:
        raise CheckpointError(
            f"weights do not belong to this model: it has more than {least:,} tensors, the files {len(file_names):,}",
            fix=_OTHER_MODEL,
        )
    state = meta_model(config).state_dict()
    return [line for name, tensor in state.items() for line in _mappings(config, family, name, tuple(tensor.shape))]


def _is_there(name: str, file_names: Collection[str]) -> bool:
    ending = f".{name.format(expert=0)}"
    return any(file_name.endswith(ending) for file_name in file_names)


def _mappings(config: Model, family: Family, name: str, whole: tuple[int, ...]) -> list[WeightMapping]:
    hf_names, rest, is_linear = _hf_names(config, family, name)
    if not hf_names:
        raise ConfigError(
            f"model.family {config.family} has no Hugging Face name for {name}",
            fix="leave out what the family does not have, or train it as plain",
        )
    # Queries of linear attention are not rotated.
    forms = tuple(form(config) for form in family.forms.get(rest, ()) if not is_linear or "rotary" not in form.__name__)
    division_of, ours = family.divided.get(_SUFFIX.sub("", hf_names[0]), (None, ()))
    experts = range(whole[0]) if "{expert}" in hf_names[0] else (None,)
    return [
        WeightMapping(
            name=name,
            hf_name=hf_name.format(expert=expert),
            expert=expert,
            part=(index, len(hf_names)),
            forms=forms,
            division=None if division_of is None else division_of(config),
            share=ours.index(rest) if ours else 0,
            whole=whole,
        )
        for expert in experts
        for index, hf_name in enumerate(hf_names)
    ]


def _hf_names(config: Model, family: Family, name: str) -> tuple[tuple[str, ...], str, bool]:
    """Returns (names in the file, none if the family has none; our name in its layer; whether that is linear)."""
    prefix, depth = "model.layers.{layer}.", 0
    if match := _LAYER.fullmatch(name):
        if match["depth"] is not None:
            prefix, depth = family.prediction_prefixes[1], int(match["depth"])
        layer = int(match["layer"] or 0) if match["depth"] is None else config.layers + depth
        is_linear = config.is_linear(layer) and match["rest"].startswith("attention")
        table = family.linear if is_linear else family.names
    elif match := _PREDICTION.fullmatch(name):
        prefix, depth = family.prediction_prefixes[0], int(match["depth"])
        layer, table, is_linear = config.layers + depth, family.prediction, False
    else:
        return family.model.get(name, ()), name, False
    prefix = prefix.format(layer=layer, depth=depth)
    return tuple(f"{prefix}{ending}" for ending in table.get(match["rest"], ())), match["rest"], is_linear


@torch.no_grad()
def from_huggingface(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Copy weights with Hugging Face names into a model on any device, one at a time, and cast them to its dtypes.

    Tensors that are not weights of a text model are ignored. If one is missing, unknown, or has another shape, a
    CheckpointError is raised before anything is copied.
    """
    state = model.state_dict()
    names = names_of(model.config, weights)
    lines = weight_mappings(model.config, names.keys())
    check_weights(lines, weights, names)
    check_copies(model.config, weights)
    for line in lines:
        line.place(state[line.name]).copy_(line.read(weights[names[line.hf_name]]))


def names_of(config: Model, names: Iterable[str]) -> dict[str, str]:
    """The names of a file's weights of the text model by `hf_name`; without prediction layers if the model has none."""
    family = family_of(config)
    text_names = {text: name for name in names if (text := family.text_name(name)) is not None}
    if not config.mtp_layers:
        text_names = {text: name for text, name in text_names.items() if family.depth_of(text, config.layers) is None}
    if config.tie_word_embeddings:
        text_names.pop(_HEAD, None)  # some files repeat the embedding: `check_copies`
    return text_names


def check_copies(config: Model, weights: Mapping[str, Tensor]) -> None:
    """Check that tensors which stand for the embedding or the output projection equal it. Raises a CheckpointError."""
    family = family_of(config)
    names = {name.replace(family.prefix, "", 1): name for name in weights}
    head = _EMBED if config.tie_word_embeddings else _HEAD
    copies = {_HEAD: _EMBED} if config.tie_word_embeddings else {}
    for name in names if config.mtp_layers else ():
        if match := _COPY.fullmatch(name):
            copies[name] = _EMBED if match["copy"] == "embed_tokens" else head
    for copy, original in copies.items():
        if copy in names and not _equal(weights[names[copy]], weights[names[original]]):
            raise CheckpointError(
                f"{names[copy]} differs from {names[original]}, which stands for both in this model",
                fix='set "tie_word_embeddings": false in config.json' if copy == _HEAD else "remove it from the files",
            )


def _equal(left: Tensor, other: Tensor) -> bool:
    same = left.shape == other.shape
    return same and torch.equal(left, other if left.dtype == other.dtype else other.to(left.dtype))


def with_prediction(config: Model, names: Iterable[str]) -> Model:
    """The model with the multi-token prediction that a file has, whatever its `config.json` says."""
    family = family_of(config)
    texts = (text for name in names if (text := family.text_name(name)) is not None)
    depths = {depth for text in texts if (depth := family.depth_of(text, config.layers)) is not None}
    return config.model_copy(update={"mtp_layers": len(depths)})


def check_weights(lines: Sequence[WeightMapping], weights: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Check that a file has exactly the weights of a model, without reading a `WeightSource`'s tensors.

    `names` are `names_of` the weights. Raises a CheckpointError if a tensor is missing, unknown, or has another shape.
    """
    expected = {line.hf_name for line in lines}
    missing, extra = sorted(expected - names.keys()), sorted(names.keys() - expected)
    if missing or extra:
        raise CheckpointError(
            f"weights do not belong to this model: {len(missing)} missing, {len(extra)} unknown",
            got=f"missing {missing[:2]}, unknown {extra[:2]}",
            fix=_OTHER_MODEL,
        )
    for line in lines:
        name = names[line.hf_name]
        shape = weights.shape(name) if isinstance(weights, WeightSource) else tuple(weights[name].shape)
        if shape != line.shape:
            raise CheckpointError(f"weight {name} has another shape", got=shape, allowed=line.shape, fix=_OTHER_MODEL)


def load_huggingface(model: Decoder, folder: Path) -> None:
    """`from_huggingface` of the safetensors files of a folder. Raises as it does, and as `WeightFolder`."""
    from_huggingface(model, WeightFolder(folder))
