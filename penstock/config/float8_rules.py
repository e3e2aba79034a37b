"""Rules of `float8`, what is computed in 8 bits. Each docstring is the rule as users read it.

Which recipes a chip has is judged where kernels are chosen (`penstock.models.kernels`).
"""

from penstock.config.fit import shard
from penstock.config.problem import Problem
from penstock.config.run import Run


def eight_bits_have_experts(run: Run) -> Problem | None:
    """`float8.experts` and `float8.dispatch` other than none need `model.moe`."""
    if run.model.moe is not None:
        return None
    for field, value in (("experts", run.float8.experts), ("dispatch", run.float8.dispatch)):
        if value != "none":
            what = "needs experts, which the model lacks (model.moe)"
            return Problem(f"float8.{field}", what, got=value, allowed="none", fix=f"set float8.{field}=none")
    return None


def layers_are_left_for_eight_bits(run: Run) -> Problem | None:
    """`float8.first_layers` + `float8.last_layers` stay below `model.layers` if anything is in 8 bits."""
    first, last, layers = run.float8.first_layers, run.float8.last_layers, run.model.layers
    if not run.float8.is_used or first + last < layers:
        return None
    return Problem(
        "float8.first_layers",
        f"and float8.last_layers leave none of the {layers} layers in 8 bits",
        got=f"{first} and {last}",
        fix="set both to 0, or float8.dense=none, float8.experts=none and float8.dispatch=none",
    )


def gathered_bits_are_multiplied(run: Run) -> Problem | None:
    """`float8.gather` needs `parallel.shard` full, and `float8.dense` or `float8.experts` other than none."""
    float8 = run.float8
    if not float8.gather or (shard(run) == "full" and (float8.dense != "none" or float8.experts != "none")):
        return None
    if shard(run) != "full":
        what, got = "gathers what FSDP divides, so it needs parallel.shard=full", f"true with {shard(run)}"
    else:
        what, got = "gathers weights that nothing multiplies in 8 bits", "true"
    return Problem("float8.gather", what, got=got, allowed="false", fix="set float8.gather=false")


def gathered_blocks_are_squares(run: Run) -> Problem | None:
    """`float8.gather` needs `float8.dense` and `float8.experts` none, auto, tensorwise, blockwise or blockwise-square.

    Other recipes quantize a weight in two ways, for each of its products, and both would have to travel.
    """
    if not run.float8.gather:
        return None
    for field, value in (("dense", run.float8.dense), ("experts", run.float8.experts)):
        if value in ("rowwise", "mxfp8"):
            what = "has two copies of each weight, and float8.gather sends one"
            return Problem(
                f"float8.{field}",
                what,
                got=value,
                allowed="none, auto, tensorwise, blockwise, blockwise-square",
                fix="set float8.gather=false",
            )
    return None


FLOAT8_RULES = (
    eight_bits_have_experts,
    layers_are_left_for_eight_bits,
    gathered_bits_are_multiplied,
    gathered_blocks_are_squares,
)
