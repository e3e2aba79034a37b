"""All rules, and the ways to ask them.

A search asks `first_refusal` about every layout, walks the others in the order of `order_key`, and stops behind the
first key at which something fits: later layouts are refused by `out_of_order`, with the name of the rule. For a single
run, `penstock plan --layout` asks `config_refusal` and `advice` only. Legal rules are functions of `penstock.config`
itself, by their names: those that a search breaks most often.
"""

from collections.abc import Callable

from penstock.base.errors import ConfigError
from penstock.config import dispatch_rules, fit, graph_rules, layout_rules
from penstock.config.fit import LayoutSizes, grid_of
from penstock.config.problem import Problem
from penstock.config.rules import RULES as CONFIG_RULES
from penstock.config.rules import rule_text
from penstock.config.run import Run
from penstock.plan.rules.advice import ADVICE
from penstock.plan.rules.order import ORDER
from penstock.plan.rules.prune import PRUNE
from penstock.plan.rules.rule import Check, Rule, Sizes


def _kernels_never_wait(sizes: Sizes) -> str | None:
    most = sizes.model.most_sync_free
    if sizes.sync_free <= most:
        return None
    return f"the kernels for this device and precision read counts on the host, and stage {sizes.sync_free} allows none"


def rule_name(function: Callable[..., object]) -> str:
    """The name of a rule of the config, as plans print it."""
    return function.__name__.strip("_").replace("_", "-")


def reason_of(problem: Problem | None) -> str | None:
    """A problem in one line."""
    if problem is None:
        return None
    return f"{problem.field} {problem.what}{'' if problem.got is None else f'; got {problem.got}'}"


def _rule(function: Callable[..., object], check: Check, source: str) -> Rule:
    doc, by = rule_text(function), f"{function.__module__}.{function.__name__}"
    return Rule(name=rule_name(function), kind="legal", doc=doc, source=source, check=check, by=by)


def _by_config(rule: Callable[[LayoutSizes], Problem | None], source: str) -> Rule:
    return _rule(rule, lambda sizes: reason_of(rule(sizes)), source)


def _by_ranks(rule: Callable[[LayoutSizes, int], Problem | None], source: str) -> Rule:
    return _rule(rule, lambda sizes: reason_of(rule(sizes, sizes.world)), source)


LEGAL: tuple[Rule, ...] = (
    _by_ranks(fit.sizes_divide_the_ranks, "L1, L2"),
    _by_ranks(fit.micro_batches_are_whole, "our step"),
    _by_ranks(fit.schedule_has_its_micro_batches, "our schedules"),
    _by_config(layout_rules.experts_have_ranks_only_if_there_are_any, "L3"),
    _by_config(layout_rules.expert_ranks_divide_experts, "L3"),
    _by_config(layout_rules.expert_tensor_ranks_divide_an_expert, "our layout"),
    _by_config(layout_rules.tensor_ranks_divide_heads, "L4"),
    _by_config(layout_rules.indexer_has_rows_and_heads_of_its_own, "our layout"),
    _by_config(layout_rules.ranks_divide_linear_heads, "our layout"),
    _by_config(layout_rules.tensor_ranks_divide_widths, "our layout"),
    _by_config(layout_rules.tensor_ranks_divide_the_vocabulary, "our layout"),
    _by_config(layout_rules.ranks_divide_the_sequence, "L6"),
    _by_config(layout_rules.ulysses_divides_heads, "L6"),
    _by_config(layout_rules.schedule_has_its_stages, "our schedules"),
    _by_config(layout_rules.pipeline_has_enough_layers, "L13"),
    _by_config(layout_rules.gathered_weights_meet_whole_backwards, "our FSDP2"),
    _by_config(layout_rules.recomputed_modules_exist, "M7"),
    _by_config(dispatch_rules.sent_rows_are_counted_by_the_host, "G3, our dispatchers"),
    Rule(
        name=rule_name(_kernels_never_wait),
        kind="legal",
        doc="From `dispatch.sync_free` 2 on (1 for the permutation) kernels never read counts on the host, as kernels "
        "of the reference do; on a GPU only these exist for experts in float32.",
        source="our kernels",
        check=_kernels_never_wait,
        by="penstock.models.kernels.kernel_choices",  # which imports PyTorch
    ),
    _by_config(dispatch_rules.padded_rows_are_sent, "R7"),
    _by_config(dispatch_rules.tokens_travel_to_experts, "O1"),
    _by_config(dispatch_rules.travels_happen_once, "O1, M7"),
    _by_config(dispatch_rules.halves_are_whole_rows, "our overlap"),
    _by_config(dispatch_rules.pieces_have_their_weights, "our overlap"),
    _by_config(dispatch_rules.passes_stand_beside_each_other, "O1"),
    _by_config(graph_rules.captured_passes_are_not_cut_into_stages, "our graphs"),
)
"""In the order in which they are asked: the rules that refuse most come first."""


RULES: tuple[Rule, ...] = (*LEGAL, *PRUNE, *ORDER, *ADVICE)
"""Every rule of a plan."""

OrderKey = tuple[int, ...]
"""Ranks by the rules of `ORDER`."""

_REFUSING = (*LEGAL, *PRUNE)
_TOLD = (*ORDER, *ADVICE)


def first_refusal(sizes: Sizes) -> tuple[Rule, str] | None:
    """The first legal or pruning rule that a layout breaks, with its reason, or None. Sizes need not divide."""
    for rule in _REFUSING:
        if (reason := rule.check(sizes)) is not None:
            return rule, reason
    return None


def illegal(sizes: Sizes) -> tuple[Rule, str] | None:
    """As `first_refusal`, for a layout that the user asked for: only a layout that cannot run is refused."""
    for rule in LEGAL:
        if (reason := rule.check(sizes)) is not None:
            return rule, reason
    return None


def advice(sizes: Sizes) -> list[tuple[Rule, str]]:
    """Advice and rules of order that apply to a layout that can run."""
    return [(rule, reason) for rule in _TOLD if (reason := rule.check(sizes)) is not None]


def order_key(sizes: Sizes) -> OrderKey:
    """Ranks of a layout by the rules of `ORDER`; a search tries smaller keys first."""
    return tuple(rule.rank(sizes) for rule in ORDER if rule.rank is not None)


def out_of_order(sizes: Sizes, fits: OrderKey) -> tuple[Rule, str] | None:
    """The rule that puts a layout behind the least key that fits, with the reason; None if no rule does."""
    for rule, own, other in zip(ORDER, order_key(sizes), fits, strict=True):
        # Keys are compared from the left, as tuples are.
        if own < other:
            return None
        if own > other:
            reason = rule.check(sizes)
            assert reason is not None, f"{rule.name} has a rank and no reason"
            return rule, f"{reason}; layouts without it fit" if other == 0 else f"{reason}; layouts with less of it fit"
    return None


def config_refusal(run: Run, world: int) -> tuple[str, str] | None:
    """Name and reason of the first rule of the config that a run breaks on `world` ranks, or None."""
    for rule in CONFIG_RULES:
        if (problem := rule(run)) is not None:
            error = ConfigError(
                f"{problem.field} {problem.what}", got=problem.got, allowed=problem.allowed, fix=problem.fix
            )
            return rule_name(rule), str(error)
    try:
        grid_of(run, world)
    except ConfigError as error:
        return "ranks-fit-the-run", str(error)
    return None
