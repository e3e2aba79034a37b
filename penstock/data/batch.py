"""What the data hand to the model: rows of tokens, their labels, positions and documents."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of tokens with all that a forward pass and a loss need.

    Attributes:
        tokens_BS: int64, the ids that the model reads.
        labels_BS: int64, the next token of the stream at each position; IGNORED_LABEL (-100) where nothing is
            predicted.
        positions_BS: int64, for the rotary embedding; 0..S-1, or counted from each document's start in the row.
        documents_BS: int64, attention stays inside equal ids of one row (ids are counted from 0 in every row); None
            when attention may cross documents.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor
    documents_BS: Tensor | None

    @property
    def rows(self) -> int:
        """Number of rows, B."""
        return self.tokens_BS.shape[0]

    def to(self, device: torch.device | str) -> "Batch":
        """Returns the batch on `device`; a copy to a GPU goes through pinned memory and does not stop the host."""
        device = torch.device(device)

        def moved(x_BS: Tensor) -> Tensor:
            if device.type == "cuda" and x_BS.device.type == "cpu":
                x_BS = x_BS.pin_memory()
            return x_BS.to(device, non_blocking=True)

        return self._each(moved)

    def between(self, start: int, stop: int) -> "Batch":
        """Returns rows start..stop-1, as views."""
        return self._each(lambda x_BS: x_BS[start:stop])

    def micro_batches(self, rows: int) -> list["Batch"]:
        """Returns the batch cut into micro-batches of `rows` rows each, in order, as views."""
        assert self.rows % rows == 0, f"{self.rows} rows do not divide into micro-batches of {rows}"
        return [self.between(start, start + rows) for start in range(0, self.rows, rows)]

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(
            tokens_BS=change(self.tokens_BS),
            labels_BS=change(self.labels_BS),
            positions_BS=change(self.positions_BS),
            documents_BS=None if self.documents_BS is None else change(self.documents_BS),
        )
