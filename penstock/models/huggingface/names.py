"""What of ours each tensor there fills, and how: one line for each tensor, so weights can travel one at a time.

    for line in weight_names(config):
        line.place(state[line.ours]).copy_(line.read(theirs[line.theirs]))      # in
        theirs[line.theirs] = line.write(line.place(state[line.ours]))          # out

The model itself says which parameters it has; the family says what they are called there (`families`).
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.base.errors import ConfigError
from penstock.config.model import Model
from penstock.layout.rectangles import Rectangle
from penstock.models.build import meta_model
from penstock.models.huggingface.families import MODEL, Family, family_of
from penstock.models.huggingface.forms import Rearrangement

_LAYER = re.compile(r"(?:blocks\.(?P<layer>\d+)|mtp\.(?P<depth>\d+)\.block)\.(?P<rest>.+)")
_PREDICTION = re.compile(r"mtp\.(?P<depth>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True, kw_only=True)
class WeightName:
    """One tensor there.

    Attributes:
        ours: name in `Decoder.state_dict()` of the tensor that it fills, or fills a part of.
        theirs: its own name.
        expert: which index of our first dim it fills; None for all of it.
        part: of how many equal parts of the (then) first dim it fills which one: (index, count).
        forms: what becomes of it, in the order of reading.
        whole: shape of our tensor.
    """

    ours: str
    theirs: str
    expert: int | None = None
    part: tuple[int, int] = (0, 1)
    forms: tuple[Rearrangement, ...] = ()
    whole: tuple[int, ...]

    def place(self, ours: Tensor) -> Tensor:
        """The part of our tensor that it fills, as a view."""
        index, count = self.part
        return (ours if self.expert is None else ours[self.expert]).chunk(count)[index]

    @property
    def rectangle(self) -> Rectangle:
        """That part's place in our tensor."""
        begin, sizes = [0] * len(self.whole), list(self.whole)
        dim = 0
        if self.expert is not None:
            begin[0], sizes[0], dim = self.expert, 1, 1
        index, count = self.part
        sizes[dim] //= count
        begin[dim] = index * sizes[dim]
        return Rectangle(tuple(begin), tuple(sizes))

    def read(self, theirs: Tensor) -> Tensor:
        """What belongs there, from the tensor in their form."""
        for form in self.forms:
            theirs = form.read(theirs)
        return theirs

    def write(self, place: Tensor) -> Tensor:
        """The tensor in their form, from that part of ours."""
        for form in reversed(self.forms):
            place = form.write(place)
        return place

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of their tensor."""
        return tuple(self.write(self.place(torch.empty(self.whole, device="meta"))).shape)


def weight_names(config: Model) -> list[WeightName]:
    """The table of a model, in the order of our own tensors.

    Raises:
        ConfigError: the model's family has no Hugging Face names, or none for one of its parameters.
    """
    family = family_of(config)
    state = meta_model(config).state_dict()
    return [line for ours, tensor in state.items() for line in _lines(config, family, ours, tuple(tensor.shape))]


def _lines(config: Model, family: Family, ours: str, whole: tuple[int, ...]) -> list[WeightName]:
    theirs, rest = _names(config, family, ours)
    if not theirs:
        raise ConfigError(
            f"model.family {config.family} has no Hugging Face name for {ours}",
            fix="leave out what the family does not have, or train it as plain",
        )
    forms = tuple(form(config) for form in family.forms.get(rest, ()))
    is_of_one_expert = "{expert}" in theirs[0]
    return [
        WeightName(
            ours=ours,
            theirs=name.format(expert=expert),
            expert=expert if is_of_one_expert else None,
            part=(index, len(theirs)),
            forms=forms,
            whole=whole,
        )
        for expert in range(whole[0] if is_of_one_expert else 1)
        for index, name in enumerate(theirs)
    ]


def _names(config: Model, family: Family, ours: str) -> tuple[tuple[str, ...], str]:
    """What fills a tensor of ours, none if the family does not know it; and our name within its layer."""
    if match := _LAYER.fullmatch(ours):
        layer = int(match["layer"] or 0) if match["depth"] is None else config.layers + int(match["depth"])
        table = family.names
    elif match := _PREDICTION.fullmatch(ours):
        layer, table = config.layers + int(match["depth"]), family.prediction
    else:
        return MODEL.get(ours, ()), ours
    return tuple(f"model.layers.{layer}.{name}" for name in table.get(match["rest"], ())), match["rest"]
