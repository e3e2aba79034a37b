"""TensorBoard: an event file in the folder of a run, which `tensorboard --logdir runs` shows."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from penstock.train.metrics import is_recorded, scalars
from penstock.train.observer import RunStart, StepReport


class TensorBoard:
    """Observer that writes TensorBoard events: the numbers of `penstock.train.metrics.scalars`.

    Args:
        folder: where event files go.
        every: steps between points.
        steps_done: steps of the checkpoint; points after it, from a process that was killed, are hidden.
    """

    def __init__(self, folder: Path, every: int, steps_done: int) -> None:
        self._every = every
        self._writer = SummaryWriter(str(folder), purge_step=steps_done + 1)

    def started(self, start: RunStart) -> None:
        """Nothing to write."""

    def stepped(self, report: StepReport) -> None:
        """Write the points of a step."""
        if is_recorded(report, self._every):
            for name, value in scalars(report).items():
                self._writer.add_scalar(name, value, report.step)

    def saved(self, step: int) -> None:
        """A checkpoint is a good moment to put the points on disk."""
        self._writer.flush()

    def closed(self) -> None:
        """Close the event file."""
        self._writer.close()
