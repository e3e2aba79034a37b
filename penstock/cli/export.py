"""`penstock export`: the weights of a run for other programs.

    penstock export runs/debug weights                    the newest checkpoint, in the run's own precision
    penstock export runs/debug weights --step 400         another one
    penstock export runs/debug weights --precision fp32   the float32 weights that the optimizer updates
    penstock export runs/debug weights --verify           and let transformers compute the same logits with them

The folder then holds `config.json`, safetensors and the tokenizer, which `transformers` loads; a large model has
several files and an index. How many processes trained the run, and in which layout, makes no difference. Nothing of the
run is changed, so it may still be training.
"""

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.verbs import Checkpoint
from penstock.train.saved_weights import open_saved, read_chosen
from penstock.train.weight_exchange import Precision, export_huggingface, import_transformers, verify_export


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of penstock import.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; must not be there yet.")],
    step: Checkpoint = None,
    precision: Annotated[Precision | None, typer.Option("--precision", help="Else that of the run.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare logits with those of transformers, on the CPU.")] = (
        False
    ),
) -> None:
    """Write the weights of a run's checkpoint in Hugging Face format."""
    if verify:
        import_transformers()  # its absence is reported before anything is written
    config, store = open_saved(run)
    form = precision or config.training.precision
    wanted, why_not = read_chosen(
        store, run, step, lambda chosen: export_huggingface(config, store, chosen, folder, form)
    )
    also = "" if config.qat.experts == "none" else " and experts in MXFP4"
    also += "" if why_not else ", and the tokenizer"
    print(f"wrote {folder}: the weights of step {wanted} of {run}, in {form}{also}")
    if why_not:
        print(f"the tokenizer is not exported: {why_not}")
    if verify:
        print(f"transformers computes the same logits: {verify_export(config, folder):.1e} apart")
    if not why_not:
        code = f"from transformers import pipeline; print(pipeline('text-generation', '{folder}')('The '))"
        # Double quotes are easier to read around a code with single ones, where the shell leaves all inside as it is.
        quoted = f'"{code}"' if re.fullmatch(r"[\w./ -]+", f"{folder}") else shlex.quote(code)
        print(f"next:  python -c {quoted}")
