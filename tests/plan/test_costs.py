"""The cost of a recorded operator."""

from dataclasses import replace

import pytest

from penstock.config.load import load_run
from penstock.plan.costs import OpCosts, RoutedRows, buffer_rows, routed_rows
from penstock.plan.hardware import RankGroup
from penstock.plan.hardware_file import load_hardware
from penstock.plan.op_recorder import RecordedOp
from penstock.plan.rates import Rates
from penstock.plan.transfers import TokenTraffic, TransferTimes

H200 = load_hardware("H200")
RATES, TRANSFERS = Rates(H200), TransferTimes(H200)
EXPERTS = RoutedRows(tokens=1024, experts=8, top_k=2, rows=2048, imbalance=1.0)
COSTS = OpCosts(H200, EXPERTS, buffers=frozenset({4096}))
BANDWIDTH = H200.peaks.memory_bytes_per_second * H200.efficiency.memory


def of_bf16(name: str, *shapes: tuple[int, ...], switches: tuple[str, ...] = ()) -> RecordedOp:
    sizes = tuple(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)
    return RecordedOp(name, shapes, sizes, 2, switches)


def experts_product(name: str, *shapes: tuple[int, ...], switches: tuple[str, ...] = ()) -> RecordedOp:
    return RecordedOp(name, shapes, tuple(2 for _ in shapes), 2, switches)


def test_a_product_takes_what_rates_say() -> None:
    cost = COSTS.of(of_bf16("mm", (4096, 2048), (2048, 1024), (4096, 1024)))
    assert cost == (RATES.product(4096, 1024, 2048).seconds, "products", False)


def test_a_weight_gradient_of_few_rows_takes_as_long_as_its_sum_moves() -> None:
    shapes = ((8192, 8192), (8192, 16), (16, 8192))
    few = RecordedOp("addmm", shapes, (4 * 8192**2, 2 * 8192 * 16, 2 * 16 * 8192), 4)
    assert COSTS.of(few).seconds == pytest.approx(8 * 8192**2 / BANDWIDTH)
    shapes = ((2048, 2048), (2048, 65536), (65536, 2048))
    many = RecordedOp("addmm", shapes, (4 * 2048**2, 2 * 2048 * 65536, 2 * 2048 * 65536), 4)
    assert COSTS.of(many).seconds == RATES.product(2048, 2048, 65536).seconds


