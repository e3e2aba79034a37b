"""Rules between fields of graphs. Each docstring is the rule as users read it.

A graph is replayed with the addresses and shapes of its capture and without the host. `graphs.capture` auto captures
nothing where these rules forbid it. Obstacles that depend on the device, such as kernels that read counts on the host,
are checked where the capture is chosen (penstock/train/capture.py).
"""

from penstock.config.dispatcher import COUNTS_STAY, balances
from penstock.config.fit import LayoutSizes, rule_of_sizes, shard
from penstock.config.run import Run
from penstock.config.schema import Problem

# Modules that reach into the captured parts of a layer.
_NOT_BEHIND_PARTS = {
    "recompute.modules": ("norm", "latent-up", "attention", "moe", "layer"),
    "offload.activations": ("attention", "moe", "layer"),
}


@rule_of_sizes
def captured_passes_are_not_cut_into_stages(sizes: LayoutSizes) -> Problem | None:
    """`graphs.capture` full and partial need `parallel.pipeline` 1.

    Ranks of a pipeline have several micro-batches in flight, each with activations of its own.
    """
    if sizes.capture not in ("full", "partial") or sizes.pp == 1:
        return None
    return Problem.from_line(
        f"parallel.pipeline has several micro-batches in flight, and graphs.capture {sizes.capture} has memory for "
        f"one; got {sizes.pp}; allowed: 1; fix: set graphs.capture=none"
    )


def captured_weights_stay_where_they_are(run: Run) -> Problem | None:
    """`graphs.capture` full and partial do not go with `parallel.shard` full, which gathers weights into new memory."""
    if not _captures(run) or shard(run) != "full":
        return None
    return Problem.from_line(
        f"parallel.shard gathers weights into new memory in every pass, and graphs.capture {run.graphs.capture} reads "
        "them where they were; got full; allowed: auto, none, optimizer; fix: set parallel.shard=optimizer, or "
        "graphs.capture=none"
    )


def captured_copies_stay_on_the_device(run: Run) -> Problem | None:
    """`graphs.capture` full goes with neither `offload.activations` nor `offload.gradients`: the host starts copies."""
    if not _captures(run, "full"):
        return None
    if run.offload.activations:
        name, got, allowed = "activations", ", ".join(run.offload.activations), "nothing"
        fix = "recompute them instead (recompute.modules), or set graphs.capture=none"
    elif run.offload.gradients:
        name, got, allowed, fix = "gradients", "true", "false", "set graphs.capture=partial"
    else:
        return None
    what = "starts copies from the host, which takes no part in what graphs.capture full replays"
    return Problem(f"offload.{name}", what, got, allowed, fix)


def captured_shapes_are_known(run: Run) -> Problem | None:
    """`graphs.capture` full needs row counts that the host never reads, if ranks share experts.

    That is `dispatch.sync_free` 2 or 3, or `model.moe.balance.pad_to_capacity`.
    """
    moe, shares = run.model.moe, run.parallel.expert * run.parallel.expert_tensor > 1  # ranks exchange rows
    is_static = run.dispatch.sync_free_stage >= COUNTS_STAY  # counts stay on the device
    if not _captures(run, "full") or moe is None or not shares or is_static or moe.balance.pad_to_capacity:
        return None
    return Problem.from_line(
        "dispatch.sync_free lets the host read how many rows travel, and graphs.capture full has one shape for all; "
        f"got {run.dispatch.sync_free}; allowed: 2, 3; fix: set dispatch.sync_free=2, or graphs.capture=partial"
    )


def captured_replicas_are_mapped(run: Run) -> Problem | None:
    """`graphs.capture` full with `dispatch.balance` needs `dispatch.method` symmetric.

    By other methods the host reads which replicas it sends.
    """
    if not _captures(run, "full") or not balances(run) or run.dispatch.method == "symmetric":
        return None
    return Problem(
        "dispatch.balance",
        "lets the host read where replicas are unless GPUs write them to each other's memory, and graphs.capture full "
        "replays without the host",
        got=f"dispatch.method {run.dispatch.method}",
        allowed="symmetric",
        fix="set dispatch.method=symmetric, or graphs.capture=partial",
    )


def captured_parts_are_kept(run: Run) -> Problem | None:
    """`graphs.capture` partial does not go with recomputation or offload of the captured parts.

    These are `recompute.modules` norm, latent-up, attention, moe and layer, and `offload.activations` attention, moe
    and layer.
    """
    if not _captures(run, "partial"):
        return None
    for field, refused in _NOT_BEHIND_PARTS.items():
        chosen = run.recompute.modules if field == "recompute.modules" else run.offload.activations
        captured = [name for name in chosen if name in refused]
        if captured:
            return Problem.from_line(
                f"{field} reaches into the captured parts of graphs.capture partial; got {', '.join(captured)}; "
                f"allowed: all but {', '.join(refused)}; fix: leave them out, or set graphs.capture=full or none"
            )
    return None


def captured_parts_are_of_one_rank(run: Run) -> Problem | None:
    """`graphs.capture` partial needs `parallel.tensor` and `parallel.context` 1: its graphs hold no collectives."""
    if not _captures(run, "partial"):
        return None
    for field, ranks in (("tensor", run.parallel.tensor), ("context", run.parallel.context)):
        if ranks > 1:
            return Problem.from_line(
                f"parallel.{field} lets ranks exchange in attention, and the graphs of graphs.capture partial hold no "
                f"collectives; got {ranks}; allowed: 1; fix: set graphs.capture=full or none"
            )
    return None


def captured_parts_are_judged_alone(run: Run) -> Problem | None:
    """`graphs.capture` partial does not go with `model.moe.balance.aux_loss` global-batch, which sums over ranks.

    It is read only if `model.moe.balance.aux_loss_coef` or `model.moe.balance.z_loss_coef` is not 0.
    """
    moe = run.model.moe
    if not _captures(run, "partial") or moe is None or moe.balance.aux_loss != "global-batch":
        return None
    if not (moe.balance.aux_loss_coef or moe.balance.z_loss_coef):  # no loss is computed
        return None
    return Problem.from_line(
        "model.moe.balance.aux_loss sums over ranks in the router, and the graphs of graphs.capture partial hold no "
        "collectives; got global-batch; allowed: none, micro-batch, sequence; fix: set graphs.capture=full or none"
    )


def captured_work_is_of_a_gpu(run: Run) -> Problem | None:
    """`graphs.capture` full and partial need a GPU: `device` cpu has no graphs."""
    if not _captures(run) or run.device != "cpu":
        return None
    return Problem.from_line(
        f"graphs.capture captures the work of a GPU, but device is cpu; got {run.graphs.capture}; allowed: none, auto"
    )


def _captures(run: Run, *what: str) -> bool:
    return run.graphs.capture in (what or ("full", "partial"))  # auto captures only what the rules allow
