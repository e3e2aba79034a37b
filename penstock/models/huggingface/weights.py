"""Whole models in and out of Hugging Face's form, bit for bit."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from penstock.base.errors import CheckpointError
from penstock.config.model import Model
from penstock.models.decoder import Decoder
from penstock.models.huggingface.families import family_of
from penstock.models.huggingface.names import WeightName, weight_names
from penstock.models.huggingface.weight_folder import WeightFolder

WEIGHTS_FILE = "model.safetensors"
_HEAD = "lm_head.weight"


def to_huggingface(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, in the dtype and on the device it has; views where the form allows."""
    state = model.state_dict()
    for line in weight_names(model.config):
        yield line.theirs, line.write(line.place(state[line.ours]))


@torch.no_grad()
def from_huggingface(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Copy weights with Hugging Face names into a model.

    Args:
        model: the model, on any device; values are cast to its dtypes.
        weights: exactly the tensors of the model's table; those that are no weights of a text model may be there too.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is left over. Nothing is copied then.
    """
    state = model.state_dict()
    lines = weight_names(model.config)
    names = names_of(model.config, weights)
    refuse_other_weights(lines, weights, names)
    for line in lines:
        line.place(state[line.ours]).copy_(line.read(weights[names[line.theirs]]))


def names_of(config: Model, names: Iterable[str]) -> dict[str, str]:
    """Names of the table that are among these, with the names as they are there; other tensors are left out."""
    family = family_of(config)
    found = {text: name for name in names if (text := family.text_name(name)) is not None}
    if config.tie_word_embeddings:
        found.pop(_HEAD, None)  # some files repeat the embedding
    return found


def refuse_other_weights(lines: Sequence[WeightName], weights: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Check that weights are exactly those of a table.

    Args:
        lines: the table.
        weights: by name; of a `WeightFolder` none is read.
        names: `names_of` the weights.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is left over.
    """
    _refuse_unless_equal({line.theirs for line in lines}, set(names))
    for line in lines:
        _refuse_another_shape(line, weights, names[line.theirs])


def _refuse_another_shape(line: WeightName, weights: Mapping[str, Tensor], name: str) -> None:
    shape = weights.shape(name) if isinstance(weights, WeightFolder) else tuple(weights[name].shape)
    if shape != line.shape:
        raise CheckpointError(
            f"weight {name} has another shape",
            got=shape,
            allowed=line.shape,
            fix="choose the preset that these weights belong to",
        )


def _refuse_unless_equal(expected: set[str], given: set[str]) -> None:
    missing, extra = sorted(expected - given), sorted(given - expected)
    if missing or extra:
        raise CheckpointError(
            f"weights do not belong to this model: {len(missing)} missing, {len(extra)} unknown",
            got=f"missing {missing[:2]}, unknown {extra[:2]}",
            fix="choose the preset that these weights belong to",
        )


def load_huggingface(model: Decoder, folder: Path) -> None:
    """Read the safetensors files of a folder into a model, one tensor at a time.

    Raises:
        CheckpointError: as `from_huggingface` and `WeightFolder` do.
    """
    from_huggingface(model, WeightFolder(folder))
