"""Build one rank of a run on the meta device, for a chip that need not be present.

Differences from `penstock.models.rank_model.build_rank`: kernels are those that the target chip would choose; memory
that GPUs of a node share has a size and no addresses; dispatchers that read row counts are given expected counts;
nothing is sharded, because FSDP2 gives a module whole weights whenever it computes.

A rank can also save activations as a trainer with unfused kernels would (`Saving`), to compare with published memory
plans. Then the run and its experts are made of smaller operators:

    experts    tokens are copied into the experts' order; product, SwiGLU and product each save their input:
               K (D + 3 F) numbers a token. The fused kernels save K 2 F numbers and the tokens that arrived.
    weight     gradients of the experts are tensors of their own; autograd adds them to the sums
    dispatch   `auto` becomes all-to-all, one row for each choice
    logits     of all tokens at once
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from penstock.config.dispatcher import choose_dispatcher, dispatch_facts
from penstock.config.fit import context_method
from penstock.config.run import Run, with_values
from penstock.kernels.choose import operators
from penstock.kernels.grouped_gemm import grouped_gemm
from penstock.kernels.operators import torch_add_bias
from penstock.kernels.reference import SWIGLU, ExpertRule, check_biases
from penstock.kernels.replica_plan import MILLION
from penstock.kernels.swiglu import swiglu
from penstock.kernels.tuning import DeviceFacts
from penstock.layout.actions import Schedule
from penstock.layout.stages import Stage
from penstock.models.attention import SoftmaxAttention, measure_logits
from penstock.models.build import meta_stages, set_dtypes, transfers_of
from penstock.models.decoder import Decoder
from penstock.models.kernels import float8_rule, kernel_choices
from penstock.models.linear import Embedding, Linear
from penstock.models.parameters import copy_bytes, fuse_wgrad_accumulation, param_shards, refresh_float8
from penstock.models.rank_model import schedule_of, stages_of
from penstock.moe.dispatch.balanced import BalancedDispatcher
from penstock.moe.dispatch.collective import AllGatherDispatcher, AllToAllDispatcher, HierarchicalDispatcher
from penstock.moe.dispatch.contract import Dispatcher
from penstock.moe.dispatch.row_capacity import SplitSizes
from penstock.moe.dispatch.symmetric import SymmetricDispatcher
from penstock.moe.experts import GroupedExperts
from penstock.moe.layer import MoE
from penstock.parallel import offload
from penstock.parallel.async_transfer import WeightGradStore
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.offload import SLOTS, GradientOffload
from penstock.parallel.replicas import buffer_sizes, replica_memory
from penstock.parallel.shard import is_dtensor
from penstock.parallel.symmetric import SymmetricBuffers
from penstock.plan.costs import routed_traffic
from penstock.plan.op_recorder import (
    FROM_HOST,
    SLOT_FROM_HOST,
    SLOT_TO_HOST,
    TO_HOST,
    RecordedCopyStream,
    RecordedTransferStream,
    RecordedWeightGradStore,
)
from penstock.plan.rates import TokenTraffic, reached
from penstock.train.optimizer import MasterAdamW, StateBytes

Saving = Literal["run", "conventional"]
"""What is saved for backward: as the run's operators do it, or as separate operators would."""


def conventional(run: Run) -> Run:
    """The run with the options that save more. Training is the same; `Target.saving` changes the experts."""
    tokens = run.training.micro_batch * run.training.sequence_length
    method = "all-to-all" if run.dispatch.method == "auto" and run.dispatch.sync_free_stage < 2 else run.dispatch.method
    return with_values(run, kernels={"loss_chunk": tokens}, dispatch={"method": method})


