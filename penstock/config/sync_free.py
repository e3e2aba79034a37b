"""`dispatch.sync_free` auto, and the rows for which bounded buffers have room.

Runs and plans settle auto when they know the machine. Rules between fields take it for 0, which goes with everything.
"""

from dataclasses import dataclass

from penstock.config.dispatcher import COUNTS_STAY
from penstock.config.parallel import Dispatch
from penstock.config.run import Run

BUFFER_SHARE = 0.03
"""Auto bounds buffers if they take at most this share of a device's memory more than counted rows.

Six runs on two H200s were 1.02 to 1.97 times as fast so (benchmarks/results/sync-free-h200x2.json). Small
micro-batches, whose buffers are small, gain most; large ones may need the memory.
"""

IDLE = 0.1
"""With `dispatch.balance` auto: rows over a rank's even share up to which nothing is copied.

On 4 H200 replicas cost 0.6 % of a layer with 1.04 times the even share, and save 1.0 and 1.3 % with 1.12 and 1.13 times
(benchmarks/results/several-h200x4.json, `layer`).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncFreeFacts:
    """All that auto depends on, beside the run."""

    dispatcher: str  # that runs at 0
    vendor: str  # of the devices
    limit: int  # the highest value at which no kernel waits for the device
    device_bytes: int


def settled_sync_free(run: Run, facts: SyncFreeFacts) -> tuple[Run, str]:
    """The run, with `COUNTS_STAY` where auto takes it, and why; without a reason if it has a number or no choice.

    Auto is 2 where tokens are written to other GPUs' memory: other dispatchers send more bytes if the host may not read
    row counts. On AMD GPUs, where that has not been run, it is 0.
    """
    if run.dispatch.sync_free != "auto" or run.model.moe is None or facts.dispatcher == "local":
        return run, ""
    if facts.vendor != "nvidia":
        return run, "0: by default counts stay on the device on NVIDIA GPUs only, where that has been run"
    if facts.dispatcher != "symmetric":
        return run, f"0: {facts.dispatcher} dispatch sends what the host has counted"
    if facts.limit < COUNTS_STAY:
        return run, "0: kernels of this run read row counts on the host"
    more = bounded_buffer_bytes(run)
    size = f"bounded buffers take up to {more / 1e9:.1f} GB more"
    if more > BUFFER_SHARE * facts.device_bytes:
        return run, f"0: {size} (dispatch.sync_free=2 tries)"
    dispatch = run.dispatch.model_copy(update={"sync_free": COUNTS_STAY})
    reason = f"2: no waits for row counts; {size} (dispatch.sync_free=0 turns it off)"
    return run.model_copy(update={"dispatch": dispatch}), reason


def bounded_buffer_bytes(run: Run) -> int:
    """Bytes that experts of a rank need at `COUNTS_STAY` beyond those at 0, about: in training or in evaluation.

    In training the pre-activations of all layers have room for more than their even share; of a pipeline's S stages,
    each holds about S micro-batches of L/S layers. Evaluation has room for all rows of a layer on one rank.
    """
    moe, parallel, training = run.model.moe, run.parallel, run.training
    assert moe is not None, "a dense model sends no tokens"
    tokens = training.micro_batch * training.sequence_length // (parallel.tensor * parallel.context)
    layers, width = run.model.moe_layers + run.model.mtp_layers, moe.moe_intermediate_size
    kept = tokens * moe.top_k * layers * 2 * width * (capacity_factor(run.dispatch) - 1)
    rows = parallel.expert * parallel.expert_tensor * tokens * min(moe.top_k, moe.experts // parallel.expert)
    evaluated = rows * (3 * width // parallel.expert_tensor + run.model.hidden_size) if run.evaluation.rows else 0
    return int((2 if training.precision == "bf16" else 4) * max(kept, evaluated))


def capacity_factor(dispatch: Dispatch) -> float:
    """Rows of all layers of a rank over their even share, at `COUNTS_STAY`: what a plan of replicas keeps to."""
    return dispatch.row_capacity_factor if dispatch.balance == "none" else bound_factor(dispatch)


def bound_factor(dispatch: Dispatch) -> float:
    """Highest number of rows of a rank over its even share with `dispatch.balance`, if there are slots enough."""
    if dispatch.balance == "auto":
        return 1 + max(dispatch.balance_tolerance, IDLE)
    return 1 + (dispatch.balance_tolerance if dispatch.balance == "bounded" else 0.0)
