"""AMD's published conclusions for 768 GPUs follow from this plan; where they do not, the difference is known."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planning import (
    AS_PUBLISHED,
    CONVENTIONAL,
    DE_DUPLICATED,
    LAYOUTS,
    MODELS,
    ROWS_SENT,
    SAVED_BYTES,
    SHARDED,
    Layout,
    Variant,
    chart_row,
    fits_row,
    memory,
    memory_of_the_last,
    run_of,
    usable_bytes,
)
from benchmarks.planning_times import EVEN, SWEPT, dispatch_sweep, travels_of, weak_scaling
from penstock.config.load import load_run
from penstock.plan.hardware import cluster_of
from penstock.plan.hardware_file import load_hardware, parse_cluster
from penstock.plan.project import project
from penstock.plan.rates import DispatchMethod, TokenTraffic, TransferTimes, copies

PLAIN = Layout(24, 8, 1)
HALVED = Layout(24, 8, 2)
SIXTEEN = Layout(24, 16, 2)


def saved(model: str, variant: Variant) -> int:
    return memory(model, PLAIN, variant).activations - memory(model, HALVED, variant).activations


@pytest.mark.often("2-moe-1t")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("context", [1, 2])
def test_activations_are_those_of_the_published_charts(model: str, context: int) -> None:
    found = memory(model, PLAIN if context == 1 else HALVED, AS_PUBLISHED)
    assert found.activations == pytest.approx(SAVED_BYTES[model] * (3 - context), rel=0.02)


@pytest.mark.slow
def test_the_published_commands_say_what_is_published() -> None:
    assert abs(chart_row("moe-1t", 2)["ratio"] - 1) < 0.02
    row = fits_row("moe-2t", "MI300X", (24, 16, 2), fits=True)
    assert row["fits"] == row["published"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("variant", [ROWS_SENT, CONVENTIONAL], ids=lambda one: one.name)
def test_two_context_ranks_halve_the_activations(model: str, variant: Variant) -> None:
    plain, halved = (memory(model, layout, variant) for layout in (PLAIN, HALVED))
    assert 0.49 < halved.activations / plain.activations < 0.55
    assert plain.activations > 0.7 * plain.total
    assert saved(model, variant) == pytest.approx(SAVED_BYTES[model], rel=0.10)


def test_the_first_rank_of_the_pipeline_needs_more_than_the_last() -> None:
    assert memory("moe-2t", HALVED).total > 1.2 * memory_of_the_last("moe-2t", HALVED).total


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_separate_operators_keep_more_than_ours(model: str) -> None:
    assert saved(model, CONVENTIONAL) > SAVED_BYTES[model] > 0.99 * saved(model, DE_DUPLICATED)
    assert memory(model, PLAIN, CONVENTIONAL).activations > 1.05 * memory(model, PLAIN).activations


def test_de_duplication_keeps_fewer_rows_than_choices_where_ranks_are_fewer_than_choices() -> None:
    # 8 ranks, and 16 choices of a token.
    assert memory("moe-2t", PLAIN, DE_DUPLICATED).activations < 0.8 * memory("moe-2t", PLAIN).activations
    assert memory("moe-1t", PLAIN, DE_DUPLICATED).activations > 0.99 * memory("moe-1t", PLAIN).activations


@pytest.mark.often("moe-2t")
@pytest.mark.parametrize("model", MODELS)
def test_more_expert_ranks_save_no_activations(model: str) -> None:
    few, many = memory(model, HALVED), memory(model, SIXTEEN)
    assert many.activations == pytest.approx(few.activations, rel=1e-4)
    assert few.total - many.total < 0.15 * few.total


@pytest.mark.often("1-moe-1t")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("context", [1, 2])
def test_a_longer_pipeline_holds_more_activations_and_saves_next_to_nothing(model: str, context: int) -> None:
    short, long = memory(model, Layout(24, 8, context)), memory(model, Layout(48, 8, context))
    assert long.activations > 1.15 * short.activations
    assert long.total > 0.96 * short.total


OFFLOADED = Variant("all-to-all, optimizer on the host", (*ROWS_SENT.overrides, "offload.optimizer=true"))
FITS = [
    # The published layouts of the smaller model fit, and the next cheaper one does not.
    *(
        ("moe-1t", chip, layout, variant, does)
        for chip, layout, does in (("MI300X", PLAIN, False), ("MI300X", HALVED, True), ("MI355X", PLAIN, True))
        for variant in (ROWS_SENT, CONVENTIONAL, DE_DUPLICATED)
    ),
    # Sixteen expert ranks fit the smaller chip with float32 sums if data-parallel ranks shard them.
    ("moe-2t", "MI300X", SIXTEEN, SHARDED, True),
    ("moe-2t", "MI300X", HALVED, SHARDED, False),
]
SLOW_FITS = [
    # The published layout of the larger model fits the larger chip alone.
    *(("moe-2t", "MI355X", PLAIN, variant, False) for variant in (ROWS_SENT, CONVENTIONAL)),
    *(("moe-2t", "MI355X", HALVED, variant, True) for variant in (ROWS_SENT, CONVENTIONAL)),
    *(("moe-2t", "MI300X", HALVED, variant, False) for variant in (ROWS_SENT, CONVENTIONAL)),
    # Sixteen expert ranks fit the smaller chip with the optimizer on the host.
    ("moe-2t", "MI300X", SIXTEEN, OFFLOADED, True),
    ("moe-2t", "MI300X", HALVED, OFFLOADED, False),
]


@pytest.mark.parametrize(
    ("model", "chip", "layout", "variant", "does"),
    [*FITS, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_FITS)],
    ids=str,
)
def test_the_published_layouts_fit_where_they_are_published_to_fit(
    model: str, chip: str, layout: Layout, variant: Variant, does: bool
) -> None:
    assert (memory(model, layout, variant).total <= usable_bytes(chip)) == does


def test_sixteen_expert_ranks_fit_the_smaller_chip_if_gradients_are_summed_as_that_plan_counts_them() -> None:
    found, usable = memory("moe-2t", SIXTEEN), usable_bytes("MI300X")
    assert found.total > usable
    assert found.total - found.gradients // 2 <= usable
    # Eight do not even then.
    eight = memory("moe-2t", HALVED)
    assert eight.total - eight.gradients // 2 > usable


def one_way(method: DispatchMethod, ranks: int, *, in_turn: bool) -> float:
    """Seconds to the experts of a layer of MoE-2T."""
    travel = next(one for one in travels_of(load_run("moe-2t", [])) if bool(one.stride) == in_turn)
    cluster = cluster_of(1024, load_hardware("MI300X"))
    return TransferTimes(cluster.hardware).dispatch(method, "dispatch", travel, cluster.group(ranks)).seconds


def test_rows_that_are_sent_take_longer_with_each_node_and_tokens_that_take_experts_in_turn_hardly_do() -> None:
    rows = [one_way("all-to-all", ranks, in_turn=True) for ranks in SWEPT]
    once = [one_way("deep-ep", ranks, in_turn=True) for ranks in SWEPT]
    assert rows == sorted(rows) and rows[-1] > 8 * rows[0]
    # What is more of it is small beside what a layer computes.
    assert once[-1] - once[0] < 0.07 * (rows[-1] - rows[0])
    # Where every choice is as likely, de-duplication saves half and no more.
    assert 0.3 < one_way("hierarchical", 64, in_turn=False) / one_way("all-to-all", 64, in_turn=False) < 0.7


@given(experts=st.sampled_from((64, 256, 448)), top_k=st.sampled_from((1, 6, 8, 16)), places=st.sampled_from((2, 4, 8)))
def test_experts_in_turn_lie_on_as_few_places_as_can_be_and_never_on_more_than_by_chance(
    experts: int, top_k: int, places: int
) -> None:
    even = TokenTraffic(tokens=1, copy_bytes=1, experts=experts, top_k=top_k)
    turn = replace(even, stride=1)
    fewest = -(-top_k // (experts // places)) * (places - 1) / places
    assert fewest <= copies(turn, places) <= copies(even, places) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "best"), [("MI300X", HALVED), ("MI355X", PLAIN)])
def test_the_published_choices_are_the_fastest_that_fit(chip: str, best: Layout) -> None:
    found = {
        layout: project(run_of("moe-1t", layout, ROWS_SENT), parse_cluster(f"768x{chip}"), EVEN) for layout in LAYOUTS
    }
    fitting = {layout: one.time.tokens_per_second_per_device for layout, one in found.items() if one.fits}
    assert max(fitting, key=lambda layout: fitting[layout]) == best


@pytest.mark.slow
def test_all_to_all_falls_steeply_and_de_duplication_of_experts_in_turn_stays_nearly_flat() -> None:
    rows = dispatch_sweep()
    plain = [row["tokens_per_second_per_device"] for row in rows if row["method"] == "all-to-all"]
    turn = [row["in_turn"] for row in rows if row["method"] == "auto"]
    assert plain[-1] < 0.55 * plain[0] and turn[-1] > 0.85 * turn[0]
    assert all(once > sent for once, sent in zip(turn, plain, strict=True))


@pytest.mark.slow
def test_eight_times_as_many_devices_train_nearly_eight_times_as_fast() -> None:
    efficiencies = {row["rows_a_rank"]: row["efficiency"] for row in weak_scaling() if row["devices"] == 1024}
    assert 0.95 < efficiencies[32] < efficiencies[64] < 1.0