def separate_expert_ffn(  # noqa: PLR0913 (it stands in for an operator)
    x_ND: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    places_TK: Tensor | None = None,
    biases: tuple[Tensor, Tensor | None] | None = None,
    rule: ExpertRule = SWIGLU,
) -> Tensor:
    """`penstock.kernels.expert_ffn.expert_ffn` as a copy and three operators, each of which saves its inputs.

    Arguments and result are those of that function; `places_TK` is not read, because autograd derives the gradient of
    the copy.
    """
    check_biases(biases is not None, rule)
    x_RD = x_ND if index_R is None else x_ND.index_select(0, index_R)
    gate_up_bias_eF, down_bias_eD = biases or (None, None)
    gate_up_RF = grouped_gemm(x_RD, gate_up_eFD, counts_e)
    if gate_up_bias_eF is not None:
        gate_up_RF = torch_add_bias(gate_up_RF, gate_up_bias_eF, counts_e)
    y_RD = grouped_gemm(swiglu(gate_up_RF, weights_R, rule), down_eDF, counts_e)
    return y_RD if down_bias_eD is None else torch_add_bias(y_RD, down_bias_eD, counts_e, weights_R)


META = torch.device("meta")
HOME = torch.device("cpu")  # device of objects without tensors, such as streams


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a rank runs, as far as its memory depends on it."""

    device: DeviceFacts
    world: int = 0  # ranks of the run; 0 if it has so many that several hold each expert
    ranks_per_node: int = 8  # ranks that fast links join; 0 for all
    ranks_per_pod: int = 0  # ranks that the network joins at full bandwidth; 0 for all
    imbalance: float = 1.2  # rows of the fullest rank's experts over the even share, without a fixed capacity
    saving: Saving = "run"  # activations that are saved for backward
    in_turn: bool = False  # tokens take the experts in turn, as benchmarks with forced balance do
    passes_keys: bool = False  # context-parallel ranks pass keys around, which no run of ours does


@dataclass(frozen=True, kw_only=True)
class MetaRank:
    """A rank without memory."""

    run: Run
    target: Target
    axes: Axes
    decoders: Mapping[int, Decoder]  # its stages by number, with whole weights
    state: StateBytes  # bytes between steps; weights with their copies in 8 bits
    sharded: frozenset[str]  # names of the parameters that FSDP2 shards
    optimizer: MasterAdamW | None  # of the parameters that are not sharded; None if all are
    full_optimizer: MasterAdamW
    schedule: Schedule | None  # of the pipeline, or None
    weight_grads: WeightGradStore | None  # collects weight gradients if the schedule splits backward passes, else None
    symmetric_bytes: int  # of the memory that GPUs of the node write into

    @property
    def dispatcher(self) -> str:
        """The dispatcher of its layers with experts; `none` without any."""
        modules = (module for decoder in self.decoders.values() for module in decoder.modules())
        return next((module.dispatcher.name for module in modules if isinstance(module, MoE)), "none")


def make_meta_rank(run: Run, axes: Axes, target: Target, stages: Sequence[Stage] | None = None) -> MetaRank:
    """Build one rank on the axes of a fake process group; a KernelError if the target cannot run the run's kernels.

    `stages` are the contents of each stage, which need not be the whole model; None takes the run's own.
    """
    schedule = schedule_of(run, axes)
    stages = stages_of(run) if stages is None else stages
    rank_stages = {0: stages[0]}
    if schedule is not None:
        rank_stages = {number: stages[number] for number in schedule.stages_of(axes.pipeline.rank)}
    weight_grads = RecordedWeightGradStore() if schedule is not None and schedule.splits_backward else None
    buffers = _shared_buffers(run, axes, target.device)
    layer_context = _layer_context(run, axes, target, weight_grads, buffers)
    decoders = meta_stages(run, layer_context, rank_stages)
    # Whole weights in the dtype of the computation, as FSDP2 gathers them.
    set_dtypes(_unsharded(run), decoders.values(), axes, HOME)
    sharded, full_optimizer = _sharded_state(run, axes, layer_context, rank_stages)
    optimizer = _optimizer(run, axes, decoders, sharded)
    _fuse_accumulation(decoders, sharded, optimizer)
    _adapt_modules(run, target, decoders)
    if optimizer is not None and optimizer.gradient_offload is not None:
        _record_copies(optimizer.gradient_offload, run)
        for decoder in decoders.values():
            decoder.reached = optimizer.gradient_offload.reached
    full_optimizer = full_optimizer or optimizer
    assert full_optimizer is not None, "a rank has parameters"
    state = full_optimizer.memory()
    if not sharded or run.float8.gather:
        # Once a step, before its passes; what FSDP2 gathers in 16 bits is quantized by each pass.
        refresh_float8(decoders.values())
    if not sharded:
        modules = chain.from_iterable(decoder.modules() for decoder in decoders.values())
        copies = sum(sum(copy_bytes(module).values()) for module in modules)
        state = replace(state, weights=state.weights + copies)
    return MetaRank(
        run=run,
        target=target,
        axes=axes,
        decoders=decoders,
        state=state,
        sharded=sharded,
        optimizer=optimizer,
        full_optimizer=full_optimizer,
        schedule=schedule,
        weight_grads=weight_grads,
        symmetric_bytes=0 if buffers is None else buffers.sizes.total_bytes,
    )


def _adapt_modules(run: Run, target: Target, decoders: Mapping[int, Decoder]) -> None:
    """Let layers with experts expect row counts that they would read, and attention measure and pass what is asked."""
    if run.optimizer.muon.qk_clip:
        measure_logits(decoders.values(), META)
    for module in chain.from_iterable(decoder.modules() for decoder in decoders.values()):
        if isinstance(module, MoE):
            traffic = routed_traffic(run, in_turn=target.in_turn)
            module.dispatcher = with_counts(module.dispatcher, SplitSizes(target.imbalance), traffic)
        elif target.passes_keys and isinstance(module, SoftmaxAttention):
            alone = replace(module.layer_context.axes, context=ALONE.context)
            module.layer_context = replace(module.layer_context, axes=alone)
        elif target.passes_keys and isinstance(module, Decoder):  # no bounds in a row whose keys come in turn
            plain = replace(module.layer_context.operators, bounded_attention=None)
            module.layer_context = replace(module.layer_context, operators=plain)


def _record_copies(gradients: GradientOffload, run: Run) -> None:
    """Sums of gradients move in the next pass as in every micro-batch but the first, which fetches nothing.

    So all of a step are taken to fetch sums, unless there is only one.
    """
    has_several = run.training.global_batch > run.training.micro_batch
    if has_several:
        gradients.have_sums()
    for is_before in (has_several, False):
        gradients.outward = RecordedCopyStream(SLOT_TO_HOST, SLOTS)
        gradients.inward = RecordedCopyStream(SLOT_FROM_HOST, SLOTS)
        if is_before:
            gradients.replay_backward()  # its last copies fill the slots for the next micro-batch


def _layer_context(
    run: Run, axes: Axes, target: Target, weight_grads: WeightGradStore | None, buffers: SymmetricBuffers | None
) -> LayerContext:
    chosen = operators(kernel_choices(run, target.device))
    in_mxfp4 = run.qat.experts == "mxfp4"  # only the one autograd function rounds matrices
    if target.saving == "conventional" and not in_mxfp4:
        chosen = replace(chosen, expert_ffn=separate_expert_ffn, expert_ffn_is_fused=False, saves_rows=False)
    rule = offload.rule_for(run.offload, META)
    if rule.store is not None:
        rule.store.outward, rule.store.inward = RecordedCopyStream(TO_HOST), RecordedCopyStream(FROM_HOST)
    return LayerContext(
        operators=chosen,
        axes=axes,
        weight_grads=weight_grads,
        context_method=context_method(run),
        dispatch=run.dispatch,
        buffers=buffers,
        replicas=replica_memory(run, axes, buffers),
        transfers=None if transfers_of(run, HOME) is None else RecordedTransferStream(),
        float8=float8_rule(run, target.device),
        experts_in_mxfp4=in_mxfp4,
        offload=rule,
    )


def _unsharded(run: Run) -> Run:
    """The run without FSDP2."""
    return with_values(run, parallel={"shard": "none"}) if run.parallel.shard == "full" else run


def _sharded_state(
    run: Run, axes: Axes, layer_context: LayerContext, rank_stages: Mapping[int, Stage]
) -> tuple[frozenset[str], MasterAdamW | None]:
    """Names of the parameters that FSDP2 shards, and an optimizer of all parameters; empty and None without FSDP2."""
    if run.parallel.shard != "full":
        return frozenset(), None
    decoders = meta_stages(run, layer_context, rank_stages)
    set_dtypes(run, decoders.values(), axes, HOME)
    # A second set of decoders, sharded by FSDP2, for the optimizer's state only.
    shards = param_shards(decoders.values(), axes)
    sharded = frozenset(shard.name for shard in shards if is_dtensor(shard.parameter))
    return sharded, MasterAdamW(shards, run.optimizer, parallel=run.parallel, axes=axes, offload=run.offload)


def _optimizer(run: Run, axes: Axes, decoders: Mapping[int, Decoder], sharded: frozenset[str]) -> MasterAdamW | None:
    """The optimizer of the parameters that are not sharded; None if all are."""
    shards = [param_shard for param_shard in param_shards(decoders.values(), axes) if param_shard.name not in sharded]
    if not shards:
        return None
    parallel = _unsharded(run).parallel if sharded else run.parallel
    return MasterAdamW(shards, run.optimizer, parallel=parallel, axes=axes, offload=run.offload)


def _shared_buffers(run: Run, axes: Axes, device: DeviceFacts) -> SymmetricBuffers | None:
    """`penstock.parallel.replicas.shared_buffers` for GPUs that all reach each other's memory."""
    facts = dispatch_facts(run, axes.expert_node.size, "no GPUs" if device.kind == "cpu" else "")
    if run.model.moe is None or not choose_dispatcher(facts).writes_to_peers:
        return None
    sizes = buffer_sizes(run, axes)
    memory = torch.empty(sizes.total_bytes, dtype=torch.uint8, device=META)
    return SymmetricBuffers(sizes, memory, [0] * sizes.ranks, axes.expert_node.rank)


