"""Rules of `dispatch`: the dispatcher, and work that overlaps it. Each docstring is the rule as users read it.

The rule that kernels must never wait at a stage of `dispatch.sync_free` depends on the device and is applied where
kernels are chosen (`penstock.models.kernels`).
"""

from penstock.config.fit import LayoutSizes, rule_of_sizes
from penstock.config.problem import Problem
from penstock.config.run import Run

STAGES = 4  # values of `dispatch.sync_free`, from 0
COUNTS_STAY = 2  # the first value of `dispatch.sync_free` at which row counts stay on the device

# Schedules that run a forward pass beside the backward pass of another micro-batch.
OVERLAPPING_SCHEDULES = ("interleaved", "dualpipe-v")


@rule_of_sizes
def sent_rows_are_counted_by_the_host(sizes: LayoutSizes) -> Problem | None:
    """`dispatch.method` all-to-all goes with `dispatch.sync_free` 0 or 1, and with any value if it sends padding.

    The host must know how many rows to send and receive. Padding is `model.moe.balance.pad_to_capacity`.
    """
    # Padding has static shapes.
    if sizes.dispatcher != "all-to-all" or sizes.sync_free < COUNTS_STAY or sizes.model.pads:
        return None
    return Problem.from_line(
        "dispatch.sync_free cannot be had with dispatch.method all-to-all, whose row counts the host reads; "
        f"got {sizes.sync_free}; allowed: 0, 1; fix: set dispatch.method=auto"
    )


@rule_of_sizes
def padded_rows_are_sent(sizes: LayoutSizes) -> Problem | None:
    """`model.moe.balance.pad_to_capacity` goes with `dispatch.method` auto or all-to-all.

    It sends the capacity of every expert, so its shapes are static already.
    """
    # A plan says local if a rank has all experts.
    if sizes.dispatcher in ("auto", "all-to-all", "local") or not sizes.model.pads:
        return None
    return Problem.from_line(
        f"dispatch.method sends no padding, but model.moe.balance.pad_to_capacity does; got {sizes.dispatcher}; "
        "allowed: auto, all-to-all; fix: set dispatch.method=auto, or model.moe.balance.pad_to_capacity=false"
    )


@rule_of_sizes
def tokens_travel_to_experts(sizes: LayoutSizes) -> Problem | None:
    """`dispatch.overlap` needs `model.moe`, and `model.moe.shared_expert_intermediate_size` if it is shared."""
    overlap, model = sizes.overlap, sizes.model
    if overlap == "none" or (model.experts and (overlap != "shared" or model.shared_width)):
        return None
    missing = "a shared expert (model.moe.shared_expert_intermediate_size)" if model.experts else "model.moe"
    return Problem(
        "dispatch.overlap", f"needs {missing}, which the model lacks", got=overlap, fix="set dispatch.overlap=none"
    )


@rule_of_sizes
def travels_happen_once(sizes: LayoutSizes) -> Problem | None:
    """`dispatch.overlap` does not go with moe or layer in `recompute.modules` or `offload.activations`.

    They include the dispatch, which would run again.
    """
    if sizes.overlap == "none":
        return None
    for field, names in (("recompute.modules", sizes.recompute), ("offload.activations", sizes.offloaded)):
        for name in names:
            if name in ("moe", "layer"):  # parts that include the dispatch
                return Problem.from_line(
                    f"{field} names {name}, which does not go with dispatch.overlap {sizes.overlap}; "
                    f"fix: name parts of a {name}, such as attention, or set dispatch.overlap=none"
                )
    return None


@rule_of_sizes
def pieces_have_their_weights(sizes: LayoutSizes) -> Problem | None:
    """`dispatch.overlap` passes does not go with `parallel.shard` full.

    Other work runs between the pieces of a layer, so gathered weights of both would be held.
    """
    if sizes.overlap != "passes" or sizes.shard != "full":
        return None
    return Problem.from_line(
        "parallel.shard full does not go with dispatch.overlap passes; got full; "
        "allowed: auto, none, optimizer; fix: set parallel.shard=optimizer, or dispatch.overlap=shared"
    )


@rule_of_sizes
def passes_stand_beside_each_other(sizes: LayoutSizes) -> Problem | None:
    """`dispatch.overlap` passes needs `parallel.pipeline` above 1 and `pipeline.schedule` interleaved or dualpipe-v."""
    if sizes.overlap != "passes" or (sizes.pp > 1 and sizes.schedule in OVERLAPPING_SCHEDULES):
        return None
    got = "parallel.pipeline 1" if sizes.pp == 1 else f"pipeline.schedule {sizes.schedule} on {sizes.pp} ranks"
    return Problem.from_line(
        f"dispatch.overlap passes needs a pipeline whose schedule has forward and backward passes side by side; "
        f"got {got}; allowed: {', '.join(OVERLAPPING_SCHEDULES)} on 2 or more; "
        f"fix: set {'dispatch.overlap=shared' if sizes.pp == 1 else 'pipeline.schedule=interleaved'}"
    )


def replicas_can_be_sent(run: Run) -> Problem | None:
    """`dispatch.balance` does not go with `model.moe.balance.pad_to_capacity`, which gives all ranks equal rows.

    Nor with `dispatch.method` hierarchical, because the weights of a replica take longer between nodes than the rows
    that it saves, nor with `float8.gather` if `float8.experts` is not none: then no rank has an expert's weights in 16
    bits, in which they are sent.
    """
    moe, none = run.model.moe, "dispatch.balance=none"
    if not balances(run):
        return None
    if moe is not None and moe.balance.pad_to_capacity:
        what, fix = "evens out rows, and model.moe.balance.pad_to_capacity gives every expert the same number", none
    elif run.dispatch.method == "hierarchical":
        what = "copies experts between GPUs of one node, and dispatch.method hierarchical is for several"
        fix = f"parallel.expert to the GPUs of one node and dispatch.method=auto, or {none}"
    elif run.float8.gather and run.float8.experts != "none":
        what = "sends weights in 16 bits, and float8.gather has those of experts in 8 bits only"
        fix = f"float8.gather=false, or {none}"
    else:
        return None
    return Problem("dispatch.balance", what, got=run.dispatch.balance, allowed="none", fix=f"set {fix}")


def balances(run: Run) -> bool:
    """Whether ranks hold replicas of each other's experts."""
    return run.dispatch.balance != "none" and run.parallel.expert > 1
