"""Rules between fields of graphs. Each docstring is the rule as users read it.

A graph is replayed with the addresses and the shapes that it was captured with, and the host takes no part in it. The
same rules say where `graphs.capture` auto does without. What depends on the device, such as kernels that read counts on
the host, is judged where they are chosen (penstock/train/captured.py).
"""

from penstock.config.dispatch_rules import COUNTS_STAY
from penstock.config.fit import shard
from penstock.config.problem import Problem
from penstock.config.run import Run


def captured_passes_are_not_cut_into_stages(run: Run) -> Problem | None:
    """`graphs.capture` passes needs `parallel.pipeline` 1.

    Ranks of a pipeline have passes of several micro-batches under way, each with activations of its own.
    """
    if not _captures(run) or run.parallel.pipeline == 1:
        return None
    return Problem(
        "parallel.pipeline",
        "has passes of several micro-batches under way, and graphs.capture passes has memory for one",
        got=f"{run.parallel.pipeline}",
        allowed="1",
        fix="set graphs.capture=none",
    )


def captured_weights_stay_where_they_are(run: Run) -> Problem | None:
    """`graphs.capture` passes does not go with `parallel.shard` full, which gathers weights into new memory."""
    if not _captures(run) or shard(run) != "full":
        return None
    return Problem(
        "parallel.shard",
        "gathers weights into new memory in every pass, and graphs.capture passes reads them where they were",
        got="full",
        allowed="auto, none, optimizer",
        fix="set parallel.shard=optimizer, or graphs.capture=none",
    )


def captured_activations_stay_on_the_device(run: Run) -> Problem | None:
    """`graphs.capture` passes does not go with `offload.activations`, whose copies the host starts."""
    if not _captures(run) or not run.offload.activations:
        return None
    return Problem(
        "offload.activations",
        "starts copies from the host, which takes no part in what graphs.capture passes replays",
        got=", ".join(run.offload.activations),
        allowed="nothing",
        fix="recompute them instead (recompute.modules), or set graphs.capture=none",
    )


def captured_shapes_are_known(run: Run) -> Problem | None:
    """`graphs.capture` passes needs row counts that the host never reads, where ranks share experts.

    That is `dispatch.sync_free` 2 or 3, `dispatch.method` symmetric, or `model.moe.balance.pad_to_capacity`.
    """
    moe, shares = run.model.moe, run.parallel.expert * run.parallel.expert_tensor > 1
    is_static = run.dispatch.sync_free >= COUNTS_STAY or run.dispatch.method == "symmetric"
    if not _captures(run) or moe is None or not shares or is_static or moe.balance.pad_to_capacity:
        return None
    return Problem(
        "dispatch.sync_free",
        "lets the host read how many rows travel, and graphs.capture passes has one shape for all",
        got=f"{run.dispatch.sync_free}",
        allowed="2, 3",
        fix="set dispatch.sync_free=2, or graphs.capture=none",
    )


def captured_work_is_of_a_gpu(run: Run) -> Problem | None:
    """`graphs.capture` passes needs a GPU: `device` cpu has no graphs."""
    if not _captures(run) or run.device != "cpu":
        return None
    return Problem(
        "graphs.capture", "captures the work of a GPU, but device is cpu", got="passes", allowed="none, auto"
    )


def _captures(run: Run) -> bool:
    return run.graphs.capture == "passes"


GRAPH_RULES = (
    captured_passes_are_not_cut_into_stages,
    captured_weights_stay_where_they_are,
    captured_activations_stay_on_the_device,
    captured_shapes_are_known,
    captured_work_is_of_a_gpu,
)