def _fuse_accumulation(decoders: Mapping[int, Decoder], sharded: frozenset[str], optimizer: MasterAdamW | None) -> None:
    """`fuse_wgrad_accumulation` for the parameters that are not sharded."""
    no_sum = torch.empty(0, device=META)
    if optimizer is not None:
        gradient_of = optimizer.gradient_of
        fuse_wgrad_accumulation(decoders.values(), lambda name: no_sum if name in sharded else gradient_of(name))
    for decoder in decoders.values():
        for path, module in decoder.named_modules():
            if isinstance(module, GroupedExperts) and f"{path}.gate_up_eFD" in sharded:
                # FSDP2 reduces these gradients itself, so the kernels return them.
                module.sums = None
            elif isinstance(module, (Linear, Embedding)) and f"{path}.weight" in sharded:
                module.main_grad = None


def with_counts(dispatcher: Dispatcher, counts: SplitSizes, traffic: TokenTraffic) -> Dispatcher:
    """The dispatcher with expected row counts where it would read them from the device."""
    if isinstance(dispatcher, BalancedDispatcher):
        even = replace(counts, imbalance=min(counts.imbalance, 1 + dispatcher.rule.tolerance / MILLION))
        return replace(dispatcher, inner=with_counts(dispatcher.inner, even, traffic))
    if isinstance(dispatcher, HierarchicalDispatcher):
        # A token that came for some of its choices brings those of other nodes along.
        nodes = dispatcher.nodes.across.size
        share = reached(traffic, nodes)
        inner = with_counts(dispatcher.inner, replace(counts, part=counts.part / nodes / share), traffic)
        return replace(dispatcher, counts=replace(counts, reached=share), inner=inner)
    if isinstance(dispatcher, (AllToAllDispatcher, AllGatherDispatcher, SymmetricDispatcher)):
        return replace(dispatcher, counts=counts)
    return dispatcher
