"""What rules look at: a layout, its question and its model as plain numbers.

A search looks at tens of thousands of layouts and has seconds, so a rule must not need a `Run`, let alone a model. It
gets a `Sizes`: frozen, made in a microsecond, changed by `dataclasses.replace`. Facts of the model are shared by all
layouts of a search and stand in a value of their own. `sizes_of` makes the same from a run, for what is not a search.

Nothing here imports PyTorch. Counts of parameters come in as numbers: whoever asks has counted them once
(`penstock.models.count`).
"""

from dataclasses import dataclass
from typing import Literal

from penstock.config.dispatch_rules import STAGES
from penstock.config.dispatcher import choose_dispatcher, dispatch_facts, ranks_on_a_node
from penstock.config.fit import heads_of, shard
from penstock.config.model import LatentAttention, Model
from penstock.config.parallel import Overlap
from penstock.config.run import Run
from penstock.layout.sequence import Method
from penstock.plan.hardware import Cluster

NO_PIPELINE = "none"
"""`Sizes.schedule` of a run without a pipeline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Of a model, what rules need.

    Attributes:
        layers: of the decoder.
        dense_layers: of them, without experts.
        vocab_size: token ids.
        head_counts: heads, and key/value heads where there are such; what tensor-parallel ranks divide.
        experts: routed ones of a layer; 0 in a dense model.
        top_k: of them, for a token.
        expert_width: of one.
        shared_width: of the shared expert; 0 for none.
        dense_width: of a dense network; 0 for none.
        is_latent: multi-head latent attention.
        forces_balance: tokens are spread evenly, whatever the router says.
        pads: every expert gets its capacity of rows.
        total_parameters: all.
        active_parameters: those that a token meets.
        most_sync_free: highest `dispatch.sync_free` at which the kernels chosen for the device never wait for it.
    """

    layers: int
    dense_layers: int
    vocab_size: int
    head_counts: tuple[int, ...]
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    dense_width: int
    is_latent: bool
    forces_balance: bool
    pads: bool
    total_parameters: int
    active_parameters: int
    most_sync_free: int = STAGES - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A layout, its question and its model.

    Attributes:
        model: facts of it.
        world: ranks.
        node_devices: of a node.
        vendor: of the devices: nvidia, amd, cpu.
        global_batch: rows of a step.
        sequence_length: positions of a row.
        tp: ranks that share each dense matrix.
        cp: ranks that share a row of tokens.
        pp: pipeline ranks.
        vpp: stages of each; 1 without a pipeline.
        ep: ranks that share the experts of a layer.
        etp: ranks that share each expert's matrices.
        micro_batch: rows of a pass.
        schedule: of the pipeline; `none` without one.
        recompute: `recompute.modules`.
        sync_free: `dispatch.sync_free`.
        dispatcher: that `dispatch.method` comes down to; `local` where a rank has all experts.
        shard: none, optimizer or full.
        overlap: `dispatch.overlap`.
        context_method: `parallel.context_method`; `settled_context_method` is what it comes down to.
        capture: `graphs.capture`.
        reduce: type in which gradients are summed over ranks.
        offloads_optimizer: moments wait in host memory.
    """

    model: ModelFacts
    world: int
    node_devices: int
    vendor: str
    global_batch: int
    sequence_length: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    micro_batch: int = 1
    schedule: str = NO_PIPELINE
    recompute: tuple[str, ...] = ()
    sync_free: int = 0
    dispatcher: str = "local"
    shard: str = "optimizer"
    overlap: Overlap = "none"
    context_method: Literal["auto", "all-gather", "ulysses"] = "auto"
    capture: str = "none"
    reduce: str = "fp32"
    offloads_optimizer: bool = False

    @property
    def dp(self) -> int:
        """Ranks that train on different rows; rounded down where sizes do not divide."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts; rounded down where sizes do not divide."""
        return self.world // (self.pp * self.expert_ranks)

    @property
    def expert_ranks(self) -> int:
        """Ranks between which tokens travel."""
        return self.ep * self.etp

    @property
    def micro_batches(self) -> int:
        """Passes of a rank in a step; rounded down, 0 if the batch is too small."""
        return self.global_batch // max(1, self.micro_batch * self.dp)

    @property
    def settled_context_method(self) -> Method:
        """How ranks that share a row attend, as `penstock.config.fit.context_method` settles it."""
        if self.context_method != "auto":
            return self.context_method
        return "all-gather" if any(heads % (self.tp * self.cp) for heads in self.model.head_counts) else "ulysses"

    @property
    def stages(self) -> int:
        """Of the pipeline, virtual ones counted."""
        return self.pp * self.vpp

    def is_inside_node(self, ranks: int) -> bool:
        """Whether groups of so many neighbours all lie inside nodes."""
        return self.node_devices % ranks == 0


