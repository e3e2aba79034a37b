"""From a configuration to everything that a run is made of, with nothing written yet.

What can be wrong with a machine, its data or a model shows here, so a run folder is made only for a run that can start.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.base.devices import peak_flops
from penstock.base.errors import DataError
from penstock.config.fit import grid_of
from penstock.config.run import Run
from penstock.config.size import Count
from penstock.data.evaluation import EvaluationRows, evaluation_batches
from penstock.data.loader import Loader, Prefetch
from penstock.data.open import open_text
from penstock.data.sources import Split
from penstock.data.texts import Text
from penstock.data.tokenizer import BYTES
from penstock.kernels.choose import summary
from penstock.kernels.device_facts import device_facts
from penstock.models.build import meta_model
from penstock.models.count import count
from penstock.models.init import initialize_masters
from penstock.models.kernels import kernel_choices
from penstock.models.parameters import fuse_wgrad_accumulation, param_shards, refresh_float8
from penstock.models.rank_model import RankModel, build_rank, embedding_places
from penstock.moe.router import TopKRouter
from penstock.parallel.axes import ALONE, Axes, make_axes
from penstock.parallel.launch.environment import Environment
from penstock.parallel.launch.process import choose_device, device_name, prepare_process
from penstock.train.captured import CapturedPasses
from penstock.train.captured_parts import CapturedParts
from penstock.train.choose_capture import choose_capture
from penstock.train.optimizer import MasterAdamW
from penstock.train.passes import forward_backward
from penstock.train.state import TrainState, identity_of
from penstock.train.step import StepRule, step_rule


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run that is ready for its first step, on one rank.

    Attributes:
        run: the configuration.
        device: where it trains.
        device_name: as the driver reports it.
        kernels: which backend runs each operator, in one line.
        peak_flops: dense bf16 FLOP per second of the device, or None where that is unknown.
        size: parameters and FLOPs of the whole model.
        model: what this rank trains, in training mode.
        rule: how a step is made.
        state: model, optimizer and data: what a checkpoint holds.
        held_out: our rows to judge by, or None if evaluation is off.
        graphs: makes the passes by replaying a graph, or graphs; None if they are eager.
        graphs_note: a word on that; empty if nobody asked for graphs.
        notices: what the user should know before the first step, a line each.
    """

    run: Run
    device: torch.device
    device_name: str
    kernels: str
    peak_flops: float | None
    size: Count
    model: RankModel
    rule: StepRule
    state: TrainState
    held_out: EvaluationRows | None
    graphs: CapturedPasses | CapturedParts | None = None
    graphs_note: str = ""
    notices: tuple[str, ...] = ()

    @property
    def axes(self) -> Axes:
        """Groups of this rank."""
        return self.model.axes


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The data of a run.

    Attributes:
        train: what to train on.
        held_out: rows to judge by, or None if evaluation is off.
        notices: which records of held-out text were skipped, a line each.
    """

    train: Text
    held_out: EvaluationRows | None
    notices: tuple[str, ...] = ()


def prepare(run: Run, environment: Environment) -> Session:
    """Make everything that a run needs on one rank. Sets seeds, threads and determinism of the process.

    Args:
        run: the configuration, checked.
        environment: what the shell says. Of several ranks each calls this, after `start_process_group`.

    Raises:
        ConfigError: the layout does not fit the ranks.
        DeviceError: the machine lacks what is asked for.
        DataError: the data cannot be used.
    """
    grid = grid_of(run, environment.world_size)
    device = choose_device(run.device, environment)
    prepare_process(environment, seed=run.seed, deterministic=run.training.deterministic)
    axes = make_axes(grid, embedding_places(run), run.parallel.shard_size, environment.local_world_size)
    texts = open_texts(run, axes)
    model = build_rank(run, axes, device)
    model.train()
    name = device_name(device)
    loader = Loader(
        texts.train,
        rows=run.training.global_batch,
        sequence_length=run.training.sequence_length,
        seed=run.seed,
        document_mask=run.data.document_mask,
        shuffle=run.data.shuffle,
        rank=axes.data.rank,
        ranks=axes.data.size,
    )
    optimizer = MasterAdamW(
        param_shards(model.modules, axes), run.optimizer, parallel=run.parallel, world=axes.world, offload=run.offload
    )
    initialize_masters(model.modules, optimizer.parts(), run.seed, run.model.initializer_range)
    fuse_wgrad_accumulation(model.modules, optimizer.gradient_of)
    refresh_float8(model.modules)
    choices = kernel_choices(run, device_facts(device, run.training.precision))
    graphs, graphs_note = choose_capture(run, device, choices)
    state = TrainState(
        identity=identity_of(run),
        modules=model.modules,
        optimizer=optimizer,
        batches=Prefetch(loader),
        stage=axes.stage,
    )
    return Session(
        run=run,
        device=device,
        device_name=name,
        kernels=summary(choices),
        peak_flops=peak_flops(name),
        size=count(run.model, run.training.sequence_length),
        model=model,
        rule=step_rule(run, model, device, graphs or forward_backward),
        state=state,
        held_out=texts.held_out,
        graphs=graphs,
        graphs_note=graphs_note,
        notices=(*_unfilled(run, texts.train), *texts.notices),
    )


def _unfilled(run: Run, text: Text) -> tuple[str, ...]:
    """A word on a tokenizer of a file that fills less than half of the vocabulary."""
    ids, size = max(part.documents.vocabulary_size for part in text.parts), run.model.vocab_size
    if run.data.tokenizer == BYTES or 2 * ids > size:
        return ()
    return (f"data.tokenizer has {ids:,} ids of model.vocab_size {size:,}: the others are never trained",)


def open_texts(run: Run, axes: Axes = ALONE) -> Texts:
    """Open the data of a run, as one rank reads them.

    Raises:
        DataError: they cannot be used.
    """
    if run.evaluation.rows == 0:
        return Texts(train=open_split(run, "train"), held_out=None)
    text = open_split(run, "validation")
    held_out = evaluation_batches(
        text,
        rows=run.training.micro_batch * axes.data.size,
        sequence_length=run.training.sequence_length,
        limit_rows=run.evaluation.rows,
        document_mask=run.data.document_mask,
        rank=axes.data.rank,
        ranks=axes.data.size,
    )
    if held_out.text_bytes == 0:
        raise DataError(
            "the held-out rows predict no text: each of their documents is one token long",
            fix="hold out longer documents, or set evaluation.rows to 0",
        )
    return Texts(train=open_split(run, "train"), held_out=held_out, notices=text.corrupt.take_notices())


def open_split(run: Run, split: Split) -> Text:
    """Open the documents of one split of a run.

    Raises:
        DataError: they cannot be used.
    """
    cache = Path(run.data.cache or Path(run.record.folder, "cache"))
    return open_text(run.data, split, vocabulary_size=run.model.vocab_size, seed=run.seed, cache=cache)


def state_bytes(run: Run) -> int:
    """Bytes of weights, float32 gradients, masters and moments that the run holds from its first step to its last."""
    in_bf16 = run.training.precision == "bf16"
    total = 0
    for module in meta_model(run.model).modules():
        rounded = in_bf16 and not isinstance(module, TopKRouter)
        # Moments and gradient are 12 bytes; a weight is 4, or 2 for its bfloat16 and 4 for its master.
        total += (18 if rounded else 16) * sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return total
