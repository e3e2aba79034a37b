"""Every rule of dispatch and its overlap, by the line that the user reads."""

from penstock.config import dispatch_rules as rules
from penstock.config.rules import Rule

PADDED = ("model.moe.balance.capacity_factor=1.5", "model.moe.balance.pad_to_capacity=true")
HALVES = ("dispatch.overlap=halves", "training.micro_batch=2")
PIPELINE = ("parallel.pipeline=2", "pipeline.stages_per_rank=2", "pipeline.schedule=interleaved")
DENSE = ("model.moe=none", "model.dense_layers=4")

BROKEN: list[tuple[Rule, tuple[str, ...], str]] = [
    (
        rules.sent_rows_are_counted_by_the_host,
        ("dispatch.method=all-to-all", "dispatch.sync_free=2"),
        "dispatch.sync_free cannot be had with dispatch.method all-to-all, whose row counts the host reads; got 2; "
        "allowed: 0, 1; fix: set dispatch.method=auto",
    ),
    (
        rules.padded_rows_are_sent,
        (*PADDED, "dispatch.method=hierarchical"),
        "dispatch.method sends no padding, but model.moe.balance.pad_to_capacity does; got hierarchical; "
        "allowed: auto, all-to-all; fix: set dispatch.method=auto, or model.moe.balance.pad_to_capacity=false",
    ),
    (
        rules.padded_rows_are_sent,
        (*PADDED, "dispatch.method=all-gather"),
        "dispatch.method sends no padding, but model.moe.balance.pad_to_capacity does; got all-gather; "
        "allowed: auto, all-to-all; fix: set dispatch.method=auto, or model.moe.balance.pad_to_capacity=false",
    ),
    (
        rules.tokens_travel_to_experts,
        (*DENSE, *HALVES),
        "dispatch.overlap needs model.moe, which the model lacks; got halves; fix: set dispatch.overlap=none",
    ),
    (
        rules.tokens_travel_to_experts,
        ("model.moe.shared_expert_intermediate_size=0", "dispatch.overlap=shared"),
        "dispatch.overlap needs a shared expert (model.moe.shared_expert_intermediate_size), which the model lacks; "
        "got shared; fix: set dispatch.overlap=none",
    ),
    (
        rules.travels_happen_once,
        ("dispatch.overlap=shared", 'recompute.modules=["norm", "moe"]'),
        "recompute.modules names moe, which does not go with dispatch.overlap shared; "
        "fix: name parts of a moe, such as attention, or set dispatch.overlap=none",
    ),
    (
        rules.travels_happen_once,
        (*HALVES, "offload.activations=layer"),
        "offload.activations names layer, which does not go with dispatch.overlap halves; "
        "fix: name parts of a layer, such as attention, or set dispatch.overlap=none",
    ),
    (
        rules.halves_are_whole_rows,
        ("dispatch.overlap=halves", "training.micro_batch=3"),
        "training.micro_batch must be even with dispatch.overlap halves; got 3; "
        "fix: set training.micro_batch=4, or dispatch.overlap=shared",
    ),
    (
        rules.halves_are_routed_alone,
        (*HALVES, "model.moe.balance.capacity_factor=1.5"),
        "model.moe.balance.capacity_factor judges a micro-batch as a whole, which dispatch.overlap halves divides; "
        "got 1.5; fix: set model.moe.balance.capacity_factor=0, or dispatch.overlap=shared",
    ),
    (
        rules.halves_are_routed_alone,
        (*HALVES, "model.moe.balance.aux_loss=global-batch", "model.moe.balance.aux_loss_coef=0.01"),
        "model.moe.balance.aux_loss judges a micro-batch as a whole, which dispatch.overlap halves divides; "
        "got global-batch; fix: set model.moe.balance.aux_loss=sequence, or dispatch.overlap=shared",
    ),
    (
        rules.pieces_have_their_weights,
        (*HALVES, "parallel.shard=full"),
        "parallel.shard full does not go with dispatch.overlap halves; got full; allowed: auto, none, optimizer; "
        "fix: set parallel.shard=optimizer, or dispatch.overlap=shared",
    ),
    (
        rules.passes_stand_beside_each_other,
        ("dispatch.overlap=passes",),
        "dispatch.overlap passes needs a pipeline whose schedule has forward and backward passes side by side; "
        "got parallel.pipeline 1; allowed: interleaved, dualpipe-v on 2 or more; "
        "fix: set dispatch.overlap=halves",
    ),
    (
        rules.passes_stand_beside_each_other,
        ("dispatch.overlap=passes", "parallel.pipeline=2"),
        "dispatch.overlap passes needs a pipeline whose schedule has forward and backward passes side by side; "
        "got pipeline.schedule 1f1b on 2 ranks; allowed: interleaved, dualpipe-v on 2 or more; "
        "fix: set pipeline.schedule=interleaved",
    ),
]

FINE: dict[str, tuple[str, ...]] = {
    "what is sent is counted": ("dispatch.method=all-to-all", "dispatch.sync_free=1"),
    "what is padded is sent at every stage": (*PADDED, "dispatch.method=all-to-all", "dispatch.sync_free=3"),
    "what is gathered has every stage": ("dispatch.method=all-gather", "dispatch.sync_free=0"),
    "what is written into other GPUs' memory has every stage": ("dispatch.method=symmetric", "dispatch.sync_free=0"),
    "what goes to nodes first has every stage": ("dispatch.method=hierarchical", "dispatch.sync_free=3"),
    "auto has every stage": ("dispatch.sync_free=3",),
    "a dense model dispatches nothing": (
        "model.moe=none",
        "model.dense_layers=4",
        "dispatch.method=all-gather",
        "dispatch.sync_free=2",
    ),
    "the shared expert runs beside gathered weights": ("dispatch.overlap=shared", "parallel.shard=full"),
    "halves need no shared expert": (*HALVES, "model.moe.shared_expert_intermediate_size=0"),
    "halves of a pipeline's micro-batches": (*HALVES, *PIPELINE),
    "a weight of 0 judges nothing": (
        *HALVES,
        "model.moe.balance.aux_loss=micro-batch",
        "model.moe.balance.aux_loss_coef=0",
    ),
    "parts of a layer are computed again": ("dispatch.overlap=shared", 'recompute.modules=["norm", "shared-expert"]'),
    "passes of an interleaved pipeline": ("dispatch.overlap=passes", *PIPELINE),
}
