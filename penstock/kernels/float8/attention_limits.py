"""Where attention in 8 bits can run. Integers and words only, so a configuration can ask without torch.

Masks, windows, sinks and context parallelism that gathers keys have no kernel: rules of the configuration refuse them.
"""

from penstock.kernels.float8.recipes import BLOCKWISE
from penstock.kernels.float8.recipes import obstacle as obstacle_of_chip

MOST_WIDTH = 192
"""Of queries and keys."""

LEAST_PART = 32
"""Least columns that a matrix unit contracts in 8 bits."""

VALUE_WIDTHS = (32, 64, 128)


def parts_of(width: int) -> tuple[int, int]:
    """A width as two powers of two, the second perhaps 0: kernels take 192 columns as 128 and 64."""
    wide = 1 << (width.bit_length() - 1)
    return wide, width - wide


def obstacle(target: str, query: int, value: int) -> str | None:
    """Why a chip cannot compute attention in 8 bits, or None. A CPU can always, slowly.

    Args:
        target: chip as compilers name it, or `cpu`.
        query: width of a head of queries and keys.
        value: width of a head of values.
    """
    if target == "cpu":
        return None
    return obstacle_of_chip(BLOCKWISE, target) or obstacle_of_widths(query, value)


def obstacle_of_widths(query: int, value: int) -> str | None:
    """Why the kernels cannot take heads of these widths, or None."""
    wide, rest = parts_of(query)
    is_sum = rest == 0 or (rest >= LEAST_PART and rest.bit_count() == 1)
    if query > MOST_WIDTH or wide < LEAST_PART or not is_sum:
        return f"heads of queries and keys are {query} wide, and kernels take 32, 64, 96, 128, 160 and 192"
    if value not in VALUE_WIDTHS:
        return f"heads of values are {value} wide, and kernels take {', '.join(map(str, VALUE_WIDTHS))}"
    return None
