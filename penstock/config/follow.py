"""Values that follow others: a value of a preset or a default gives way to a value that the user wrote.

A preset is complete, and an override changes one field of it: `training.steps=12` where the warm-up takes 20 steps,
`model.layers=1` where the first three layers are dense. Written values stay, and are refused if a rule forbids them. A
value that was not written moves to the nearest one that the rules allow, and only if it breaks a rule: a run that obeys
the rules is never changed. `penstock config show` and a run's config.toml have the result.

Two kinds of values do not follow. A value that only the user knows, such as the experts of a dense preset, is asked
for. And the layout never changes the training: `parallel.tensor=2` alters no vocabulary and no sequence length.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import gcd
from typing import Any, TypeVar

from penstock.config.data_rules import evaluation_has_text
from penstock.config.dispatch_rules import COUNTS_STAY, passes_stand_beside_each_other
from penstock.config.graph_rules import captured_shapes_are_known
from penstock.config.layout_rules import schedule_has_its_stages
from penstock.config.model import GroupedQueryAttention, warms_indexer_up
from penstock.config.run import Run
from penstock.config.schema import Section
from penstock.layout.schedules import SCHEDULES

_WARMUP_SHARE = 10  # a warm-up that is too long becomes this part of the steps

AnySection = TypeVar("AnySection", bound=Section)
Values = dict[str, Any]  # new values by the full path of their field


@dataclass(frozen=True)
class Written:
    """The fields that the user wrote; a section written as a whole covers its fields."""

    paths: frozenset[str]

    def __call__(self, path: str) -> bool:
        """Whether the user wrote a field."""
        names = path.split(".")
        # `model.moe.top_k` is written if it, `model.moe` or `model` is.
        return any(".".join(names[:end]) in self.paths for end in range(1, len(names) + 1))


def follow(run: Run, written: Collection[str]) -> Run:
    """The run, which may break rules between fields, with values that follow those at the `written` paths."""
    is_written = Written(frozenset(written))
    for values_of in _FOLLOWERS:
        for path, value in values_of(run, is_written).items():
            if not is_written(path):
                run = _replaced(run, path.split("."), value)
    return run


def _replaced(section: AnySection, names: list[str], value: object) -> AnySection:
    name, *below = names
    inner = dict(section)[name]
    return section.model_copy(update={name: _replaced(inner, below, value) if below else value})


def _warmup(run: Run, _: Written) -> Values:
    steps = run.training.steps
    return {"schedule.warmup_steps": steps // _WARMUP_SHARE} if run.schedule.warmup_steps > steps else {}


def _decay(run: Run, is_written: Written) -> Values:
    """The decay is shortened to the steps after the warm-up, or the warm-up if the decay was written."""
    schedule, steps = run.schedule, run.training.steps
    if schedule.decay != "wsd":
        return {"schedule.decay_steps": 0}  # only wsd reads it
    if schedule.warmup_steps + schedule.decay_steps <= steps:
        return {}
    if is_written("schedule.decay_steps"):
        return {"schedule.warmup_steps": max(0, steps - schedule.decay_steps)}
    return {"schedule.decay_steps": max(0, steps - schedule.warmup_steps)}


def _batch(run: Run, is_written: Written) -> Values:
    """Micro-batches divide the global batch."""
    rows, micro = run.training.global_batch, run.training.micro_batch
    if rows % micro == 0:
        return {}
    if is_written("training.global_batch"):
        return {"training.micro_batch": gcd(rows, micro)}  # the largest that divides both
    return {"training.global_batch": max(micro, rows - rows % micro)}  # rounded down, but one micro-batch at least


def _profile(run: Run, _: Written) -> Values:
    left = run.training.steps - run.profile.start + 1  # steps are counted from 1
    return {"profile.steps": min(run.profile.steps, left)} if run.profile.start and left > 0 else {}


def _evaluation(run: Run, _: Written) -> Values:
    return {} if evaluation_has_text(run) is None else {"evaluation.rows": 0}  # nothing is held out


def _layers(run: Run, is_written: Written) -> Values:
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


def _dense_width(run: Run, _: Written) -> Values:
    """A dense layer is as wide as the experts of one token."""
    model, moe = run.model, run.model.moe
    if moe is None or model.intermediate_size or model.layers == model.moe_layers:
        return {}
    return {"model.intermediate_size": moe.top_k * moe.moe_intermediate_size + moe.shared_expert_intermediate_size}


def _prediction(run: Run, _: Written) -> Values:
    return {"model.mtp_layers": min(run.model.mtp_layers, run.training.sequence_length - 1)}


def _heads(run: Run, _: Written) -> Values:
    attention = run.model.attention
    if not isinstance(attention, GroupedQueryAttention):
        return {}
    return {"model.attention.kv_heads": gcd(attention.heads, attention.kv_heads)}  # which divides the heads


def _local(run: Run, _: Written) -> Values:
    """Without global layers, their options have the defaults."""
    attention = run.model.attention
    if not isinstance(attention, GroupedQueryAttention) or attention.local is None or attention.local.global_every:
        return {}
    return {"model.attention.local.global_rope": True, "model.attention.local.global_temperature": 0.0}


def _rope(run: Run, is_written: Written) -> Values:
    """Only the written kind of context extension stays."""
    rope, path = run.model.attention.rope, "model.attention.rope"
    if rope.yarn is None or rope.llama3 is None:
        return {}
    chosen = {name for name in ("yarn", "llama3") if any(one.startswith(f"{path}.{name}") for one in is_written.paths)}
    return {f"{path}.{name}": None for name in {"yarn", "llama3"} - chosen} if chosen else {}


def _groups(run: Run, _: Written) -> Values:
    """Groups divide the experts; top2 groups have two experts."""
    moe = run.model.moe
    if moe is None:
        return {}
    # The largest divisor of the given number of groups that leaves `least` experts in each.
    least = 2 if moe.router.group_score == "top2" and moe.experts > 1 else 1
    most = gcd(moe.router.n_group, moe.experts)
    groups = max(one for one in range(1, most + 1) if most % one == 0 and moe.experts >= least * one)
    values: Values = {"model.moe.router.n_group": groups}
    return values | ({"model.moe.router.group_score": "max"} if moe.experts == 1 else {})


def _choice(run: Run, is_written: Written) -> Values:
    """The kept groups hold `top_k` experts."""
    moe = run.model.moe
    if moe is None or moe.experts % moe.router.n_group:
        return {}
    kept, of_group = min(moe.router.topk_group, moe.router.n_group), moe.experts // moe.router.n_group
    if is_written("model.moe.top_k"):
        # Enough groups for top_k, rounded up.
        kept = min(max(kept, -(-moe.top_k // of_group)), moe.router.n_group)
    elif is_written("model.moe.router.topk_group"):
        kept = moe.router.topk_group
    return {"model.moe.router.topk_group": kept, "model.moe.top_k": min(moe.top_k, kept * of_group)}


def _router(run: Run, _: Written) -> Values:
    """Options that do not go with the score, with one expert, or with weighted inputs are off."""
    moe = run.model.moe
    if moe is None:
        return {}
    values: Values = {}
    if moe.router.scoring_func != "softmax" or moe.top_k == 1:
        values["model.moe.router.softmax_after_top_k"] = False
    if moe.top_k == 1:
        values["model.moe.router.norm_topk_prob"] = False  # one weight over itself is always 1
    if moe.router.apply_probs_on_input:
        values["model.moe.bias"] = False  # weighted inputs would leave the biases without their weight
    if warms_indexer_up(run.model):
        values["model.moe.router.expert_bias_rate"] = 0.0  # only the indexer learns
    if moe.balance.aux_loss == "none":
        values["model.moe.balance.aux_loss_coef"] = 0.0  # a factor of nothing
    if moe.balance.capacity_factor == 0:
        values["model.moe.balance.pad_to_capacity"] = False  # without a capacity
    return values


def _schedule(run: Run, is_written: Written) -> Values:
    """The schedule fits the overlap and the stages."""
    if run.parallel.pipeline == 1:
        return {}
    wants_another = schedule_has_its_stages(run) is not None and is_written("pipeline.stages_per_rank")
    if wants_another or passes_stand_beside_each_other(run) is not None:
        return {"pipeline.schedule": "interleaved" if run.pipeline.stages_per_rank > 1 or not wants_another else "1f1b"}
    return {}


def _stages(run: Run, _: Written) -> Values:
    if schedule_has_its_stages(run) is None:
        return {}
    return {"pipeline.stages_per_rank": SCHEDULES[run.pipeline.schedule].fewest}  # that the schedule runs with


def _row_counts(run: Run, _: Written) -> Values:
    return {} if captured_shapes_are_known(run) is None else {"dispatch.sync_free": COUNTS_STAY}


# In this order; a later one sees the changes of earlier ones.
_FOLLOWERS: tuple[Callable[[Run, Written], Values], ...] = (
    _warmup,
    _decay,
    _batch,
    _profile,
    _evaluation,
    _layers,
    _dense_width,
    _prediction,
    _heads,
    _local,
    _rope,
    _groups,
    _choice,
    _router,
    _schedule,
    _stages,
    _row_counts,
)
