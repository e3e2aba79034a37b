"""A model in memory as files that `transformers` loads, written by the shortest way."""

import json
from pathlib import Path

from safetensors.torch import save_file

from penstock.models.decoder import Decoder
from penstock.models.huggingface.config import huggingface_config
from penstock.models.huggingface.weights import WEIGHTS_FILE, to_huggingface


def save_huggingface(model: Decoder, folder: Path, positions: int | None = None) -> None:
    """Write `config.json` and `model.safetensors` into a folder, which is made; `positions` as of its config."""
    fields = huggingface_config(model.config, positions) | {"dtype": str(model.head_VD.dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in to_huggingface(model)}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
