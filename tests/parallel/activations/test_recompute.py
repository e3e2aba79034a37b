"""Which layers recompute which parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.parallel import RECOMPUTABLE, Recompute
from penstock.parallel.recompute import RecomputeRule, recomputed, rule_for


def test_every_layer_of_every_stage_recomputes_if_none_is_named() -> None:
    config = Recompute(modules=("norm", "dense"))
    assert rule_for(config, 7, 3).kinds == {"norm", "dense"}
    assert rule_for(Recompute(), 0, 0).kinds == frozenset()


@given(
    layers=st.lists(st.integers(0, 5), max_size=3),
    stages=st.lists(st.integers(0, 3), max_size=2),
    layer=st.integers(0, 5),
    stage=st.integers(0, 3),
)
def test_a_layer_recomputes_if_its_number_and_its_stage_are_named(
    layers: list[int], stages: list[int], layer: int, stage: int
) -> None:
    rule = rule_for(Recompute(modules=("moe",), layers=tuple(layers), stages=tuple(stages)), layer, stage)
    assert (rule.kinds == {"moe"}) == ((layer in layers or not layers) and (stage in stages or not stages))


def test_a_part_that_no_layer_has_is_refused() -> None:
    with pytest.raises(AssertionError, match="'mlp', 'norm'.* are not all of"):
        rule_for(Recompute(modules=("norm", "mlp")), 0, 0)


@pytest.mark.parametrize("kind", RECOMPUTABLE)
def test_a_rule_recomputes_the_kinds_that_it_names_and_no_other(kind: str) -> None:
    calls: dict[str, int] = {}

    def part(name: str, x_TD: torch.Tensor) -> torch.Tensor:
        calls[name] = calls.get(name, 0) + 1
        return x_TD.tanh()

    rule = RecomputeRule(kinds=frozenset({kind}))
    x_TD = torch.randn(3, 4, requires_grad=True)
    for name in RECOMPUTABLE:
        rule.run(name, part, name, x_TD).sum().backward()
    assert calls == {name: 1 + (name == kind) for name in RECOMPUTABLE}


def test_a_part_inside_a_recomputed_layer_does_not_recompute_by_itself() -> None:
    rule = RecomputeRule(kinds=frozenset({"layer", "expert-activation"}))
    seen = []

    def layer(x_TD: torch.Tensor) -> torch.Tensor:
        seen.append(rule.recomputes("expert-activation"))
        return x_TD.tanh()

    rule.run("layer", layer, torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [False, False] and rule.recomputes("expert-activation")


@pytest.mark.parametrize(("kinds", "calls"), [(frozenset({"norm"}), 2), (frozenset(), 1)])
def test_outputs_are_discarded_under_a_rule_that_names_something(kinds: frozenset[str], calls: int) -> None:
    x_TD, count = torch.randn(3, 4, requires_grad=True), []

    def double(x_TD: torch.Tensor) -> torch.Tensor:
        count.append(1)
        return x_TD * 2

    with RecomputeRule(kinds=kinds).discarding():
        # Doubling saves nothing; only the square needs what it gave.
        loss = recomputed(double, x_TD).square().sum()
    loss.backward()
    assert len(count) == calls
