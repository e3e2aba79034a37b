"""The experts, and parts of experts, on each rank of the expert axis.

The axis has expert x expert_tensor places. `expert` divides the experts of a layer between groups of places, each with
consecutive experts; inside a group `expert_tensor` divides every expert's width. With 8 experts, expert 2 and
expert_tensor 2:

    place             0              1              2              3
    holds       0 1 2 3, left  0 1 2 3, right  4 5 6 7, left  4 5 6 7, right

A row travels to every place that holds a part of its expert. A dispatcher sees each part as a virtual expert, numbered
so that those of a place are consecutive. Above, expert 5 is the virtual experts 9 and 13.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """Experts of a layer over the places of the expert axis."""

    experts: int
    expert: int = 1  # groups of places, with different experts
    expert_tensor: int = 1  # places that divide each expert

    def __post_init__(self) -> None:
        assert self.experts % self.expert == 0, f"{self} does not divide"

    @property
    def places(self) -> int:
        return self.expert * self.expert_tensor

    @property
    def per_place(self) -> int:
        """Experts that each place holds, whole or a part of each; also its virtual experts."""
        return self.experts // self.expert

    @property
    def virtual_experts(self) -> int:
        return self.experts * self.expert_tensor

    def block(self, places: int) -> "ExpertPlacement":
        """The placement inside a block of neighbouring places, counted from its first one.

        Above, a block of 2 places holds 4 experts by halves. A block of 1 holds halves of 4 experts and counts them as
        whole.
        """
        assert divides_into(self.places, self.expert_tensor, places), f"{self} in blocks of {places}"
        parts = min(places, self.expert_tensor)
        return ExpertPlacement(experts=self.per_place * (places // parts), expert=places // parts, expert_tensor=parts)

    def experts_of(self, member: int) -> range:
        """Experts that a place holds, whole or in part."""
        first = member // self.expert_tensor * self.per_place
        return range(first, first + self.per_place)


def divides_into(places: int, expert_tensor: int, block: int) -> bool:
    """Whether each `block` of neighbouring places holds whole experts, or equal parts of the same experts."""
    return places % block == 0 and (block % expert_tensor == 0 or expert_tensor % block == 0)
