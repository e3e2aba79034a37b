"""From a configuration to everything that a run is made of, with nothing written yet.

What can be wrong with a machine, its data or a model shows here, so a run folder is made only for a run that can start.
"""

from dataclasses import dataclass

import torch

from penstock.base.devices import peak_flops
from penstock.base.errors import DataError
from penstock.config.compare import leaves
from penstock.config.run import Run
from penstock.data.evaluation import Evaluation, evaluation_batches
from penstock.data.loader import Loader, Prefetch
from penstock.data.open import open_source
from penstock.data.sources import Source, Split
from penstock.kernels.choose import summary
from penstock.kernels.device_facts import device_facts
from penstock.models.build import build_model, meta_model
from penstock.models.count import Count, count
from penstock.models.decoder import Decoder
from penstock.models.kernels import kernel_choices
from penstock.moe.router import Router
from penstock.parallel.environment import Environment
from penstock.parallel.process import choose_device, device_name, prepare_process
from penstock.train.optimizer import MasterAdamW
from penstock.train.run_folder import is_bound
from penstock.train.state import TrainState


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run that is ready for its first step.

    Attributes:
        run: the configuration.
        device: where it trains.
        device_name: as the driver reports it.
        kernels: which backend runs each operator, in one line.
        peak_flops: dense bf16 FLOP per second of the device, or None where that is unknown.
        size: parameters and FLOPs of the model.
        model: what is trained, in training mode.
        state: model, optimizer and data: what a checkpoint holds.
        held_out: rows to judge by, or None if evaluation is off.
    """

    run: Run
    device: torch.device
    device_name: str
    kernels: str
    peak_flops: float | None
    size: Count
    model: Decoder
    state: TrainState
    held_out: Evaluation | None


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The data of a run.

    Attributes:
        train: documents to train on.
        held_out: rows to judge by, or None if evaluation is off.
    """

    train: Source
    held_out: Evaluation | None


def prepare(run: Run, environment: Environment) -> Session:
    """Make everything that a run needs. Sets seeds, threads and determinism of the process.

    Args:
        run: the configuration, checked.
        environment: what the shell says.

    Raises:
        DeviceError: the machine lacks what is asked for.
        DataError: the data cannot be used.
    """
    device = choose_device(run.device)
    prepare_process(environment, seed=run.seed, deterministic=run.training.deterministic)
    texts = open_texts(run)
    model = build_model(run, device)
    model.train()
    name = device_name(device)
    loader = Loader(
        texts.train,
        rows=run.training.global_batch,
        sequence_length=run.training.sequence_length,
        seed=run.seed,
        document_mask=run.data.document_mask,
        shuffle=run.data.shuffle,
    )
    state = TrainState(
        identity={field: value for field, value in leaves(run.model, "model.").items() if is_bound(field)},
        model=model,
        optimizer=MasterAdamW(model.named_parameters(), run.optimizer),
        batches=Prefetch(loader),
    )
    return Session(
        run=run,
        device=device,
        device_name=name,
        kernels=summary(kernel_choices(run, device_facts(device, run.training.precision))),
        peak_flops=peak_flops(name),
        size=count(run.model, run.training.sequence_length),
        model=model,
        state=state,
        held_out=texts.held_out,
    )


def open_texts(run: Run) -> Texts:
    """Open the data of a run.

    Raises:
        DataError: they cannot be used.
    """
    if run.evaluation.rows == 0:
        return Texts(train=_open_split(run, "train"), held_out=None)
    held_out = evaluation_batches(
        _open_split(run, "validation"),
        rows=run.training.micro_batch,
        sequence_length=run.training.sequence_length,
        limit_rows=run.evaluation.rows,
        document_mask=run.data.document_mask,
    )
    if held_out.text_bytes == 0:
        raise DataError(
            "the held-out rows predict no text: each of their documents is one token long",
            fix="hold out longer documents, or set evaluation.rows to 0",
        )
    return Texts(train=_open_split(run, "train"), held_out=held_out)


def _open_split(run: Run, split: Split) -> Source:
    return open_source(
        source=run.data.source,
        split=split,
        vocabulary_size=run.model.vocabulary,
        seed=run.seed,
        files=run.data.files,
        validation_files=run.data.validation_files,
        tokenizer=run.data.tokenizer,
        text_field=run.data.text_field,
        end_of_document=run.data.end_of_document or None,
        validation_share=run.data.validation_share,
    )


def state_bytes(run: Run) -> int:
    """Bytes of weights, float32 gradients, masters and moments that the run holds from its first step to its last."""
    in_bf16 = run.training.precision == "bf16"
    total = 0
    for module in meta_model(run.model).modules():
        rounded = in_bf16 and not isinstance(module, Router)
        # Moments and gradient are 12 bytes; a weight is 4, or 2 for its bfloat16 and 4 for its master.
        total += (18 if rounded else 16) * sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return total
