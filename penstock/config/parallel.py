"""Layout of a run on devices: parallelism, dispatch, pipeline, recomputation, offload, graphs, host."""

from functools import partial
from typing import Literal, get_args

from penstock.config.model import MOST_EXPERTS, MOST_LAYERS
from penstock.config.schema import Section, knob
from penstock.layout.grid import MOST_RANKS

# Parts of a layer that `recompute.modules` can name.
RECOMPUTABLE = ("norm", "latent-up", "attention", "expert-activation", "shared-expert", "dense", "moe", "layer")
OFFLOADABLE = ("attention", "dense", "moe", "layer")  # parts of a layer that `offload.activations` can name

NamedDispatcher = Literal["all-to-all", "all-gather", "symmetric", "hierarchical"]
DISPATCHERS: tuple[NamedDispatcher, ...] = get_args(NamedDispatcher)  # that plans, trials and proofs try

Overlap = Literal["none", "shared", "passes"]  # work that overlaps dispatch and combine
Balancing = Literal["none", "auto", "bounded", "exact"]  # rows that a rank computes
Captured = Literal["full", "partial"]  # contents of a graph

_ranks = partial(knob, low=1, high=MOST_RANKS)


class Parallel(Section):
    """Parallel sizes. All ranks beyond their product are data parallelism.

    Attention and dense layers use tensor x context x data x pipeline, experts expert_tensor x expert x expert_data x
    pipeline, over the same ranks.
    """

    tensor: int = _ranks(1, doc="Ranks that share each dense matrix, and the positions between matrices (TP, SP).")
    context: int = _ranks(1, doc="Ranks that share each row of tokens (CP).")
    pipeline: int = _ranks(1, doc="Ranks that share the layers (PP).")
    expert: int = _ranks(1, doc="Ranks that share a layer's experts (EP).")
    expert_tensor: int = _ranks(1, doc="Ranks that share each expert's matrices (ETP).")
    shard: Literal["auto", "none", "optimizer", "full"] = knob(
        "auto",
        doc="State divided by data-parallel ranks: none, the optimizer (ZeRO-1: weights stay whole, gradients are "
        "reduced once a step), or full (FSDP2: weights, gradients and optimizer). auto takes the optimizer.",
    )
    shard_size: int = _ranks(
        0, doc="Ranks that divide one copy (hybrid sharding); 0 divides among all data-parallel ranks.", low=0
    )
    reshard: Literal["forward", "backward"] = knob(
        "forward", doc="With `shard` full: free gathered weights after forward and gather again, or after backward."
    )
    prefetch: int = knob(1, doc="With `shard` full: blocks whose weights are gathered ahead.", unit="blocks", low=0)
    reduce: Literal["fp32", "bf16"] = knob("fp32", doc="Type in which gradients are summed over ranks.")
    context_method: Literal["auto", "all-gather", "ulysses"] = knob(
        "auto",
        doc="How context-parallel ranks attend: gather keys and values (of latent attention: the latent), or exchange "
        "positions for heads. auto exchanges where heads divide.",
    )


class Dispatch(Section):
    """Transport of tokens to experts on other ranks; a rank that holds all experts reads only `sync_free`."""

    method: Literal["auto", NamedDispatcher] = knob(
        "auto",
        doc="Send each row to the ranks of its experts (all-to-all); all tokens to all ranks that share the experts "
        "(all-gather); each token once to each rank that it needs, written by our own kernels into the memory of the "
        "other GPUs of the node (symmetric); or each token once to each node, and there in one of these ways "
        "(hierarchical). auto takes hierarchical if several ranks of each of several nodes share experts, and "
        "symmetric where it can run; elsewhere it sends rows at `sync_free` 0 and 1, and gathers from 2 on.",
    )
    sync_free: Literal["auto", 0, 1, 2, 3] = knob(
        "auto",
        doc="Where the host never waits for the device: 0 nowhere, 1 in router and permutation, 2 in dispatch "
        "and experts too (buffers bounded by `row_capacity_factor`), 3 nowhere between router and combine (buffers for "
        "the worst case). auto is 2 where NVIDIA GPUs write to each other's memory and its buffers take little of it, "
        "else 0. See docs/dispatch.md.",
    )
    row_capacity_factor: float = knob(
        2.0,
        doc="At `sync_free` 2: rows that a rank's experts keep room for at first, over its even share: in all layers "
        "together with our own kernels (in 8 bits if experts have no biases), else in each. A step that needs more is "
        "repeated, and what was too small keeps what it needed and a tenth.",
        low=1.0,
    )
    layer_capacity_factor: float = knob(
        4.0,
        doc="At `sync_free` 2, where layers keep their rows together: rows that one layer of a rank has room for at "
        "first, over its even share. It is memory of one layer at a time.",
        low=1.0,
    )
    num_sms: int = knob(
        0,
        doc="With `method` symmetric: programs of each kernel that sends or receives, on every rank; 0 takes what was "
        "fastest alone, and fewer leave more of the chip to what is computed meanwhile.",
        unit="programs",
        low=0,
    )
    engines: bool = knob(
        False,
        doc="With `method` symmetric: rows are sent by the GPUs' copy engines, which take no multiprocessor from what "
        "is computed meanwhile but know no choices: all rows go to all ranks of the node.",
    )
    balance: Balancing = knob(
        "none",
        doc="Replicas of experts on ranks with room, planned in every layer of every micro-batch, so that no rank "
        "computes more rows than its even share and `balance_tolerance` (bounded) or than its even share (exact)."
        " With auto as with bounded, but only where the fullest rank has more than 1.1 times its even share: "
        "below that copies take as long as they save.",
    )
    balance_slots: int = knob(
        0,
        doc="With `balance`: replicas that a rank can hold; 0 takes 4 with auto and bounded (or as many as a rank has"
        " experts, if that is less), and with exact as many as a rank has experts, which is always enough.",
        unit="experts",
        low=0,
        high=MOST_EXPERTS,
    )
    balance_tolerance: float = knob(
        0.05,
        doc="With `balance` auto and bounded: rows over its even share that a rank may compute, as a part of that "
        "share. Nothing is copied while all ranks are within it.",
        low=0.0,
        high=1.0,
    )
    balance_rows: int = knob(
        1024,
        doc="With `balance` auto and bounded: rows of a replica, if its expert has them and its rank has room. Fewer "
        "would not pay for the transfer of the weights.",
        unit="rows",
        low=0,
    )
    overlap: Overlap = knob(
        "none",
        doc="Work that overlaps dispatch and combine: nothing, the layer's shared expert (shared), or the backward "
        "pass of another micro-batch of the pipeline too (passes). See docs/overlap.md.",
    )

    @property
    def sync_free_stage(self) -> int:
        """`sync_free` as a number: auto is 0 until it is settled for a machine (`settled_sync_free`)."""
        return 0 if self.sync_free == "auto" else self.sync_free


