"""Seconds of collectives and dispatchers: the measured ones exactly, the others by bytes over the slower way."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import HardwareError
from penstock.plan.hardware import CollectiveRate, Hardware, MeasuredPoints, RankGroup, TransferPoint
from penstock.plan.hardware_file import load_hardware
from penstock.plan.rates import CollectiveName, TokenTraffic, TransferTimes, copies, reached
from tests.examples import examples

H200 = load_hardware("H200")
MI300X = load_hardware("MI300X")
ON_H200 = TransferTimes(H200)
V2_LITE = TokenTraffic(tokens=8192, copy_bytes=4096, experts=64, top_k=6)
MOE_2T = TokenTraffic(tokens=4096, copy_bytes=16384, experts=448, top_k=16)
KINDS: tuple[CollectiveName, ...] = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce", "point-to-point")


def plain(hardware: Hardware) -> TransferTimes:
    """Without points, latencies or losses: only bytes and bandwidths count."""
    ideal = [
        CollectiveRate(kind=one.kind, reach=one.reach, latency_seconds=0.0, efficiency=1.0, source=one.source)
        for one in hardware.collectives
    ]
    return TransferTimes(replace(hardware, collectives=tuple(ideal), measured=()))


def test_a_measured_collective_takes_what_was_measured_and_without_its_points_nearly_so() -> None:
    fitted = TransferTimes(replace(H200, measured=()))
    for measured in H200.measured:
        for point in measured.points:
            if isinstance(point, TransferPoint):
                whole = point.leaving_bytes * point.ranks / (point.ranks - 1)
                sent = point.leaving_bytes if measured.operator == "point-to-point" else whole
                found = ON_H200.collective(measured.operator, sent, RankGroup(point.ranks, point.node_ranks))  # type: ignore[arg-type]
                assert found.seconds == pytest.approx(point.seconds)
                assert found == (found.seconds, "measured", measured.source)
                if measured.operator == "all-to-all" and point.ranks == 4:
                    near = fitted.collective("all-to-all", sent, RankGroup(4, 4))
                    assert near.seconds == pytest.approx(point.seconds, rel=0.15) and near.basis == "roofline"


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_sends_nothing_and_answers_are_kept(kind: CollectiveName) -> None:
    assert ON_H200.collective(kind, 1e9, RankGroup(1, 1)).seconds == 0
    assert ON_H200.dispatch("all-to-all", "dispatch", V2_LITE, RankGroup(1, 1)).seconds == 0
    assert ON_H200.collective(kind, 1e9, RankGroup(4, 4)) is ON_H200.collective(kind, 1e9, RankGroup(4, 4))


@pytest.mark.parametrize(
    ("chip", "kind", "size", "group", "seconds"),
    [
        *((H200, kind, 8e9, (8, 8), 7e9 / 450e9) for kind in ("all-to-all", "all-gather", "reduce-scatter")),
        (H200, "all-reduce", 8e9, (8, 8), 14e9 / 450e9),
        (H200, "point-to-point", 8e9, (2, 2), 8e9 / 450e9),
        # In a mesh only links to ranks that take part carry.
        (MI300X, "all-to-all", 8e9, (8, 8), 7e9 / 448e9),
        (MI300X, "all-to-all", 4e9, (4, 4), 3e9 / (3 * 64e9)),
        (MI300X, "point-to-point", 1e9, (2, 2), 1e9 / 64e9),
        # Over nodes 56 of 64 parts of an all-to-all cross, each over its rank's own network card.
        (H200, "all-to-all", 64e6, (64, 8), 56e6 / 50e9),
        # The other 7 nodes' parts of an all-gather enter once, by 8 cards.
        (H200, "all-gather", 64e6, (64, 8), 7e6 / 50e9),
        (H200, "all-gather", 64e6, (8, 1), 56e6 / 50e9),
        (H200, "point-to-point", 1e6, (2, 1), 1e6 / 50e9),
    ],
)
def test_bytes_take_the_slower_of_links_and_network(
    chip: Hardware, kind: CollectiveName, size: float, group: tuple[int, int], seconds: float
) -> None:
    assert plain(chip).collective(kind, size, RankGroup(*group)).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "size", "group", "leaving"),
    [
        # 8 nodes of 8 in pods of 2 nodes: 48 of 64 parts of an all-to-all leave the pod, at a quarter of the bandwidth.
        ("all-to-all", 64e6, (64, 8, 16), 4 * 48e6),
        # The parts of 3 other pods enter once, by the 16 cards of a pod; those of the own pod's other node cost less.
        ("all-gather", 64e6, (64, 8, 16), 4 * 48e6 / 16),
        ("reduce-scatter", 64e6, (8, 1, 2), 4 * 48e6 / 2),
        ("point-to-point", 1e6, (2, 1, 1), 4e6),
        # A group inside of a pod does not notice.
        ("all-to-all", 16e6, (16, 8, 0), 8e6),
    ],
)
def test_bytes_that_leave_a_pod_take_the_oversubscribed_network(
    kind: CollectiveName, size: float, group: tuple[int, int, int], leaving: float
) -> None:
    node = H200.node.model_copy(update={"pod_nodes": 2, "oversubscription": 4.0})
    seconds = plain(replace(H200, node=node)).collective(kind, size, RankGroup(*group)).seconds
    assert seconds == pytest.approx(leaving / 50e9)


def test_rails_carry_an_all_to_all_through_the_links_of_the_node_first() -> None:
    # 8 of 16 parts cross; 7 of these 8 go to another number on the other node, beside 7 parts that stay.
    node = H200.node.model_copy(update={"rails": True, "link_bytes_per_second": 50e9})
    rails = plain(replace(H200, node=node))
    assert rails.collective("all-to-all", 16e6, RankGroup(16, 8)).seconds == pytest.approx(14e6 / 50e9)
    assert rails.collective("all-gather", 16e6, RankGroup(2, 1)).seconds == pytest.approx(8e6 / 50e9)


@examples(100, deadline=None)
@given(kind=st.sampled_from(KINDS), size=st.floats(1, 1e10), nodes=st.integers(1, 64), inside=st.integers(1, 8))
def test_more_bytes_never_take_less_time_and_no_way_beats_its_bandwidth(
    kind: CollectiveName, size: float, nodes: int, inside: int
) -> None:
    group = RankGroup(nodes * inside, inside)
    few, many = (ON_H200.collective(kind, bytes_, group).seconds for bytes_ in (size, 2 * size))
    assert 0 <= few <= many * 1.0001
    assert few >= plain(H200).collective(kind, size, group).seconds * 0.999


def test_a_point_over_nodes_corrects_its_own_size() -> None:
    point = TransferPoint(ranks=16, node_ranks=8, leaving_bytes=15_000_000, seconds=1e-3)
    hardware = replace(
        MI300X, measured=(MeasuredPoints(operator="all-to-all", source="measured: a test", points=(point,)),)
    )
    found = TransferTimes(hardware).collective("all-to-all", 16e6, RankGroup(16, 8))
    assert found == (pytest.approx(1e-3), "measured", "measured: a test")


def test_copies_of_a_token_are_those_of_the_dispatch_page() -> None:
    assert copies(V2_LITE, 4) == pytest.approx(2.51, abs=0.005)
    assert copies(V2_LITE, 8) == pytest.approx(3.97, abs=0.005)
    assert copies(TokenTraffic(tokens=1, copy_bytes=1, experts=256, top_k=8), 8) == pytest.approx(4.63, abs=0.005)
    assert copies(TokenTraffic(tokens=1, copy_bytes=1, experts=8, top_k=8), 8) == 7


@pytest.mark.parametrize("places", [2, 4, 8, 16, 32])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (8, 4), (4, 2), (8, 1)])
def test_places_that_a_token_reaches_are_those_of_drawn_routing(places: int, groups: int, kept: int) -> None:
    traffic = TokenTraffic(tokens=1, copy_bytes=1, experts=32, top_k=3, n_group=groups, topk_group=kept)
    draw, size, drawn = random.Random(places), 32 // groups, 4000
    found = 0
    for _ in range(drawn):
        allowed = draw.sample(range(groups), kept)
        chosen = draw.sample([group * size + one for group in allowed for one in range(size)], 3)
        found += len({expert // (32 // places) for expert in chosen})
    assert reached(traffic, places) == pytest.approx(found / drawn / places, rel=0.03)


def test_limited_groups_keep_tokens_of_deepseek_v3_on_four_of_eight_nodes() -> None:
    free = TokenTraffic(tokens=1, copy_bytes=1, experts=256, top_k=8)
    limited = replace(free, n_group=8, topk_group=4)
    assert 8 * reached(free, 8) == pytest.approx(5.3, abs=0.05)
    assert 3.5 < 8 * reached(limited, 8) < 4
    assert 8 * reached(replace(free, stride=1), 8) == 1  # Eight neighbouring experts are on one node.
    assert copies(limited, 8) < copies(free, 8)


def test_a_library_that_sends_single_rows_takes_longer_for_many_small_ones() -> None:
    cluster = next(one for one in H200.collectives if (one.kind, one.reach) == ("deep-ep", "cluster"))
    assert cluster.row_seconds > 0
    few, many = TokenTraffic(tokens=1024, copy_bytes=8192, experts=64, top_k=6), V2_LITE
    few, many = replace(few, tokens=4096), replace(many, tokens=8192, copy_bytes=4096)  # The same bytes.
    group = RankGroup(64, 8)
    seconds = [ON_H200.dispatch("deep-ep", "dispatch", one, group).seconds for one in (few, many)]
    assert seconds[1] - seconds[0] == pytest.approx(4096 * copies(few, 8) * cluster.row_seconds)


@pytest.mark.parametrize(
    ("top_k", "sharers", "places", "needed"),
    [(2, 1, 8, 8 * 2 / 8), (2, 4, 8, 8 * (1 - 6 / 28)), (2, 8, 8, 8), (8, 2, 16, 16), (2, 8, 64, 64 * 2 / 8)],
)
def test_ranks_that_share_an_expert_all_need_its_tokens(top_k: int, sharers: int, places: int, needed: float) -> None:
    traffic = TokenTraffic(tokens=1, copy_bytes=1, experts=8, top_k=top_k, expert_tensor=sharers)
    assert copies(traffic, places, sharers) == pytest.approx(needed * (places - 1) / places)
    in_turn = replace(traffic, stride=1)
    assert copies(in_turn, places, sharers) <= places - 1
    group = RankGroup(places, min(places, 8))
    for method in ("all-to-all", "hierarchical", "deep-ep"):
        found = plain(H200).dispatch(method, "dispatch", traffic, group)  # type: ignore[arg-type]
        assert found.seconds > 0


def test_dispatchers_send_what_they_send() -> None:
    transfers = plain(H200)
    token_bytes, group = 8192 * 4096, RankGroup(4, 4)
    times = {
        method: transfers.dispatch(method, "dispatch", V2_LITE, group).seconds * 450e9 / token_bytes  # type: ignore[arg-type]
        for method in ("all-to-all", "all-gather", "symmetric", "hierarchical", "deep-ep")
    }
    least = pytest.approx(copies(V2_LITE, 4))
    assert times == {
        "all-to-all": pytest.approx(4.5), "all-gather": pytest.approx(3), "symmetric": least,
        "hierarchical": least, "deep-ep": least
    }  # fmt: skip


def test_a_way_over_nodes_sends_a_token_once_to_each_node_and_spreads_it_there() -> None:
    transfers, group = plain(H200), RankGroup(16, 8)
    token_bytes = 8192 * 4096
    crossing = token_bytes * copies(V2_LITE, 2) / 50e9
    inside = token_bytes * 4.65 / 450e9  # docs/dispatch.md
    found = transfers.dispatch("hierarchical", "combine", V2_LITE, group).seconds
    assert found == pytest.approx(crossing + inside, rel=1e-3)
    assert transfers.dispatch("deep-ep", "combine", V2_LITE, group).seconds == pytest.approx(max(crossing, inside))
    alone = transfers.dispatch("hierarchical", "dispatch", V2_LITE, RankGroup(2, 1)).seconds
    assert alone == pytest.approx(crossing)


def test_what_a_file_does_not_say_is_refused_with_a_way_to_measure_it() -> None:
    silent = TransferTimes(replace(H200, collectives=()))
    with pytest.raises(HardwareError, match=r"nothing is known of all-gather in a node of H200; fix: measure it"):
        silent.collective("all-gather", 1e6, RankGroup(4, 4))
    node = H200.node.model_copy(update={"network_bytes_per_second": None})
    with pytest.raises(HardwareError, match="the network bandwidth of H200 is not known"):
        TransferTimes(replace(H200, node=node)).collective("all-to-all", 1e6, RankGroup(16, 8))
