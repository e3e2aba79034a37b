"""`penstock import`: weights of other programs as the start of a run.

    penstock import Qwen3-30B-A3B --output qwen                      a folder with config.json and safetensors
    penstock import Qwen/Qwen3-30B-A3B --output qwen                 the same from the Hugging Face hub
    penstock import weights --preset mixtral-8x7b --output mixtral   without config.json, or with a preset's training
    penstock import Llama-3.1-8B --output moe --copies 8 --chosen 2  a model with experts from a dense one
    penstock import Qwen3-30B-A3B --output qwen --config-only        run.toml alone, of a folder without weights too

What is written is a folder with `run.toml`, which says how a run starts with these weights, in any layout:

    penstock train qwen/run.toml parallel.expert=8 data.source=jsonl data.files=text.jsonl --processes 8

Weights that are kept in float8 with scales (DeepSeek-V3) or MXFP4 (gpt-oss) are read as what they stand for. What is
in memory at once is 112 MiB, or the largest tensors that are read as a whole.
"""

from pathlib import Path
from typing import Annotated

import typer

from penstock.base.errors import ConfigError
from penstock.base.numbers import count_text
from penstock.cli.output import print_next
from penstock.config.load import load_run, with_overrides
from penstock.config.run import Run
from penstock.config.size import size_of
from penstock.data.hub import weights_of
from penstock.models.huggingface.config import facts_of, run_of
from penstock.models.huggingface.distributed_folder import open_source
from penstock.models.huggingface.weight_folder import WeightSource
from penstock.models.huggingface.weights import with_prediction
from penstock.train.saved_weights import RUN_FILE
from penstock.train.weight_exchange import Upcycling, import_weights

TOKENIZER = "tokenizer.json"


def import_(
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="With safetensors, and config.json or --preset; or ORG/NAME.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Fields of the run.")] = None,
    *,
    output: Annotated[Path, typer.Option("--output", metavar="FOLDER", help="Is made; must not be there yet.")],
    preset: Annotated[str | None, typer.Option("--preset", help="The run, and the model of the weights.")] = None,
    copies: Annotated[int, typer.Option("--copies", help="Experts of a layer, from a dense model.")] = 0,
    chosen: Annotated[int, typer.Option("--chosen", help="Of them, those that a token meets.", min=1)] = 1,
    granularity: Annotated[int, typer.Option("--granularity", help="Experts that a copy is cut into.", min=1)] = 1,
    config_only: Annotated[bool, typer.Option("--config-only", help="Write run.toml and no weights.")] = False,
) -> None:
    """Start a run from weights with Hugging Face names."""
    source = weights_of(source)
    base = load_run(preset) if preset else run_of(source, output.name)
    folder = source.parent if source.suffix == ".json" and source.is_file() else source
    weights = None if config_only else open_source(folder, base.model)
    if weights is not None:
        base = _with_prediction_of(weights, base, is_preset=bool(preset))
    upcycling = Upcycling(copies=copies, chosen=chosen, granularity=granularity) if copies else None
    model = upcycling.model(base.model) if upcycling else base.model  # with experts, if the dense network is copied
    # run.toml starts from the folder that is written.
    changes = [] if config_only else [f'training.initial_weights="{output}"']
    if (folder / TOKENIZER).is_file():
        changes.append(f'data.tokenizer="{folder / TOKENIZER}"')
    run = with_overrides(base.model_copy(update={"model": model}), [*changes, *(overrides or ())])
    if not config_only and facts_of(run.model) != facts_of(model):  # balance and the like are no facts of weights
        raise ConfigError("the weights decide the model", fix="leave out overrides of model, but for its balance")
    import_weights(weights, base.model, run, upcycling, output)
    size = size_of(run.model, run.training.sequence_length)
    alone = ", without weights" if config_only else ""
    parameters = count_text(size.parameters + size.mtp_parameters)
    print(f"wrote {output}: {parameters} parameters, {run.model.family}{alone}")
    print_next("train", output / RUN_FILE)


def _with_prediction_of(weights: WeightSource, base: Run, *, is_preset: bool) -> Run:
    """The run with as many layers of multi-token prediction as the files have; a preset may lose some only."""
    theirs, layers = with_prediction(base.model, weights), base.model.mtp_layers
    if theirs.mtp_layers < layers:
        print(f"without multi-token prediction: the files have {theirs.mtp_layers} of {layers} layers")
    return base.model_copy(update={"model": theirs}) if theirs.mtp_layers < layers or not is_preset else base