class Pipeline(Section):
    """Order and division of a pipeline; read only if `parallel.pipeline` is above 1."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v"] = knob(
        "1f1b", doc="Order of forward and backward passes."
    )
    stages_per_rank: int = knob(
        1,
        doc="Virtual stages of a rank (VPP); 2 with the schedules whose name has a v.",
        unit="stages",
        low=1,
        high=MOST_LAYERS,
    )
    layout: str = knob(
        "",
        doc="Contents of each stage, such as `Et*3|t*4|(t*4|)*13|t*2,mL`; empty balances by cost. See docs/layouts.md.",
    )


class Recompute(Section):
    """Activations that are freed after forward and recomputed in backward."""

    modules: tuple[str, ...] = knob(
        (),
        doc="Of norm, latent-up, attention, expert-activation, shared-expert, dense, moe, layer; their outputs are "
        "freed too if no other module needs them.",
    )
    layers: tuple[int, ...] = knob((), doc="Decoder layers that recompute; empty means all.")
    stages: tuple[int, ...] = knob((), doc="Pipeline stages that recompute; empty means all.")


class Offload(Section):
    """State in host memory."""

    activations: tuple[str, ...] = knob(
        (), doc="Modules whose saved activations go to pinned host memory until backward: attention, dense, moe, layer."
    )
    optimizer: bool = knob(
        False,
        doc="Keep moments, and the masters of bfloat16 weights, in host memory; they pass through the device in each "
        "step. Weights held in float32, such as FSDP2's shards, stay on the device.",
    )
    gradients: bool = knob(
        False,
        doc="Keep the float32 sums of gradients of decoder layers in host memory; a layer's sums are on the device "
        "while its backward pass runs. On one GPU, with `optimizer`. See docs/optimizer.md.",
    )


class Graphs(Section):
    """CUDA and HIP graphs: work of the device that is captured once and then launched in one call."""

    capture: Literal["none", "full", "partial", "auto"] = knob(
        "auto",
        doc="Capture in the second step, and replay from there on, the whole forward and backward pass of a "
        "micro-batch (full); or of each layer attention, its norms, and the router with the order of its rows, where "
        "the host reads row counts behind them (partial). auto does the first of these that it can, from the third "
        "step on, where the second one shows that the host limits passes; on NVIDIA GPUs only. See docs/graphs.md.",
    )


class Host(Section):
    """Processes on their machine."""

    numa: bool = knob(True, doc="Bind each process to the cores and memory next to its GPU (Linux).")
    check_memory: bool = knob(
        True, doc="Refuse a run whose least memory exceeds that of its GPU or machine, before anything is made."
    )
    timeout_minutes: int = knob(
        30, doc="Time that a rank waits for the others before it gives up.", unit="minutes", low=1
    )


class Elastic(Section):
    """Going on with fewer ranks after a loss; see docs/launch.md."""

    min: int = knob(
        0,
        doc="Fewest ranks with which the run goes on when some are lost for good: the same batches with more "
        "accumulation, and a smaller `parallel.expert` where it must be; 0 needs all ranks.",
        unit="ranks",
        low=0,
    )
