"""What scripts of our functions in 8 bits set up: recipe, formats and kernels, which no argument records.

A recording of ours holds its configuration; of others, the script takes what `auto` means on the machine that it runs
on. Weights are quantized before the clock starts, as a run does once an optimizer step, and so are inputs that somebody
else quantizes. On a CPU the definitions run instead of kernels.
"""

from collections.abc import Mapping
from typing import Any, Literal

Knob = Literal["dense", "experts"]
"""Of the section `float8` of a configuration."""

RECIPE_NAMES = ("tensorwise", "rowwise", "blockwise", "blockwise-square", "mxfp8", "nvfp4")
_FORMATS = ("e4m3", "e5m2")

IMPORTS = """from penstock.kernels.backends import float8_operators_of  # noqa: E402
from penstock.kernels.float8.formats import format_on  # noqa: E402
from penstock.kernels.float8.operators import Float8Rule  # noqa: E402
from penstock.kernels.float8.recipes import RECIPES, default_recipe  # noqa: E402
from penstock.kernels.tuning import target_of  # noqa: E402
"""

_RULE = """TARGET = "cpu" if DEVICE == "cpu" else target_of(torch.device(DEVICE))
RECIPE = {recipe}
rule = Float8Rule(
    dense=RECIPE,
    experts=RECIPE,
    forward=format_on("e4m3", TARGET),
    gradient=format_on("{gradients}", TARGET),
    operators=float8_operators_of("reference" if DEVICE == "cpu" else "triton"),
)
"""

COPIES = "copies = expert_ffn.copy_experts(arguments[1].detach(), arguments[2].detach(), rule)\n"
"""Behind the rule, of experts."""

_WEIGHT = """{name} = float8_linear.Float8Weight(
    parameter_FD=arguments[{place}],
    kept=rule.operators.quantize_weight(arguments[{place}].detach(), RECIPE, rule.forward),
    total=None,
    later=None,
    rule=rule,
)
"""
_READY = "ready = float8_linear.quantize_input(arguments[0], rule)\n"

LINEAR = _WEIGHT.format(name="weight", place=1) + _READY
"""Behind the rule, of a matrix."""

NETWORK = _WEIGHT.format(name="gate_up", place=1) + _WEIGHT.format(name="down", place=2) + _READY
"""Behind the rule, of a network."""


HANDED = """from penstock.kernels.float8.gradient_side_channel import Handed, HandedHeads  # noqa: E402

handed = HandedHeads(Handed(), Handed())
"""
"""Behind the rule, of latent attention's heads: nobody takes what they hand over."""


def rule_text(header: Mapping[str, Any], knob: Knob) -> tuple[str, str]:
    """Lines of a script that make a `Float8Rule`, and one that says where it comes from.

    Args:
        header: of the trace.
        knob: whose recipe counts.
    """
    told = _section(header)
    name, gradients = told.get(knob), told.get("gradients")
    recipe = f'RECIPES["{name}"]' if name in RECIPE_NAMES else "default_recipe(TARGET)"
    lines = _RULE.format(recipe=recipe, gradients=gradients if gradients in _FORMATS else _FORMATS[0])
    if name in RECIPE_NAMES:
        return lines, f"Recipe: {name}, by the configuration in the recording."
    source = "the configuration says so" if name == "auto" else "nothing in the trace says which it was"
    return lines, f"Recipe: that of the machine on which this runs; {source}."


def _section(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section `float8` of the configuration in a recording of ours, or nothing."""
    told: Any = header
    for key in ("penstock", "config", "float8"):
        told = told.get(key) if isinstance(told, Mapping) else None
    return told if isinstance(told, Mapping) else {}
