"""Where gradients of the experts' outputs in 8 bits wait for the experts, because autograd cannot carry them.

    forward     dispatch makes a box, experts say that they expect something in it
    backward    combine puts packed gradients in and gives autograd a carrier; experts take them out

Autograd casts a gradient to the dtype of what it belongs to (penstock/moe/dispatch/payload.py). A box belongs to one
call of `dispatch`, and both nodes of its graph hold it; what a region runs again has another, which stays empty.
Experts that know no boxes never expect anything, and get 16 bits.
"""

from penstock.kernels.float8.gradient_side_channel import SideChannelHandover
from penstock.kernels.float8.quantized import Quantized


class GradientBox(SideChannelHandover[Quantized]):
    """The place of dy, R x D, by the blocks of rows and in the format of gradients; rows of no place may be anything.

    Attributes:
        is_expected: the experts look into it, so their outputs' gradient may be a carrier. The same on all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_expected = False

    def expect(self) -> None:
        """Say that the backward pass of the experts will look into it."""
        self.is_expected = True
