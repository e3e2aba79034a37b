"""Values that follow others: a value of a preset or a default gives way to a value that the user wrote.

A preset is complete, and an override changes one field of it: `training.steps=12` where the warm-up takes 20 steps,
`model.layers=1` where the first three layers are dense. Written values stay. A value that was not written moves to the
nearest one that the rules allow, and only if it breaks a rule: a run that obeys the rules is never changed.

Only lengths, batches and switches without effect follow. A value that changes the function of the model, or the layout,
is never changed silently: the rules refuse the run, and the error names the field to write as well.
"""

from collections.abc import Callable, Collection
from math import gcd
from typing import Any, TypeVar

from penstock.config.dispatcher import COUNTS_STAY
from penstock.config.graph_rules import captured_shapes_are_known
from penstock.config.layout_rules import schedule_has_its_stages
from penstock.config.model import warms_indexer_up
from penstock.config.run import Run
from penstock.config.run_rules import evaluation_has_text
from penstock.config.schema import Section
from penstock.layout.schedules import SCHEDULES

_WARMUP_SHARE = 10  # a warm-up that is too long becomes this part of the steps

AnySection = TypeVar("AnySection", bound=Section)
IsWritten = Callable[[str], bool]
Values = dict[str, Any]  # new values by the full path of their field


def follow(run: Run, written: Collection[str]) -> Run:
    """The run, which may break rules between fields, with values that follow those at the `written` paths."""

    def is_written(path: str) -> bool:
        # `training.steps` is written if it or `training` is.
        return any(path == field or path.startswith(f"{field}.") for field in written)

    # A later function sees the changes of earlier ones.
    for values_of in (_lengths, _batch, _layers, _switches, _stages):
        for path, value in values_of(run, is_written).items():
            if not is_written(path):
                run = _replaced(run, path.split("."), value)
    return run


def _replaced(section: AnySection, names: list[str], value: object) -> AnySection:
    name, *below = names
    inner = dict(section)[name]
    return section.model_copy(update={name: _replaced(inner, below, value) if below else value})


def _lengths(run: Run, is_written: IsWritten) -> Values:
    """Warm-up, decay and recording end with the training; the decay is shortened, or the warm-up if it was written."""
    schedule, steps = run.schedule, run.training.steps
    warmup, decay = schedule.warmup_steps, schedule.decay_steps if schedule.decay == "wsd" else 0
    if warmup > steps and not is_written("schedule.warmup_steps"):
        warmup = steps // _WARMUP_SHARE
    if warmup + decay > steps and is_written("schedule.decay_steps"):
        warmup = max(0, steps - decay)
    recorded = min(run.profile.steps, steps - run.profile.start + 1)  # steps are counted from 1
    values: Values = {"schedule.warmup_steps": warmup, "schedule.decay_steps": min(decay, max(0, steps - warmup))}
    return values | ({"profile.steps": recorded} if run.profile.start and recorded > 0 else {})


def _batch(run: Run, is_written: IsWritten) -> Values:
    """Micro-batches divide the global batch."""
    rows, micro = run.training.global_batch, run.training.micro_batch
    if rows % micro == 0:
        return {}
    if is_written("training.global_batch"):
        return {"training.micro_batch": gcd(rows, micro)}  # the largest that divides both
    return {"training.global_batch": max(micro, rows - rows % micro)}  # rounded down, but one micro-batch at least


def _layers(run: Run, is_written: IsWritten) -> Values:
    """At least one layer with experts stays, as in variants of presets."""
    model, moe = run.model, run.model.moe
    if moe is None:
        return {"model.dense_layers": model.layers}
    if model.dense_layers < model.layers and model.moe_layers > 0:
        return {}
    if is_written("model.dense_layers"):
        return {"model.moe.moe_layer_freq": max(1, model.layers - model.dense_layers)}
    # The last layer keeps its experts: the dense layers before it give way.
    every = min(moe.moe_layer_freq, model.layers)
    return {"model.moe.moe_layer_freq": every, "model.dense_layers": min(model.dense_layers, model.layers - every)}


def _switches(run: Run, _: IsWritten) -> Values:
    """Options that have no effect beside the chosen ones are off, and static shapes have static row counts."""
    values: Values = {} if evaluation_has_text(run) is None else {"evaluation.rows": 0}  # nothing is held out
    if captured_shapes_are_known(run) is not None:
        values["dispatch.sync_free"] = COUNTS_STAY
    moe = run.model.moe
    if moe is None:
        return values
    values["model.moe.router.num_hash_layers"] = min(moe.router.num_hash_layers, run.model.moe_layers)
    if moe.router.scoring_func != "softmax" or moe.top_k == 1:
        values["model.moe.router.softmax_after_top_k"] = False
    if moe.top_k == 1:
        values["model.moe.router.norm_topk_prob"] = False  # one weight over itself is always 1
    if warms_indexer_up(run.model):
        values["model.moe.router.expert_bias_rate"] = 0.0  # only the indexer learns
    if moe.balance.aux_loss == "none":
        values["model.moe.balance.aux_loss_coef"] = 0.0  # a factor of nothing
    if moe.balance.capacity_factor == 0:
        values["model.moe.balance.pad_to_capacity"] = False  # without a capacity
    return values


def _stages(run: Run, _: IsWritten) -> Values:
    """A schedule gets the fewest stages that it runs with; written stages are refused."""
    if run.parallel.pipeline == 1 or schedule_has_its_stages(run) is None:
        return {}
    return {"pipeline.stages_per_rank": SCHEDULES[run.pipeline.schedule].fewest}
