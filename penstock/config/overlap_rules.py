"""Rules of `dispatch.overlap`, what is computed while tokens travel. Each docstring is the rule as users read it."""

from penstock.config.fit import shard
from penstock.config.problem import Problem
from penstock.config.run import Run

OVERLAPPING_SCHEDULES = ("interleaved", "dualpipe-v")
"""Schedules in which a forward pass stands beside the backward pass of another micro-batch."""

_IN_PIECES = ("halves", "passes")


def tokens_travel_to_experts(run: Run) -> Problem | None:
    """`dispatch.overlap` needs `model.moe`, and `model.moe.shared_expert_intermediate_size` if it is shared."""
    overlap, moe = run.dispatch.overlap, run.model.moe
    if overlap == "none" or (moe is not None and (overlap != "shared" or moe.shared_expert_intermediate_size)):
        return None
    missing = "model.moe" if moe is None else "a shared expert (model.moe.shared_expert_intermediate_size)"
    return Problem(
        "dispatch.overlap", f"needs {missing}, which the model lacks", got=overlap, fix="set dispatch.overlap=none"
    )


def travels_happen_once(run: Run) -> Problem | None:
    """`dispatch.overlap` goes with `recompute.modules` and `offload.activations` that are no moe and no layer.

    What is computed again there includes the way of the tokens.
    """
    if run.dispatch.overlap == "none":
        return None
    for field, names in (
        ("recompute.modules", run.recompute.modules),
        ("offload.activations", run.offload.activations),
    ):
        for name in names:
            if name in ("moe", "layer"):
                return Problem(
                    field,
                    f"names {name}, which does not go with dispatch.overlap {run.dispatch.overlap}",
                    fix=f"name parts of a {name}, such as attention, or set dispatch.overlap=none",
                )
    return None


def halves_are_whole_rows(run: Run) -> Problem | None:
    """`dispatch.overlap` halves needs an even `training.micro_batch`."""
    rows = run.training.micro_batch
    if run.dispatch.overlap != "halves" or rows % 2 == 0:
        return None
    return Problem(
        "training.micro_batch",
        "must be even with dispatch.overlap halves",
        got=f"{rows}",
        fix=f"set training.micro_batch={rows + 1}, or dispatch.overlap=shared",
    )


def halves_are_routed_alone(run: Run) -> Problem | None:
    """`dispatch.overlap` halves does not go with what judges a micro-batch as a whole.

    That is `model.moe.balance.capacity_factor`, and `model.moe.balance.aux_loss` micro-batch or global-batch if
    `model.moe.balance.aux_loss_coef` is not 0.
    """
    if run.dispatch.overlap != "halves" or run.model.moe is None:
        return None
    balance, section = run.model.moe.balance, "model.moe.balance"
    if balance.capacity_factor:
        field, got, fix = "capacity_factor", f"{balance.capacity_factor:g}", f"set {section}.capacity_factor=0"
    elif balance.aux_loss in ("micro-batch", "global-batch") and balance.aux_loss_coef:
        field, got, fix = "aux_loss", balance.aux_loss, f"set {section}.aux_loss=sequence"
    else:
        return None
    what = "judges a micro-batch as a whole, which dispatch.overlap halves divides"
    return Problem(f"{section}.{field}", what, got=got, fix=f"{fix}, or dispatch.overlap=shared")


def pieces_have_their_weights(run: Run) -> Problem | None:
    """`dispatch.overlap` halves and passes do not go with `parallel.shard` full.

    Other work runs between the pieces of a layer, and gathered weights would be held for both.
    """
    if run.dispatch.overlap not in _IN_PIECES or shard(run) != "full":
        return None
    return Problem(
        "parallel.shard",
        f"full does not go with dispatch.overlap {run.dispatch.overlap}",
        got="full",
        allowed="auto, none, optimizer",
        fix="set parallel.shard=optimizer, or dispatch.overlap=shared",
    )


def passes_stand_beside_each_other(run: Run) -> Problem | None:
    """`dispatch.overlap` passes needs `parallel.pipeline` above 1 and `pipeline.schedule` interleaved or dualpipe-v."""
    if run.dispatch.overlap != "passes":
        return None
    if run.parallel.pipeline > 1 and run.pipeline.schedule in OVERLAPPING_SCHEDULES:
        return None
    return Problem(
        "dispatch.overlap",
        "passes needs a pipeline whose schedule has forward and backward passes side by side",
        got=f"pipeline.schedule {run.pipeline.schedule} on {run.parallel.pipeline} ranks",
        allowed=f"{', '.join(OVERLAPPING_SCHEDULES)} on 2 or more",
        fix="set dispatch.overlap=halves" if run.parallel.pipeline == 1 else "set pipeline.schedule=interleaved",
    )


OVERLAP_RULES = (
    tokens_travel_to_experts,
    travels_happen_once,
    halves_are_whole_rows,
    halves_are_routed_alone,
    pieces_have_their_weights,
    passes_stand_beside_each_other,
)
