"""All rules, and the ways to ask them.

A search leaves out what `illegal` refuses, and nothing else; `advice` is told about its best layout. For a single run,
`penstock plan --layout` asks `config_refusal` and `advice`. Legal rules are functions of `penstock.config` itself, by
their names: those that a search breaks most often.
"""

from collections.abc import Callable

from penstock.base.errors import ConfigError
from penstock.config import dispatcher, fit, graph_rules, layout_rules
from penstock.config.fit import LayoutSizes, grid_of
from penstock.config.rules import RULES as CONFIG_RULES
from penstock.config.rules import rule_text
from penstock.config.run import Run
from penstock.config.schema import Problem
from penstock.plan.rules.advice import ADVICE
from penstock.plan.rules.rule import Check, Rule, Sizes


def _kernels_never_wait(sizes: Sizes) -> str | None:
    limit = sizes.model.most_sync_free
    if sizes.sync_free <= limit:
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
    _by_config(dispatcher.sent_rows_are_counted_by_the_host, "G3, our dispatchers"),
    Rule(
        name=rule_name(_kernels_never_wait),
        kind="legal",
        doc="From `dispatch.sync_free` 2 on (1 for the permutation) kernels never read counts on the host, as kernels "
        "of the reference do; on a GPU only these exist for experts in float32.",
        source="our kernels",
        check=_kernels_never_wait,
        by="penstock.models.kernels.kernel_choices",  # which imports PyTorch
    ),
    _by_config(dispatcher.padded_rows_are_sent, "R7"),
    _by_config(dispatcher.tokens_travel_to_experts, "O1"),
    _by_config(dispatcher.travels_happen_once, "O1, M7"),
    _by_config(dispatcher.pieces_have_their_weights, "our overlap"),
    _by_config(dispatcher.passes_stand_beside_each_other, "O1"),
    _by_config(graph_rules.captured_passes_are_not_cut_into_stages, "our graphs"),
)
"""In the order in which they are asked: the rules that refuse most come first."""


RULES: tuple[Rule, ...] = (*LEGAL, *ADVICE)  # every rule of a plan


def illegal(sizes: Sizes) -> tuple[Rule, str] | None:
    """The first legal rule that a layout breaks, with its reason, or None. Sizes need not divide."""
    for rule in LEGAL:
        if (reason := rule.check(sizes)) is not None:
            return rule, reason
    return None


def advice(sizes: Sizes) -> list[tuple[Rule, str]]:
    """Advice about a layout that can run."""
    return [(rule, reason) for rule in ADVICE if (reason := rule.check(sizes)) is not None]


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
