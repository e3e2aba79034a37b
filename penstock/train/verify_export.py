"""Does another program compute what a checkpoint does? An export, read by `transformers`, beside our own model.

Both read the exported files and compute in float32 on the CPU, so what is left is the order of sums.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from penstock.base.errors import CheckpointError, DeviceError
from penstock.config.run import Run
from penstock.models.build import build_model
from penstock.models.huggingface.weights import load_huggingface

ROWS, POSITIONS = 2, 64
TOLERANCE = 1e-4
"""Of the largest difference of two logits, over the largest logit."""


@torch.no_grad()
def verify_export(run: Run, folder: Path) -> float:
    """Compare logits of random tokens.

    Args:
        run: the configuration of what was exported.
        folder: the export.

    Returns:
        The largest difference over the largest logit.

    Raises:
        DeviceError: `transformers` is not installed.
        CheckpointError: it cannot read the folder, or computes something else.
    """
    library = import_transformers()
    try:
        theirs = library.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"transformers cannot read {folder}", got=error) from error
    training = run.training.model_copy(update={"precision": "fp32"})
    ours = build_model(run.model_copy(update={"training": training, "device": "cpu"}), torch.device("cpu")).eval()
    load_huggingface(ours, folder)
    positions = min(POSITIONS, run.training.sequence_length)
    tokens_BS = torch.randint(run.model.vocab_size, (ROWS, positions), generator=torch.Generator().manual_seed(0))
    logits_BSV = ours.logits(tokens_BS, torch.arange(positions).expand(ROWS, -1))
    expected_BSV = theirs(tokens_BS, use_cache=False).logits
    apart = float((logits_BSV - expected_BSV).abs().max() / expected_BSV.abs().max())
    if not apart <= TOLERANCE:
        raise CheckpointError(
            f"transformers computes other logits from {folder}", got=f"{apart:.1e} apart", allowed=f"{TOLERANCE:g}"
        )
    return apart


def import_transformers() -> Any:
    """The library.

    Raises:
        DeviceError: it is not installed.
    """
    try:
        return import_module("transformers")
    except ImportError as error:
        raise DeviceError(
            "--verify needs transformers", got=str(error), fix="pip install transformers, or leave --verify out"
        ) from error
