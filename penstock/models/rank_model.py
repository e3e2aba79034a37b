"""The model of one rank: its stages, the pipeline that runs them, and its positions of each row."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from penstock.config.fit import context_method, micro_batches
from penstock.config.run import Run
from penstock.config.size import stage_costs
from penstock.config.sync_free import SyncFreeFacts, settled_sync_free
from penstock.kernels.tuning import device_facts
from penstock.layout.actions import Schedule
from penstock.layout.grid import Method, SequenceLayout
from penstock.layout.schedules import schedule
from penstock.layout.stages import Stage, balanced_stages, parse_stages
from penstock.models.build import (
    compute_dtype,
    gather_in_float8,
    materialize,
    meta_stages,
    needs_embedding,
    set_dtypes,
    transfers_of,
    whole_model,
)
from penstock.models.decoder import Decoder
from penstock.models.kernels import choose_float8, choose_operators, most_sync_free
from penstock.parallel import offload
from penstock.parallel.async_transfer import WeightGradStore
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.collectives import all_gather_json
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.pipeline import Message, PipelineRunner
from penstock.parallel.replicas import dispatcher_on, replica_memory, shared_buffers
from penstock.parallel.symmetric import SymmetricBuffers


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """Everything that one rank trains."""

    decoders: Mapping[int, Decoder]  # its stages by number; without a pipeline one decoder that holds everything
    axes: Axes = ALONE
    pipeline: PipelineRunner | None = None  # runs the stages
    positions: tuple[int, ...] | None = None  # of a row on this rank; None for all
    context_method: Method = "ulysses"
    buffers: SymmetricBuffers | None = None  # memory of the node's GPUs, if dispatch uses it

    @property
    def modules(self) -> tuple[Decoder, ...]:
        """The stages, first to last."""
        return tuple(self.decoders.values())

    @property
    def whole(self) -> Decoder:
        """The decoder of a run without pipeline."""
        assert self.pipeline is None, "a pipeline's rank has no whole decoder"
        (decoder,) = self.decoders.values()
        return decoder

    @property
    def device(self) -> torch.device:
        return next(self.modules[0].parameters()).device

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter of this rank by its name in the whole model; a shared one once."""
        parameters = {name: parameter for decoder in self.modules for name, parameter in decoder.named_parameters()}
        yield from parameters.items()

    def train(self, mode: bool = True) -> None:
        for decoder in self.modules:
            decoder.train(mode)


def build_rank(run: Run, axes: Axes, device: torch.device) -> RankModel:
    """Build the part of a run's model that one rank holds, with its initial weights; on the meta device without memory.

    Raises a ConfigError if the layout does not fit the model, a KernelError if the run asks for kernels that the device
    cannot run, and a DeviceError if it needs symmetric memory that the GPUs do not have.
    """
    plan, method = schedule_of(run, axes), context_method(run)
    local_stages = {0: whole_model(run.model)}
    if plan is not None:
        stages = stages_of(run)
        local_stages = {number: stages[number] for number in plan.stages_of(axes.pipeline.rank)}
    weight_grads = WeightGradStore() if plan is not None and plan.splits_backward else None  # one for all stages
    positions = None
    if axes.context.size > 1:
        length, context, tensor = run.training.sequence_length, axes.context, axes.tensor.size
        layout = SequenceLayout(length=length, context=context.size, tensor=tensor, method=method)
        positions = layout.of_context(context.rank)  # tensor ranks read the same positions
    kernel_device = torch.device("cpu") if device.type == "meta" else device
    buffers = shared_buffers(run, axes, device)
    transfers = transfers_of(run, kernel_device)
    layer_context = LayerContext(
        operators=choose_operators(run, kernel_device),
        axes=axes,
        weight_grads=weight_grads,
        context_method=method,
        dispatch=run.dispatch,
        buffers=buffers,
        replicas=replica_memory(run, axes, buffers),
        transfers=transfers,
        float8=choose_float8(run, kernel_device),
        experts_in_mxfp4=run.qat.experts == "mxfp4",
        offload=offload.rule_for(run.offload, kernel_device),
    )
    decoders = meta_stages(run, layer_context, local_stages)
    set_dtypes(run, decoders.values(), axes, kernel_device)
    if device.type != "meta":
        materialize(run, device, decoders.values())
        gather_in_float8(run, decoders.values(), axes)
    pipeline = None
    if plan is not None:
        pipeline = PipelineRunner(plan, axes, message_of(run, axes, device), weight_grads, transfers)
    return RankModel(
        decoders=decoders, axes=axes, pipeline=pipeline, positions=positions, context_method=method, buffers=buffers
    )


def settled_run(run: Run, axes: Axes, device: torch.device) -> tuple[Run, str]:
    """The run on a device with a number for `dispatch.sync_free` auto, and why (`settled_sync_free`). Collective."""
    if run.model.moe is None or run.dispatch.sync_free != "auto" or device.type != "cuda" or axes.expert.size == 1:
        return settled_sync_free(run, SyncFreeFacts(dispatcher="local", vendor="cpu", limit=0, device_bytes=0))
    facts = SyncFreeFacts(
        dispatcher=dispatcher_on(run, axes, device).name,
        vendor="nvidia" if torch.version.hip is None else "amd",
        limit=most_sync_free(run, device_facts(device, run.training.precision)),
        device_bytes=min(all_gather_json(torch.cuda.get_device_properties(device).total_memory, axes.world)),
    )
    return settled_sync_free(run, facts)


def schedule_of(run: Run, axes: Axes) -> Schedule | None:
    """The pipeline schedule of a run; None without a pipeline."""
    if axes.grid.pipeline == 1:
        return None
    return schedule(
        run.pipeline.schedule,
        ranks=axes.grid.pipeline,
        stages_per_rank=run.pipeline.stages_per_rank,
        micro_batches=micro_batches(run, axes.grid),
        pairs=run.dispatch.overlap == "passes",
    )


def stages_of(run: Run) -> tuple[Stage, ...]:
    """The parts of each pipeline stage, from `pipeline.layout` (raises as `parse_stages` does) or balanced by cost."""
    model = run.model
    if run.parallel.pipeline == 1:
        return (whole_model(model),)
    stages = run.parallel.pipeline * run.pipeline.stages_per_rank
    if run.pipeline.layout:
        return parse_stages(run.pipeline.layout, layers=model.layers, mtp_layers=model.mtp_layers, stages=stages)
    costs = stage_costs(model, run.training.sequence_length)
    return balanced_stages(layers=model.layers, mtp_layers=model.mtp_layers, stages=stages, costs=costs)


def embedding_places(run: Run) -> tuple[int, ...]:
    """Pipeline ranks that hold the embedding: that of the first stage, and those whose stages reuse its weights."""
    ranks = run.parallel.pipeline
    if ranks == 1:
        return (0,)
    # The placement does not depend on the number of micro-batches; twice the ranks is enough for every schedule.
    of_rank = run.pipeline.stages_per_rank
    plan = schedule(run.pipeline.schedule, ranks=ranks, stages_per_rank=of_rank, micro_batches=2 * ranks)
    stages = enumerate(stages_of(run))
    return tuple(sorted({plan.rank_of(number) for number, stage in stages if needs_embedding(run.model, stage)}))


def message_of(run: Run, axes: Axes, device: torch.device) -> Message:
    """Shape and dtype of the tensors between pipeline stages."""
    positions_here = run.training.sequence_length // axes.sequence.size  # axis of context x tensor ranks
    shape = (run.training.micro_batch, positions_here, run.model.residual_size)
    return Message(shape=shape, dtype=compute_dtype(run), device=device)