def facts_of(
    model: Model, *, total_parameters: int, active_parameters: int, most_sync_free: int = STAGES - 1
) -> ModelFacts:
    """Facts of a model.

    Args:
        model: its section of a run.
        total_parameters: all.
        active_parameters: those that a token meets.
        most_sync_free: of the kernels that its run would have (`penstock.models.kernels.most_sync_free`).
    """
    moe = model.moe
    return ModelFacts(
        layers=model.layers,
        dense_layers=model.layers - model.moe_layers,
        vocab_size=model.vocab_size,
        head_counts=tuple(heads_of(model.attention).values()),
        experts=0 if moe is None else moe.experts,
        top_k=0 if moe is None else moe.top_k,
        expert_width=0 if moe is None else moe.moe_intermediate_size,
        shared_width=0 if moe is None else moe.shared_expert_intermediate_size,
        dense_width=model.intermediate_size if model.moe_layers < model.layers else 0,
        is_latent=isinstance(model.attention, LatentAttention),
        forces_balance=moe is not None and moe.balance.force_load_balance,
        pads=moe is not None and moe.balance.pad_to_capacity,
        total_parameters=total_parameters,
        active_parameters=active_parameters,
        most_sync_free=most_sync_free,
    )


def sizes_of(run: Run, cluster: Cluster, model: ModelFacts) -> Sizes:
    """What rules look at, of a run on a cluster.

    Args:
        run: which one; need not fit the cluster, rules say whether it does.
        cluster: where.
        model: facts of its model (`facts_of`).
    """
    parallel, has_pipeline = run.parallel, run.parallel.pipeline > 1
    return Sizes(
        model=model,
        world=cluster.devices,
        node_devices=cluster.node_devices,
        vendor=cluster.hardware.vendor,
        global_batch=run.training.global_batch,
        sequence_length=run.training.sequence_length,
        tp=parallel.tensor,
        cp=parallel.context,
        pp=parallel.pipeline,
        vpp=run.pipeline.stages_per_rank if has_pipeline else 1,
        ep=parallel.expert,
        etp=parallel.expert_tensor,
        micro_batch=run.training.micro_batch,
        schedule=run.pipeline.schedule if has_pipeline else NO_PIPELINE,
        recompute=run.recompute.modules,
        sync_free=run.dispatch.sync_free,
        dispatcher=settled_dispatcher(run, cluster),
        shard=shard(run),
        overlap=run.dispatch.overlap,
        context_method=parallel.context_method,
        capture=run.graphs.capture,
        reduce=parallel.reduce,
        offloads_optimizer=run.offload.optimizer,
    )


def settled_dispatcher(run: Run, cluster: Cluster) -> str:
    """The dispatcher of a run on a cluster, by the names of `dispatch.method`.

    A method that was asked for and cannot be had is returned as it is, for a rule to refuse it.

    Args:
        run: its configuration.
        cluster: its GPUs are taken to reach each other's memory inside a node.
    """
    ranks = run.parallel.expert * run.parallel.expert_tensor
    if run.model.moe is None or ranks == 1:
        return "local"
    obstacle = "no GPUs" if cluster.hardware.vendor == "cpu" else ""
    choice = choose_dispatcher(dispatch_facts(run, ranks_on_a_node(ranks, cluster.node_devices), obstacle))
    if choice.name == "padded":
        return "all-to-all" if run.dispatch.method == "auto" else run.dispatch.method
    return run.dispatch.method if choice.refusal is not None else choice.name
