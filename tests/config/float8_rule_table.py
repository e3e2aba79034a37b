"""Every rule of float8, by the line that the user reads."""

from penstock.config import run_rules as rules
from penstock.config.rules import Rule

BROKEN: list[tuple[Rule, tuple[str, ...], str]] = [
    (
        rules.eight_bits_have_experts,
        ("model.moe=none", "model.dense_layers=4", "float8.dispatch=auto"),
        "float8.dispatch needs experts, which the model lacks (model.moe); got auto; allowed: none; "
        "fix: set float8.dispatch=none",
    ),
    (
        rules.layers_are_left_for_eight_bits,
        ("float8.dense=auto", "float8.first_layers=3", "float8.last_layers=1"),
        "float8.first_layers and float8.last_layers leave none of the 4 layers in 8 bits; got 3 and 1; "
        "fix: set both to 0, or float8.dense=none, float8.experts=none and float8.dispatch=none",
    ),
    (
        rules.gathered_bits_are_multiplied,
        ("float8.dense=blockwise", "float8.gather=true", "parallel.shard=optimizer"),
        "float8.gather gathers what FSDP divides, so it needs parallel.shard=full; got true with optimizer; "
        "allowed: false; fix: set float8.gather=false",
    ),
    (
        rules.gathered_bits_are_multiplied,
        ("float8.dispatch=blockwise", "float8.gather=true", "parallel.shard=full"),
        "float8.gather gathers weights that nothing multiplies in 8 bits; got true; allowed: false; "
        "fix: set float8.gather=false",
    ),
    (
        rules.gathered_blocks_are_squares,
        ("float8.experts=mxfp8", "float8.gather=true", "parallel.shard=full"),
        "float8.experts has two copies of each weight, and float8.gather sends one; got mxfp8; "
        "allowed: none, auto, tensorwise, blockwise, blockwise-square; fix: set float8.gather=false",
    ),
]

FINE: dict[str, tuple[str, ...]] = {
    "everything may be in 8 bits": ("float8.dense=auto", "float8.experts=auto", "float8.dispatch=auto"),
    "layers at both ends may stay in 16 bits": (
        "float8.dense=blockwise",
        "float8.first_layers=1",
        "float8.last_layers=2",
    ),
    "layers are counted only where something is in 8 bits": ("float8.first_layers=9",),
    "what FSDP divides is gathered in 8 bits": ("float8.dense=auto", "float8.gather=true", "parallel.shard=full"),
    "weights of squares are gathered whatever activations have": (
        "float8.dense=blockwise-square",
        "float8.experts=blockwise-square",
        "float8.dispatch=blockwise",
        "float8.gather=true",
        "parallel.shard=full",
    ),
    "a dense model has dense products in 8 bits": ("model.moe=none", "model.dense_layers=4", "float8.dense=rowwise"),
}
