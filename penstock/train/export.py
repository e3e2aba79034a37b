"""A checkpoint of any layout as weights that other programs load: Hugging Face names, safetensors, `config.json`.

It is read into one model on the CPU, whatever layout wrote it: 4 bytes a parameter, and as much again while it is
written. It is written under a hidden name, so that the folder is there whole or not at all.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from safetensors import SafetensorError

from penstock.base.errors import CheckpointError
from penstock.config.run import Run
from penstock.models.build import meta_model, to_dtype
from penstock.models.decoder import Decoder
from penstock.models.huggingface import huggingface_config, save_huggingface
from penstock.parallel.holding import whole
from penstock.train.checkpoint import CheckpointStore
from penstock.train.run_folder import sync
from penstock.train.state import check_same_model, identity_of

Precision: TypeAlias = Literal["bf16", "fp32"]
"""As in `training.precision`."""


def export_huggingface(run: Run, store: CheckpointStore, step: int, folder: Path, precision: Precision) -> None:
    """Write the weights of a checkpoint for `transformers`.

    Args:
        run: the configuration.
        store: of the run.
        step: which checkpoint.
        folder: is made; must not be there.
        precision: of the weights in it. Router weights stay float32, as in training.

    Raises:
        ConfigError: the model has no Hugging Face form.
        CheckpointError: the folder is there already, the checkpoint cannot be used, or the disk refuses.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already", fix="give the name of a new folder")
    huggingface_config(run.model)  # refuses a model without a Hugging Face form before anything is read
    model = _load(run, store, step)
    to_dtype(model, torch.bfloat16 if precision == "bf16" else torch.float32)
    try:
        _write(model, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {folder}", got=error) from error


def _load(run: Run, store: CheckpointStore, step: int) -> Decoder:
    """The whole model with the weights of a checkpoint, in float32."""
    check_same_model(step, store.read_facts(step)["model"], identity_of(run))
    model = meta_model(run.model).to_empty(device=torch.device("cpu"))
    into = {f"model.{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    store.load(step, into, all_of_it=False)
    return model


def _write(model: Decoder, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        save_huggingface(model, draft)
        # Both mkdtemp and the safetensors library make what they make private.
        draft.chmod(0o755)
        for path in draft.iterdir():
            path.chmod(0o644)
            sync(path)
        sync(draft)
        draft.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # not there any more if all went well
