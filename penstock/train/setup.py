"""Builds everything that a run needs before its first step, without writing anything.

Problems of machine, data and model show here, so a run folder is created only for a run that can start. The check of
the memory counts what the layout needs at least on each rank: weights, gradients and optimizer, the layer inputs that
backward reads, and the token ids of a step. A run that it refuses cannot fit; `penstock plan` projects the full need.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from penstock.base.devices import peak_flops
from penstock.base.errors import ConfigError, DataError, DeviceError, PenstockError
from penstock.config.fit import grid_of, shard
from penstock.config.run import Run
from penstock.config.schema import leaves
from penstock.config.size import Count, routed_parameters, size_of
from penstock.data.evaluation import EvaluationRows, evaluation_batches
from penstock.data.loader import Loader, Prefetch
from penstock.data.mixture import Text
from penstock.data.open import open_text
from penstock.data.sources import Split
from penstock.data.tokenizer import BYTES
from penstock.kernels.adamw import BLOCK
from penstock.kernels.choose import summary
from penstock.kernels.tuning import device_facts
from penstock.layout.grid import Grid
from penstock.layout.stages import Stage
from penstock.models.attention import measure_logits
from penstock.models.build import compute_dtype, meta_model, to_dtype
from penstock.models.kernels import kernel_choices
from penstock.models.parameters import fuse_wgrad_accumulation, initialize_masters, param_shards, refresh_float8
from penstock.models.rank_model import RankModel, build_rank, embedding_places, settled_run, stages_of
from penstock.moe.experts import GroupedExperts
from penstock.parallel.axes import ALONE, Axes, make_axes
from penstock.parallel.launch.environment import Environment, host_bytes, read_environment
from penstock.parallel.launch.process import choose_device, device_name, prepare_process
from penstock.parallel.launch.rendezvous import MARGIN, start_fake_process_group, stop_process_group
from penstock.train.adamw import state_shapes
from penstock.train.capture import AutoPasses, CapturedParts, CapturedPasses, choose_capture
from penstock.train.optimizer import MasterAdamW, StateBytes
from penstock.train.passes import forward_backward
from penstock.train.saved_weights import load_initial_weights
from penstock.train.state import TrainState, identity_of
from penstock.train.step import StepResult, StepRule, step_rule, train_step


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run on one rank, ready for its first step."""

    run: Run
    device: torch.device
    device_name: str
    kernels: str  # backend of each operator, in one line
    peak_flops: float | None  # dense bf16 FLOP per second of the device; None if unknown
    size: Count  # of the whole model
    model: RankModel  # this rank's part, in training mode
    rule: StepRule
    state: TrainState
    held_out: EvaluationRows | None  # this rank's rows; None without evaluation
    graphs: CapturedPasses | CapturedParts | AutoPasses | None = None  # None for eager passes
    graphs_note: str = ""  # see `choose_capture`
    sync_free_note: str = ""  # see `settled_sync_free`
    notices: tuple[str, ...] = ()  # for the user before the first step

    @property
    def axes(self) -> Axes:
        return self.model.axes

    def step(self, learning_rate: float) -> StepResult:
        """Train on the next global batch. All ranks call it together; errors as of `train_step`, and of the loader."""
        return train_step(self.model, self.state.optimizer, self.state.batches.next_batch(), self.rule, learning_rate)


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data of a run on one rank."""

    train: Text
    held_out: EvaluationRows | None  # None without evaluation
    notices: tuple[str, ...] = ()  # about files, and skipped records of held-out text, a line each


def prepare(run: Run, environment: Environment | None = None, *, is_new: bool = True) -> Session:
    """Build a run on one rank, with its initial weights. Sets seeds, threads and determinism of the process.

    Several ranks call this after `start_process_group`. Without an `environment` it is that of the process. A run that
    is not new gets its weights from `resume` (penstock/train/loop.py), so `training.initial_weights` is not read.

    Raises a ConfigError if the layout does not fit the ranks, a DeviceError if the machine lacks a requested feature, a
    DataError if the data cannot be used, and a CheckpointError if initial weights are missing, damaged or of another
    model.
    """
    environment = environment or read_environment()
    grid = grid_of(run, environment.world_size)
    device = choose_device(run.device, environment)
    prepare_process(environment, seed=run.seed, deterministic=run.training.deterministic)
    timeout = timedelta(minutes=run.host.timeout_minutes) + MARGIN
    axes = make_axes(grid, embedding_places(run), run.parallel.shard_size, environment.local_world_size, timeout)
    texts = open_texts(run, axes)
    asked = run  # which checkpoints name
    run, sync_free_note = settled_run(run, axes, device)
    model = build_rank(run, axes, device)
    model.train()
    name = device_name(device)
    loader = training_loader(run, texts.train, run.training.global_batch, axes.data.rank, axes.data.size)
    optimizer = MasterAdamW(
        param_shards(model.modules, axes), run.optimizer, parallel=run.parallel, axes=axes, offload=run.offload
    )
    if optimizer.gradient_offload is not None:
        model.whole.reached = optimizer.gradient_offload.reached
    # Values go into the float32 masters and are rounded from there, so they do not depend on precision or layout.
    initialize_masters(model.modules, optimizer.parts(), run.seed, run.model.initializer_range)
    fuse_wgrad_accumulation(model.modules, optimizer.gradient_of)
    if run.optimizer.muon.qk_clip:
        measure_logits(model.modules, device)
    refresh_float8(model.modules)  # 8-bit copies are of the initialized weights
    choices = kernel_choices(run, device_facts(device, run.training.precision))
    graphs, graphs_note = choose_capture(run, device, choices)
    state = TrainState(
        identity=identity_of(asked),
        options=leaves(asked),
        modules=model.modules,
        optimizer=optimizer,
        batches=Prefetch(loader),
        stage=axes.stage,
    )
    origin = ""
    if is_new:
        try:
            origin = load_initial_weights(run.training.initial_weights, state, axes.world)
        except PenstockError:
            state.batches.close()  # it has a thread
            raise
    return Session(
        run=asked,
        device=device,
        device_name=name,
        kernels=summary(choices),
        peak_flops=peak_flops(name),
        size=size_of(run.model, run.training.sequence_length),
        model=model,
        rule=step_rule(run, model, device, graphs or forward_backward),
        state=state,
        held_out=texts.held_out,
        graphs=graphs,
        graphs_note=graphs_note,
        sync_free_note=sync_free_note,
        notices=(*filter(None, [origin]), *_unfilled(run, texts.train), *texts.notices),
    )


def _unfilled(run: Run, text: Text) -> tuple[str, ...]:
    """A note if a tokenizer file fills less than half of the vocabulary."""
    ids, size = max(part.documents.vocab_size for part in text.parts), run.model.vocab_size
    if run.data.tokenizer == BYTES or 2 * ids > size:
        return ()
    return (f"data.tokenizer has {ids:,} ids of model.vocab_size {size:,}: the others are never trained",)


def open_texts(run: Run, axes: Axes = ALONE) -> RunData:
    """Open the data of a run for one rank. Raises a DataError if it cannot be used."""
    if run.evaluation.rows == 0:
        train = open_split(run, "train")
        return RunData(train=train, held_out=None, notices=train.corrupt.take_notices())
    text = open_split(run, "validation")
    held_out = evaluation_rows(run, text, run.evaluation.rows, axes.data.rank, axes.data.size)
    if held_out.text_bytes == 0:
        raise DataError(
            "the held-out rows predict no text: each of their documents is one token long",
            fix="hold out longer documents, or set evaluation.rows to 0",
        )
    train = open_split(run, "train")
    both = (*text.corrupt.take_notices(), *train.corrupt.take_notices())  # which are of the same files, mostly
    return RunData(train=train, held_out=held_out, notices=tuple(dict.fromkeys(both)))


def training_loader(run: Run, text: Text, rows: int, rank: int = 0, ranks: int = 1) -> Loader:
    """The batches of a run, with `rows` rows over all ranks."""
    return Loader(
        text,
        rows=rows,
        sequence_length=run.training.sequence_length,
        seed=run.seed,
        document_mask=run.data.document_mask,
        shuffle=run.data.shuffle,
        rank=rank,
        ranks=ranks,
    )


def evaluation_rows(run: Run, text: Text, limit: int, rank: int = 0, ranks: int = 1) -> EvaluationRows:
    """Up to `limit` held-out rows of a run. Raises a DataError if a document cannot be read, or none has text."""
    return evaluation_batches(
        text,
        rows=run.training.micro_batch * ranks,
        sequence_length=run.training.sequence_length,
        limit_rows=limit,
        document_mask=run.data.document_mask,
        rank=rank,
        ranks=ranks,
    )


def open_split(run: Run, split: Split) -> Text:
    """Open the documents of one split of a run. Raises a DataError if they cannot be used."""
    cache = Path(run.data.cache or Path(run.record.folder, "cache"))
    return open_text(run.data, split, vocab_size=run.model.vocab_size, seed=run.seed, cache=cache)


def state_bytes(run: Run) -> int:
    """Bytes of weights, float32 gradients, masters and moments of a run on one device."""
    model = meta_model(run.model)
    to_dtype(model, compute_dtype(run))
    total = 0
    for param in param_shards([model], ALONE):
        parameter, is_muon = param.parameter, run.optimizer.method == "muon" and param.matrices is not None
        state = state_shapes(param.shape, parameter.dtype, run.optimizer, is_muon=is_muon).values()
        total += (4 + parameter.itemsize) * parameter.numel() + sum(item.nbytes for item in state)
    return total


_ID_BYTES = 8
"""Each row is held as ids and document numbers of this size."""


@dataclass(frozen=True)
class MemoryNeed:
    """Least memory of one rank, in bytes."""

    state: int  # weights, gradients and optimizer, on the device
    activations: int
    rows: int  # token ids of a step, in host memory
    offloaded: int  # gradients and optimizer, in host memory


def least_memory_need(run: Run, grid: Grid) -> MemoryNeed:
    """Least memory of a rank, averaged over the pipeline stages."""
    training, model = run.training, run.model
    size = size_of(model, training.sequence_length)
    routed = routed_parameters(model)
    dense = size.parameters + size.mtp_parameters - routed
    of_dense = _state(run, dense / (grid.tensor * grid.pipeline), grid.data * grid.context)
    of_routed = _state(run, routed / (grid.expert * grid.expert_tensor * grid.pipeline), grid.expert_data)
    state, offloaded = (int(part + other) for part, other in zip(of_dense, of_routed, strict=True))
    width = model.residual_size * (2 if training.precision == "bf16" else 4)  # bytes per position
    positions = training.micro_batch * training.sequence_length / (grid.tensor * grid.context)
    kept = 0 if run.offload.activations else model.layers / grid.pipeline * positions * width
    rows = 2 * training.global_batch * (training.sequence_length + 1) * _ID_BYTES
    return MemoryNeed(state, int(kept), rows, offloaded)


def find_shortage(run: Run, grid: Grid, device: torch.device, local_ranks: int) -> DeviceError | None:
    """The error if a run cannot fit into the memory of this machine, which `local_ranks` ranks share.

    None if it can, or with host.check_memory=false.
    """
    if not run.host.check_memory:
        return None
    need = least_memory_need(run, grid)
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
        problem = _shortage(run, "GPU", there, {"state": need.state, "activations": need.activations}, 1)
        on_host = {"offloaded": need.offloaded, "rows": need.rows}
    else:
        problem, on_host = None, vars(need)
    return problem or _shortage(run, "machine", host_bytes(), on_host, local_ranks)


def _shortage(run: Run, where: str, there: int | None, needs: Mapping[str, int], ranks: int) -> DeviceError | None:
    """The error if `ranks` ranks need more than there is; None if they do not, or if that is unknown."""
    wanted = sum(needs.values()) * ranks
    if there is None or wanted <= there:
        return None
    rows = f"training.sequence_length {run.training.sequence_length:,}"
    causes = {
        "state": ("weights, gradients and optimizer", "a smaller model, such as its first layers (NAME-4l)"),
        "activations": (f"activations of {rows}", "shorter or fewer rows"),
        "rows": (f"{run.training.global_batch:,} rows of {rows}", "shorter or fewer rows"),
        "offloaded": (
            "gradients and optimizer in host memory",
            "smaller formats, optimizer.moment_dtype=int8 and optimizer.store_param_remainders=true",
        ),
    }
    cause, smaller = causes[max(needs, key=lambda name: needs[name])]
    of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
    return DeviceError(
        f"run {run.name} does not fit into the memory of this {where}: {cause}{of_ranks} are most of what it needs",
        got=f"a need of {wanted / 1e9:,.1f} GB or more, and {there / 1e9:,.1f} GB",
        fix=f"{smaller}, or more ranks: `penstock plan {run.name} --on 8xH200` says where it fits; "
        "host.check_memory=false tries it all the same",
    )


def _state(run: Run, parameters: float, copies: int) -> tuple[float, float]:
    """Bytes of a rank for parameters that `copies` ranks have: on the device, and offloaded to the host."""
    divides, shards = shard(run), min(run.parallel.shard_size or copies, copies)
    is_own = run.training.precision == "fp32" or divides == "full"  # the weight is its own master
    dtype, is_muon = torch.float32 if is_own else torch.bfloat16, run.optimizer.method == "muon"
    state = state_shapes((1, BLOCK), dtype, run.optimizer, is_muon=is_muon)
    part = parameters / (shards if divides == "full" else 1)
    optimizer = parameters / (1 if divides == "none" else shards) * sum(item.nbytes for item in state.values()) / BLOCK
    gradient, weight = part * torch.float32.itemsize, part * (4 if is_own else 2)
    offloaded = optimizer * run.offload.optimizer + gradient * run.offload.gradients
    return weight + gradient + optimizer - offloaded, offloaded


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One rank of a run without memory: its groups, model, shards, optimizer and schedule on the meta device."""

    model: RankModel
    stages: dict[int, Stage]  # of this rank, by number
    dense: int  # parameters outside of routed experts on this rank, before sharding over data ranks
    expert: int  # parameters of its experts, before sharding as well
    memory: StateBytes  # held from its first step to its last


