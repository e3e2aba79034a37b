"""Every rule of graphs, by the line that the user reads."""

from penstock.config import graph_rules as rules
from penstock.config.rules import Rule

PASSES, PARTS = "graphs.capture=full", "graphs.capture=partial"
PADDED = ("model.moe.balance.capacity_factor=1.5", "model.moe.balance.pad_to_capacity=true")

BROKEN: list[tuple[Rule, tuple[str, ...], str]] = [
    (
        rules.captured_passes_are_not_cut_into_stages,
        (PASSES, "parallel.pipeline=2"),
        "parallel.pipeline has several micro-batches in flight, and graphs.capture full has memory for "
        "one; got 2; allowed: 1; fix: set graphs.capture=none",
    ),
    (
        rules.captured_weights_stay_where_they_are,
        (PASSES, "parallel.shard=full"),
        "parallel.shard gathers weights into new memory in every pass, and graphs.capture full reads them where they "
        "were; got full; allowed: auto, none, optimizer; fix: set "
        "parallel.shard=optimizer, or graphs.capture=none",
    ),
    (
        rules.captured_activations_stay_on_the_device,
        (PASSES, 'offload.activations=["moe", "dense"]'),
        "offload.activations starts copies from the host, which takes no part in what graphs.capture full replays; "
        "got moe, dense; allowed: nothing; fix: recompute them instead (recompute.modules), or set graphs.capture=none",
    ),
    (
        rules.captured_shapes_are_known,
        (PASSES, "parallel.expert=2", "dispatch.sync_free=1"),
        "dispatch.sync_free lets the host read how many rows travel, and graphs.capture full has one shape for all; "
        "got 1; allowed: 2, 3; fix: set dispatch.sync_free=2, or graphs.capture=partial",
    ),
    (
        rules.captured_shapes_are_known,
        (PASSES, "parallel.expert_tensor=2", "dispatch.method=all-gather"),
        "dispatch.sync_free lets the host read how many rows travel, and graphs.capture full has one shape for all; "
        "got 0; allowed: 2, 3; fix: set dispatch.sync_free=2, or graphs.capture=partial",
    ),
    (
        rules.captured_passes_are_not_cut_into_stages,
        (PARTS, "parallel.pipeline=2"),
        "parallel.pipeline has several micro-batches in flight, and graphs.capture partial has memory for "
        "one; got 2; allowed: 1; fix: set graphs.capture=none",
    ),
    (
        rules.captured_weights_stay_where_they_are,
        (PARTS, "parallel.shard=full"),
        "parallel.shard gathers weights into new memory in every pass, and graphs.capture partial reads them where "
        "they were; got full; allowed: auto, none, optimizer; fix: set "
        "parallel.shard=optimizer, or graphs.capture=none",
    ),
    (
        rules.captured_parts_are_kept,
        (PARTS, 'recompute.modules=["norm", "dense", "attention"]'),
        "recompute.modules reaches into the captured parts of graphs.capture partial; "
        "got norm, attention; allowed: all but "
        "norm, latent-up, attention, moe, layer; fix: leave them out, or set graphs.capture=full or none",
    ),
    (
        rules.captured_parts_are_kept,
        (PARTS, 'offload.activations=["moe"]'),
        "offload.activations reaches into the captured parts of graphs.capture partial; "
        "got moe; allowed: all but attention, "
        "moe, layer; fix: leave them out, or set graphs.capture=full or none",
    ),
    (
        rules.captured_parts_are_of_one_rank,
        (PARTS, "parallel.tensor=2"),
        "parallel.tensor lets ranks exchange in attention, and the graphs of graphs.capture partial hold no "
        "collectives; got 2; allowed: 1; fix: set graphs.capture=full or none",
    ),
    (
        rules.captured_parts_are_of_one_rank,
        (PARTS, "parallel.context=2"),
        "parallel.context lets ranks exchange in attention, and the graphs of graphs.capture partial hold no "
        "collectives; got 2; allowed: 1; fix: set graphs.capture=full or none",
    ),
    (
        rules.captured_parts_are_judged_alone,
        (PARTS, "model.moe.balance.aux_loss=global-batch", "model.moe.balance.z_loss_coef=0.1"),
        "model.moe.balance.aux_loss sums over ranks in the router, and the graphs of graphs.capture partial hold no "
        "collectives; got global-batch; allowed: none, micro-batch, sequence; fix: set graphs.capture=full or none",
    ),
    (
        rules.captured_parts_run_once_in_a_pass,
        (PARTS, "dispatch.overlap=halves"),
        "dispatch.overlap has two passes under way, and graphs.capture partial has memory for one; got halves; "
        "allowed: none, shared; fix: set dispatch.overlap=shared, or graphs.capture=none",
    ),
    (
        rules.captured_work_is_of_a_gpu,
        (PARTS, "device=cpu"),
        "graphs.capture captures the work of a GPU, but device is cpu; got partial; allowed: none, auto",
    ),
    (
        rules.captured_work_is_of_a_gpu,
        (PASSES, "device=cpu"),
        "graphs.capture captures the work of a GPU, but device is cpu; got full; allowed: none, auto",
    ),
]

FINE: dict[str, tuple[str, ...]] = {
    "passes of one rank are captured at every stage": (PASSES, "dispatch.sync_free=0"),
    "passes that never read a count are captured": (PASSES, "parallel.expert=4", "dispatch.sync_free=2"),
    "passes of symmetric dispatch are captured": (PASSES, "parallel.expert=4", "dispatch.method=symmetric"),
    "passes of padded dispatch are captured": (PASSES, "parallel.expert=4", *PADDED),
    "passes of ranks that share matrices and rows are captured": (
        PASSES,
        "model.vocab_size=258",
        "parallel.tensor=2",
        "parallel.context=2",
    ),
    "what is recomputed is captured": (PASSES, 'recompute.modules=["layer"]', "training.deterministic=true"),
    "an optimizer on the host goes with captured passes": (PASSES, "offload.optimizer=true"),
    "parts are captured where the host reads counts": (PARTS, "parallel.expert=4", "dispatch.sync_free=0"),
    "parts are captured beside what is recomputed behind them": (
        PARTS,
        'recompute.modules=["expert-activation", "shared-expert", "dense"]',
        'offload.activations=["dense"]',
    ),
    "parts go with shared experts beside transfers": (PARTS, "parallel.expert=2", "dispatch.overlap=shared"),
    "a loss over the global batch that nobody weighs needs no sum": (
        PARTS,
        "model.moe.balance.aux_loss=global-batch",
        "model.moe.balance.aux_loss_coef=0",
    ),
    "auto refuses nothing": ("graphs.capture=auto", "device=cpu", "parallel.pipeline=2", "parallel.shard=full"),
}
