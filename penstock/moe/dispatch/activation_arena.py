"""One buffer for what the experts of all layers keep for backward, where row counts stay on the device.

A layer that must have room for its rows before it knows them needs room for an unlucky routing; all layers together
hardly ever have bad luck. So what lives until backward (the pre-activations) stands on a arena, the layers' rows one
behind the other, with room for `bound` times the even share of all of them; what lives for a moment only has the
room of its layer's `Room`.

Each pass of a model gets a board of its own: made when its first layer comes, freed by autograd when the last layer
that keeps rows on it went backward. Rows that found no room are counted like those of a `Room`, and the step is made
again.
"""

import math

import torch
from torch import Tensor

from penstock.kernels.expert_parts import KeptRows
from penstock.kernels.kept_rows import claim_rows
from penstock.moe.dispatch.row_capacity import CapacityTracker


class ActivationArena(CapacityTracker):
    """Room for what the layers of a stage keep on one rank; `share` is that of all of them together.

    Args:
        bound: rows over the even share to begin with.

    Attributes:
        layers: that keep rows here.
    """

    def __init__(self, bound: float) -> None:
        super().__init__(bound)
        self.layers = 0
        self._board: Tensor | None = None
        self._cursor: Tensor | None = None
        self._left = 0

    def join(self) -> None:
        """Say that one more layer keeps its rows here."""
        self.layers += 1

    def begin(self) -> None:
        """A pass begins: its rows go to a board of its own."""
        self._board = self._cursor = None
        self._left = 0

    def forget(self) -> None:
        """See `CapacityTracker`. Also the board of a pass that was given up."""
        super().forget()
        self.begin()

    def place(self, used: Tensor, room: int, like: Tensor, *, share: float) -> KeptRows:
        """A place for the rows of the next layer.

        Args:
            used: int32, one number: rows that it has, on the device.
            room: most rows that it can have.
            like: of the width, dtype and device of the rows.
            share: the layer's even share of rows.
        """
        width = like.shape[1]
        if like.is_meta:  # Layers are planned one at a time, so each counts for itself.
            return KeptRows(like.new_empty(self._rows(share), width), used.new_empty(1, dtype=torch.int64), room)
        if self._left == 0 or self._board is None or self._cursor is None:
            self.share = share * self.layers
            self._board = like.new_empty(max(self._rows(self.share), room), width)
            self._cursor = torch.zeros(1, dtype=torch.int64, device=like.device)
            self._left = self.layers
        board = self._board
        assert board.shape[1] == width, "all layers of a arena are as wide"
        first = claim_rows(self._cursor, used, len(board), self.meter)
        self._left -= 1
        if self._left == 0:  # From now on the board lives as long as layers keep rows on it.
            self.begin()
        return KeptRows(board, first, room)

    def _rows(self, share: float) -> int:
        return math.ceil(share * self.bound)
