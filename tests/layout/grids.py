"""Random grids, for property tests."""

from math import lcm

from hypothesis import strategies as st

from penstock.layout.grid import Grid


@st.composite
def grids(draw: st.DrawFn, largest: int = 4) -> Grid:
    """A grid whose two views are chosen apart, with at most a few hundred ranks."""
    sizes = st.integers(1, largest)
    tensor, context, expert, expert_tensor, pipeline = (draw(sizes) for _ in range(5))
    stage = lcm(tensor * context, expert * expert_tensor) * draw(st.integers(1, 3))
    return Grid(
        world=pipeline * stage,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
    )
