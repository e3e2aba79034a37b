"""Which products are computed in 8 bits, and how."""

from typing import Literal

from penstock.config.schema import Section, knob

RecipeKnob = Literal["none", "auto", "tensorwise", "rowwise", "blockwise", "blockwise-square", "mxfp8"]


class Float8(Section):
    """Products in 8 bits; routers, embedding, output projection, norms, sums of gradients and the optimizer never are.

    Recipes: docs/float8.md. auto takes mxfp8 on Blackwell and MI355X, blockwise on other chips. Experts of
    blockwise-square read rows that travel as blockwise.
    """

    dense: RecipeKnob = knob("none", doc="Recipe of attention's projections, dense networks and shared experts.")
    experts: RecipeKnob = knob("none", doc="Recipe of the routed experts' products.")
    dispatch: Literal["none", "auto", "blockwise", "mxfp8"] = knob(
        "none",
        doc="In whose blocks rows travel to their experts, by symmetric dispatch gradients of outputs too; outputs and "
        "gradients of rows come back in 16 bits.",
    )
    gradients: Literal["e4m3", "e5m2"] = knob("e4m3", doc="Format of the gradients of outputs.")
    first_layers: int = knob(0, doc="Layers at the beginning that stay in 16 bits.", unit="layers", low=0)
    last_layers: int = knob(0, doc="Layers at the end that stay in 16 bits.", unit="layers", low=0)
    gather: bool = knob(
        False, doc="Under `parallel.shard` = full, gather weights in 8 bits where every product that reads them is."
    )

    @property
    def is_used(self) -> bool:
        """Whether anything is computed or sent in 8 bits."""
        return any(one != "none" for one in (self.dense, self.experts, self.dispatch))