def test_experts_compute_the_rows_that_arrive_whatever_the_capacity() -> None:
    shapes = ((4096, 512), (8, 1024, 512), (4096, 1024))
    cost = COSTS.of(experts_product("rows_kernel", *shapes))
    assert cost == (RATES.grouped("forward", 8, 2048 // 8, 1024, 512).seconds, "experts", False)
    every = replace(EXPERTS, rows=9999)
    crowded = OpCosts(H200, every, buffers=frozenset({4096}))
    assert crowded.of(experts_product("rows_kernel", *shapes)).seconds > cost.seconds


def test_the_experts_products_are_told_apart() -> None:
    back = experts_product("rows_kernel", (4096, 1024), (8, 1024, 512), (4096, 512), switches=("DEPTH_FIRST",))
    assert COSTS.of(back).seconds == RATES.grouped("input_gradient", 8, 256, 1024, 512).seconds
    weights = experts_product("weights_kernel", (4096, 1024), (4096, 512), (8, 1024, 512), switches=("ACCUMULATE",))
    assert COSTS.of(weights).seconds == pytest.approx(
        RATES.grouped("weight_gradient_accumulated", 8, 256, 1024, 512).seconds
    )
    by_torch = experts_product("_grouped_mm", (4096, 512), (8, 512, 1024), (8,), (4096, 1024))
    assert COSTS.of(by_torch).seconds == RATES.grouped("forward", 8, 256, 1024, 512).seconds


def test_the_room_is_that_of_the_rows_of_the_experts_kernels() -> None:
    work = (of_bf16("mm", (9999, 8), (8, 8)), experts_product("rows_kernel", (64, 8), (2, 8, 8), (80, 8)))
    assert buffer_rows((work,)) == {80}
    in_8 = in_8_bits("float8_rows_kernel", (300, 512), (8, 1024, 512), (4096, 1024))
    assert buffer_rows(((in_8,),)) == {4096} and buffer_rows(()) == frozenset()


def test_attention_is_causal_unless_it_is_given_a_mask() -> None:
    heads = ((2, 16, 1024, 192), (2, 16, 1024, 192), (2, 16, 1024, 128))
    name = "_scaled_dot_product_cudnn_attention"
    causal = COSTS.of(experts_product(name, *heads))
    assert causal == (RATES.attention("forward", 32, 1024, 1024, (192, 128)).seconds, "attention", False)
    assert COSTS.of(experts_product(name, *heads, (2, 1, 1024, 1024))).seconds > 1.5 * causal.seconds
    backward = experts_product(f"{name}_backward", (2, 16, 1024, 128), *heads, (2, 16, 1024, 128))
    assert COSTS.of(backward).seconds == RATES.attention("backward", 32, 1024, 1024, (192, 128)).seconds


def test_a_kernel_that_computes_little_takes_the_time_of_its_bytes() -> None:
    plain = COSTS.of(of_bf16("swiglu_kernel", (1000, 2000), (1000, 1000)))
    assert plain.seconds == pytest.approx(H200.host.kernel_seconds + 6e6 / BANDWIDTH)
    in_place = COSTS.of(of_bf16("add_", (1000, 2000), (1000, 2000)))
    assert in_place.seconds == pytest.approx(H200.host.kernel_seconds + 12e6 / BANDWIDTH)


def test_empty_rows_are_not_moved() -> None:
    half = COSTS.of(of_bf16("sum_rows_kernel", (4096, 512), (512, 512)))
    assert half.seconds == pytest.approx(H200.host.kernel_seconds + 2 * 512 * (2048 + 512) / BANDWIDTH)


def test_kernels_that_do_not_move_each_tensor_once_have_bytes_of_their_own() -> None:
    part = ((2, 4096, 16, 128), (65536, 4096), (65536, 4096))
    cost = COSTS.of(RecordedOp("latent_heads_backward_kernel", part, (1 << 25, 1 << 28, 1 << 28), 2))
    assert cost.seconds == pytest.approx(H200.host.kernel_seconds + 2 * (1 << 25) / BANDWIDTH)
    assert COSTS.of(RecordedOp("set_", ((1 << 20,), (1 << 20,)), (1 << 21, 1 << 21), 2)).seconds == 0


def test_the_optimizer_has_a_rate_of_its_own() -> None:
    cost = COSTS.of(RecordedOp("_foreach_norm", ((1000, 1000),), (4_000_000,), 4))
    rate = H200.peaks.memory_bytes_per_second * H200.efficiency.optimizer
    assert cost.seconds == pytest.approx(H200.host.kernel_seconds + 4e6 / rate)
    assert cost.term == "optimizer"


def test_collectives_take_what_transfers_say() -> None:
    group = RankGroup(4, 4)
    cost = COSTS.of(RecordedOp("alltoall_base_", ((8,), (8,)), (3_000_000, 4_000_000), 2, group=group))
    assert cost == (TRANSFERS.collective("all-to-all", 4e6, group).seconds, "dispatch", True)
    cost = COSTS.of(RecordedOp("_reduce_scatter_base_", ((8,), (32,)), (1_000_000, 4_000_000), 4, group=group))
    assert cost == (TRANSFERS.collective("reduce-scatter", 4e6, group).seconds, "exchange", True)


def test_rows_that_a_kernel_sends_cross_once_to_each_rank_that_needs_them() -> None:
    sent = RecordedOp("push_rows_kernel", ((1024, 256), (1024, 2), (4,)), (1024 * 1024, 8192, 32), 4)
    travel = TokenTraffic(tokens=1024, copy_bytes=1024, experts=8, top_k=2)
    cost = COSTS.of(sent)
    assert cost == (TRANSFERS.dispatch("symmetric", "dispatch", travel, RankGroup(4, 4)).seconds, "dispatch", True)
    uneven = OpCosts(H200, replace(EXPERTS, imbalance=2.0), buffers=frozenset({4096}))
    assert uneven.of(sent).seconds > cost.seconds


def in_8_bits(name: str, *shapes: tuple[int, ...], switches: tuple[str, ...] = ()) -> RecordedOp:
    return RecordedOp(name, shapes, tuple(1 for _ in shapes), 1, switches)


def test_products_in_8_bits_take_the_rates_of_8_bits() -> None:
    rows = in_8_bits("float8_rows_kernel", (4096, 512), (8, 1024, 512), (4096, 1024))
    assert COSTS.of(rows) == (RATES.grouped("forward", 8, 256, 1024, 512, "fp8").seconds, "experts", False)
    gathered = in_8_bits("float8_rows_kernel", *rows.shapes, switches=("GATHER",))
    assert COSTS.of(gathered).seconds == RATES.grouped("forward_gathered", 8, 256, 1024, 512, "fp8").seconds
    matrices = (1024, 5120), (512, 5120), (8, 1024, 512)
    weights = in_8_bits("float8_matrices_kernel", *matrices, switches=("ACCUMULATE",))
    expected = RATES.grouped("weight_gradient_accumulated", 8, 256, 1024, 512, "fp8").seconds
    assert COSTS.of(weights) == (expected, "experts", False)
    dense = in_8_bits("float8_matrices_kernel", (8192, 2048), (4096, 2048), (1, 8192, 4096))
    assert COSTS.of(dense) == (RATES.product(8192, 4096, 2048, "fp8").seconds, "products", False)
    assert RATES.product(8192, 4096, 2048, "fp8").seconds < 0.7 * RATES.product(8192, 4096, 2048).seconds


def test_scales_of_single_rows_on_both_sides_slow_a_product_in_8_bits() -> None:
    share = H200.efficiency.float8_by_rows / H200.efficiency.float8_grouped
    matrices = (8192, 51200), (8192, 51200), (8, 8192, 8192), (8192, 400)
    by_rows = in_8_bits("float8_matrices_kernel", *matrices, (8192, 400))
    by_squares = in_8_bits("float8_matrices_kernel", *matrices, (64, 400))
    assert COSTS.of(by_squares).seconds == pytest.approx(COSTS.of(by_rows).seconds * share, rel=1e-6)
    dense = (8192, 8192), (8192, 4096), (8192, 64)
    of_torch = [
        in_8_bits("_scaled_mm_v2", *dense, scales)._replace(sizes=(8192 * 8192, 8192 * 4096, 1, 1))
        for scales in ((4096, 64), (64, 32))
    ]
    share = H200.efficiency.float8_by_rows / H200.efficiency.float8
    assert COSTS.of(of_torch[1]).seconds == pytest.approx(COSTS.of(of_torch[0]).seconds * share, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "imbalance", "uneven"),
    [
        (1, 100.0, 1.0),
        (4, 1.2, 1.2),
        (4, 100.0, 4.0),
        # Two experts of each rank: of the 6 choices of a token 4 go elsewhere.
        (32, 100.0, 32 * 2 / 6),
    ],
)
def test_no_rank_gets_more_rows_than_there_are(ranks: int, imbalance: float, uneven: float) -> None:
    run = load_run("deepseek-v2-lite", [f"parallel.expert={ranks}", "training.micro_batch=1"])
    experts = routed_rows(run, imbalance)
    assert experts is not None
    assert experts.imbalance == pytest.approx(uneven)
    assert experts.rows == round(4096 * 6 * uneven)