def rehearse(run: Run, *, world: int, rank: int) -> Rehearsal:
    """Build one rank of a run as a real run does, with a process group of its own that moves nothing.

    Raises a ConfigError if the layout does not fit the ranks or the model, or there is no such rank.
    """
    grid = grid_of(run, world)
    if rank >= world:
        raise ConfigError("--rank is not a rank of --fake-world", got=rank, allowed=f"0 to {world - 1}")
    start_fake_process_group(rank, world)
    try:
        axes = make_axes(grid, embedding_places(run), run.parallel.shard_size)
        model = build_rank(run, axes, torch.device("meta"))
        held = param_shards(model.modules, axes)
        optimizer = MasterAdamW(held, run.optimizer, parallel=run.parallel, axes=axes, offload=run.offload)
        memory = optimizer.memory()
    finally:
        stop_process_group()
    modules = [module for decoder in model.modules for module in decoder.modules()]
    expert = sum(p.numel() for module in modules if isinstance(module, GroupedExperts) for p in module.parameters())
    dense = sum(parameter.numel() for _, parameter in model.named_parameters()) - expert
    stages = stages_of(run)
    rank_stages = {number: stages[number] for number in model.decoders}
    return Rehearsal(model=model, stages=rank_stages, dense=dense, expert=expert, memory=memory)
