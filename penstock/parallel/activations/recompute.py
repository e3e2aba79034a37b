"""Which parts of a layer are computed again in backward: `recompute` of a run, as a value that every layer is given.

    norm                a norm before a projection; its input is the residual stream, which lives anyway
    latent-up           latent attention's up projections and the assembly of its heads, from the latents
    attention           core attention, without projections
    expert-activation   what the experts' first product gives; a network that frees it by itself is no region
    shared-expert, dense, moe, layer    a whole network, mixture or block

How a part is run again, and why what it returns is not kept either, is in `penstock.parallel.activations.region`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from penstock.config.parallel import RECOMPUTABLE, Recompute
from penstock.parallel.activations.region import discarding, discarding_in_pieces, is_inside, recomputed

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RecomputeRule:
    """What a layer recomputes; models call `run` around each part that has a kind.

    Attributes:
        kinds: some of `RECOMPUTABLE`.
    """

    kinds: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        assert self.kinds <= {*RECOMPUTABLE}, f"{sorted(self.kinds)} are not all of {RECOMPUTABLE}"

    def run(self, kind: str, function: Callable[..., Result], *arguments: object) -> Result:
        """`function(*arguments)`, recomputed in backward if the rule names the kind."""
        return recomputed(function, *arguments) if self.recomputes(kind) else function(*arguments)

    def recomputes(self, kind: str) -> bool:
        """Whether a part recomputes by itself: the rule names it, and it is not inside a region already."""
        assert kind in RECOMPUTABLE, f"{kind} is not one of {RECOMPUTABLE}"
        return kind in self.kinds and not is_inside()

    def discarding(self) -> AbstractContextManager[None]:
        """`discarding` if the layer recomputes a part of itself. Stands around a layer's forward."""
        return discarding() if self.kinds else nullcontext()

    def discarding_in_pieces(self) -> AbstractContextManager[Callable[[], AbstractContextManager[None]]]:
        """The same around a layer that runs in pieces; gives what stands around each."""
        return discarding_in_pieces() if self.kinds else nullcontext(nullcontext)


def rule_for(config: Recompute, layer: int, stage: int) -> RecomputeRule:
    """What one layer recomputes.

    Args:
        config: kinds, and the layers and stages where they are recomputed; both must name the layer.
        layer: decoder layer; multi-token prediction layers count on after the last.
        stage: pipeline stage that holds it.
    """
    is_here = (not config.layers or layer in config.layers) and (not config.stages or stage in config.stages)
    return RecomputeRule(kinds=frozenset(config.modules) if is_here else frozenset())
