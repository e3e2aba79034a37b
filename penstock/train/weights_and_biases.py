"""Weights & Biases: the figures in the user's project, over the network (online) or in files (offline).

    runs/NAME/wandb/id                the run at W&B: PROJECT/ID
                    step              the last step that W&B has: its library had ended, with nothing left to send
                    offline-run-...   files for `wandb sync`

A resumed run continues the same run at W&B, whose history cannot go back: steps that are repeated have the same figures
and are not sent again. The library sends in a process of its own, and a kill loses what waits there. So a run that was
killed sends the steps before its checkpoint again, from metrics.jsonl; W&B drops those that it has.

W&B reads its own environment variables and login; `record.wandb` is the mode.
"""

import uuid
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.base.files import write_whole
from penstock.train.metrics import is_recorded, lines_between, scalars, scalars_of
from penstock.train.observer import Observer, RunStart, StepReport
from penstock.train.run_folder import RunFolder


class WeightsAndBiases(Observer):
    """Observer that sends figures to Weights & Biases."""

    def __init__(self, folder: RunFolder) -> None:
        self._wandb: Any = import_module("wandb")
        self._folder = folder
        self._step_file = folder.wandb / "step"
        self._run: Any = None
        self._every, self._wanted, self._last, self._sent = 1, 0, 0, 0  # steps

    def started(self, start: RunStart) -> None:
        """Create the run at W&B, or continue it."""
        record = start.run.record
        self._folder.wandb.mkdir(exist_ok=True)
        self._every, self._wanted = record.every, start.run.training.steps
        self._last = start.steps_done
        name = _known_id(self._folder.wandb / "id", record.wandb_project)
        if name is None:
            name = uuid.uuid4().hex[:12]
            write_whole(self._folder.wandb / "id", f"{record.wandb_project}/{name}\n")
        else:
            self._sent = _number(self._step_file)
        self._run = self._wandb.init(
            project=record.wandb_project,
            id=name,
            name=start.run.name,
            dir=str(self._folder.path),
            mode=record.wandb,
            resume="allow",  # continue the run with this id, or create it
            reinit="create_new",
            config={
                **start.run.model_dump(mode="json"),
                "device_name": start.device_name,
                "ranks": start.ranks,
                "parameters": start.parameters,
                "active_parameters": start.active_parameters,
            },
            # The terminal shows the live view, whose output is no log.
            settings=self._wandb.Settings(console="off", silent=True, save_code=False),
        )
        self._sent = max(self._sent, self._run.starting_step - 1)  # 0 unless W&B has answered
        for line in lines_between(self._folder.metrics, self._sent, start.steps_done):
            self._log(line["step"], scalars_of(line))

    def stepped(self, report: StepReport) -> None:
        """Send a step, unless it was sent before."""
        self._last = report.step
        if report.step <= self._sent or not is_recorded(report, self._every):
            return
        self._log(report.step, scalars(report))

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step, commit=True)
        self._sent = step

    def closed(self) -> None:
        """Send the rest. A run with missing steps is marked as failed until it is resumed."""
        if self._run is not None:
            self._run.finish(exit_code=0 if self._last >= self._wanted else 1)
            write_whole(self._step_file, f"{self._sent}\n")


def _known_id(path: Path, project: str) -> str | None:
    known, _, name = path.read_text().strip().rpartition("/") if path.is_file() else ("", "", "")
    return name if known == project and name else None


def _number(path: Path) -> int:
    """The number in a file; 0 if the file is missing or damaged."""
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isascii() and text.isdigit() else 0
