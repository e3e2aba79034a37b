"""The folder of a run that was never trained: a configuration, and one checkpoint of random weights."""

from pathlib import Path
from typing import Any

import torch

from penstock.config.data import Data
from penstock.config.run import Run
from penstock.models.build import build_model
from penstock.models.decoder import Decoder
from penstock.parallel.shard import whole
from penstock.train.checkpoint import CheckpointStore
from penstock.train.run_folder import RunFolder
from penstock.train.state import identity_of
from tests.train.tiny_run import TRAINING, tiny_model, tiny_run


def byte_run(folder: Path, **changes: Any) -> Run:
    """A tiny run over bytes of text, with a context of 32."""
    fields: dict[str, Any] = {
        "model": tiny_model(vocab_size=257),
        "training": TRAINING.model_copy(update={"sequence_length": 32}),
        "data": Data(),
    }
    return tiny_run(folder, **(fields | changes))


def random_model(run: Run) -> Decoder:
    """The whole model of a run in float32, every tensor and buffer with values of its own."""
    training = run.training.model_copy(update={"precision": "fp32"})
    model = build_model(run.model_copy(update={"training": training}), torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def save_run(run: Run, model: Decoder, step: int = 1) -> Path:
    """Write the folder of a run with one checkpoint of a model."""
    folder = RunFolder(Path(run.record.folder) / run.name)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_config(run)
    store = CheckpointStore(folder.checkpoints, keep=0, asynchronous=False)
    parts = {f"model.{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    store.save(step, parts, {"model": identity_of(run)})
    return folder.path
