"""The cost of a recorded operator."""

from dataclasses import replace
from functools import partial
from math import prod

import pytest

from penstock.config.load import load_run
from penstock.kernels.bounded_attention import noted
from penstock.plan.costs import OpCosts, RoutedRows, buffer_rows, routed_rows
from penstock.plan.hardware import RankGroup
from penstock.plan.hardware_file import load_hardware, parse_cluster
from penstock.plan.meta_run import UpdateOps
from penstock.plan.op_recorder import RecordedOp
from penstock.plan.rates import Estimate, Pass, Rates, TokenTraffic, TransferTimes
from penstock.plan.step_time import StageTimer

H200 = load_hardware("H200")
RATES, TRANSFERS = Rates(H200), TransferTimes(H200)
TRAVEL = TokenTraffic(tokens=1024, copy_bytes=1024, experts=8, top_k=2)
EXPERTS = RoutedRows(traffic=TRAVEL, ranks=4, rows=2048, imbalance=1.0)
COSTS = OpCosts(H200, EXPERTS, buffers=frozenset({4096}))
BANDWIDTH = H200.peaks.memory_bytes_per_second * H200.efficiency.memory


def of_bf16(name: str, *shapes: tuple[int, ...], switches: tuple[str, ...] = ()) -> RecordedOp:
    sizes = tuple(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)
    return RecordedOp(name, shapes, sizes, 2, switches)


def experts_product(name: str, *shapes: tuple[int, ...], switches: tuple[str, ...] = (), size: int = 2) -> RecordedOp:
    return RecordedOp(name, shapes, (size,) * len(shapes), size, switches)


in_8_bits = partial(experts_product, size=1)
GROUP = RankGroup(4, 4)
ROWS = (4096, 512), (8, 1024, 512), (4096, 1024)
WEIGHTS = (4096, 1024), (4096, 512), (8, 1024, 512)
WEIGHTS_IN_8 = (1024, 5120), (512, 5120), (8, 1024, 512)
HEADS = (2, 16, 1024, 192), (2, 16, 1024, 192), (2, 16, 1024, 128)
ATTENTION = "_scaled_dot_product_cudnn_attention"
SUM = "weight_gradient_accumulated"
# Experts compute the 2,048 rows that arrive, whatever the capacity.
GROUPED, SIZES = RATES.grouped, (8, 256, 1024, 512)
SENT = RecordedOp("push_rows_kernel", ((1024, 256), (1024, 2), (4,)), (1024 * 1024, 8192, 32), 4)
KNOWN = [
    (of_bf16("mm", (4096, 2048), (2048, 1024), (4096, 1024)), RATES.product(4096, 1024, 2048), "products"),
    (experts_product("rows_kernel", *ROWS), GROUPED("forward", *SIZES), "experts"),
    (
        experts_product("rows_kernel", (4096, 1024), (8, 1024, 512), (4096, 512), switches=("DEPTH_FIRST",)),
        GROUPED("input_gradient", *SIZES),
        "experts",
    ),
    (experts_product("weights_kernel", *WEIGHTS, switches=("ACCUMULATE",)), GROUPED(SUM, *SIZES), "experts"),
    (
        experts_product("_grouped_mm", (4096, 512), (8, 512, 1024), (8,), (4096, 1024)),
        GROUPED("forward", *SIZES),
        "experts",
    ),
    (in_8_bits("float8_rows_kernel", *ROWS), GROUPED("forward", *SIZES, "fp8"), "experts"),
    (
        in_8_bits("float8_rows_kernel", *ROWS, switches=("GATHER",)),
        GROUPED("forward_gathered", *SIZES, "fp8"),
        "experts",
    ),
    (
        in_8_bits("float8_matrices_kernel", *WEIGHTS_IN_8, switches=("ACCUMULATE",)),
        GROUPED(SUM, *SIZES, "fp8"),
        "experts",
    ),
    (
        in_8_bits("float8_matrices_kernel", (8192, 2048), (4096, 2048), (1, 8192, 4096)),
        RATES.product(8192, 4096, 2048, "fp8"),
        "products",
    ),
    (experts_product(ATTENTION, *HEADS), RATES.attention("forward", 32, 1024, 1024, (192, 128)), "attention"),
    (
        experts_product(f"{ATTENTION}_backward", (2, 16, 1024, 128), *HEADS, (2, 16, 1024, 128)),
        RATES.attention("backward", 32, 1024, 1024, (192, 128)),
        "attention",
    ),
    (
        RecordedOp("alltoall_base_", ((8,), (8,)), (3_000_000, 4_000_000), 2, group=GROUP),
        TRANSFERS.collective("all-to-all", 4e6, GROUP),
        "dispatch",
    ),
    (
        RecordedOp("_reduce_scatter_base_", ((8,), (32,)), (1_000_000, 4_000_000), 4, group=GROUP),
        TRANSFERS.collective("reduce-scatter", 4e6, GROUP),
        "exchange",
    ),
    (SENT, TRANSFERS.dispatch("symmetric", "dispatch", TRAVEL, GROUP), "dispatch"),
]


@pytest.mark.parametrize(("operator", "estimate", "term"), KNOWN)
def test_an_operator_takes_what_rates_and_transfers_say(operator: RecordedOp, estimate: Estimate, term: str) -> None:
    cost = COSTS.of(operator)
    assert cost.seconds == pytest.approx(estimate.seconds)
    assert cost[1:] == (term, term in ("dispatch", "exchange"), 1)


CHOSEN = (128, 1, 8192, 512), (1, 8192, 128, 64), (1, 8192, 512), (1, 8192, 64), (1, 8192, 2048), (1, 8192)
PAIRS = 8192 * 2048 * (1 - 2048 / 16384)  # of a query and a key


@pytest.mark.parametrize(
    ("operator", "direction", "flops"),  # over the speed beside that of dense attention
    [
        (of_bf16("sparse_forward_kernel", *CHOSEN), "forward", 2 * 128 * 1088 * PAIRS / 0.76),
        (
            of_bf16("sparse_key_backward_kernel", *CHOSEN[:1] * 2, *CHOSEN[4:], *[(8192, 128, 2048)] * 2, CHOSEN[2]),
            "backward",
            2 * 128 * 2 * 512 * PAIRS / 0.55,
        ),
        (
            of_bf16("index_scores_kernel", (1, 8192, 64, 128), *CHOSEN[2:4], (1, 8192), (1, 1024, 4096)),
            "forward",
            2 * 64 * 128 * 1024 * 4096 / 0.9,
        ),
    ],
)
def test_a_kernel_of_sparse_attention_takes_the_time_of_its_chosen_pairs(
    operator: RecordedOp, direction: Pass, flops: float
) -> None:
    share = dict(H200.efficiency)[f"attention_{direction}"]
    assert COSTS.of(operator).seconds == pytest.approx(flops / (H200.peaks.bf16 * share))
    assert COSTS.of(operator).term == "attention"


def test_gradients_of_chosen_keys_take_the_time_of_their_additions_if_heads_are_few() -> None:
    def seconds(heads: int) -> float:
        q, p = (heads, 1, 8192, 512), (8192, heads, 2048)
        return COSTS.of(of_bf16("sparse_key_backward_kernel", q, q, *CHOSEN[4:], p, p, CHOSEN[2])).seconds

    assert seconds(32) == seconds(16) == pytest.approx(4 * 512 * PAIRS / (0.45 * BANDWIDTH))
    assert seconds(256) == pytest.approx(2 * seconds(128))


@pytest.mark.parametrize(
    ("operator", "moved"),
    [
        (of_bf16("swiglu_kernel", (1000, 2000), (1000, 1000)), 6e6),
        (of_bf16("add_", (1000, 2000), (1000, 2000)), 12e6),  # In place: read and written.
        (of_bf16("sum_rows_kernel", (4096, 512), (512, 512)), 2 * 512 * (2048 + 512)),  # Without the empty rows.
    ],
)
def test_a_kernel_that_computes_little_takes_the_time_of_its_bytes(operator: RecordedOp, moved: float) -> None:
    assert COSTS.of(operator).seconds == pytest.approx(H200.host.kernel_seconds + moved / BANDWIDTH)


def test_the_loss_reads_logits_once_for_their_sum_and_their_gradient_in_8_bits_is_written_once() -> None:
    def seconds(name: str, *switches: str) -> float:
        cost = COSTS.of(RecordedOp(name, ((2048, 102400), (2048,)), (1 << 30, 1 << 15), 2, switches))
        assert cost.term == "loss"
        return cost.seconds - H200.host.kernel_seconds

    both, sums, gradients = (
        seconds("linear_cross_entropy_kernel", *switches)
        for switches in (("STATISTICS", "GRADIENT"), ("STATISTICS",), ("GRADIENT",))
    )
    assert both == pytest.approx(sums + gradients) and both / sums == pytest.approx(3.4, rel=1e-3)
    # Two copies in 8 bits are as large as the logits.
    copies = (1 << 29, 1 << 22) * 2
    shapes = (2048, 102400), (2048,), *((102400, 2048), (16, 102400)) * 2
    fused = COSTS.of(RecordedOp("logits_gradient_kernel", shapes, (1 << 30, 1 << 15, *copies), 2))
    assert fused.term == "loss" and fused.seconds / sums == pytest.approx(2, rel=0.02)


def test_the_optimizer_has_a_rate_of_its_own_and_a_storage_that_is_set_takes_no_time() -> None:
    cost = COSTS.of(RecordedOp("_foreach_norm", ((1000, 1000),), (4_000_000,), 4))
    rate = H200.peaks.memory_bytes_per_second * H200.efficiency.optimizer
    assert cost.seconds == pytest.approx(H200.host.kernel_seconds + 4e6 / rate)
    assert cost.term == "optimizer"
    assert COSTS.of(RecordedOp("set_", ((1 << 20,), (1 << 20,)), (1 << 21, 1 << 21), 2)).seconds == 0


def test_our_update_moves_more_bytes_in_a_second_than_torchs_operators_but_with_codes_fewer() -> None:
    def seconds(name: str, *switches: str) -> float:
        return COSTS.of(RecordedOp(name, ((1 << 30,),), (1 << 30,), 1, switches)).seconds

    plain, codes = seconds("adamw_kernel"), seconds("adamw_kernel", "CODES")
    assert plain < seconds("_foreach_norm") < codes


def test_a_product_with_the_own_transpose_costs_more_than_half_of_the_product_on_a_gpu() -> None:
    matrices, squares = (64, 1408, 2048), (64, 1408, 1408)
    sizes = 2 * prod(matrices), 2 * prod(squares)
    half = COSTS.of(RecordedOp("gram_kernel", (matrices, squares), sizes, 2)).seconds
    whole = COSTS.of(RecordedOp("bmm", (matrices, (64, 2048, 1408)), (sizes[0],) * 2, 2)).seconds
    assert 0.55 < half / whole < 0.8


def test_more_rows_an_uneven_load_and_a_mask_cost_more_and_8_bits_less() -> None:
    crowded = OpCosts(H200, replace(EXPERTS, rows=9999), buffers=frozenset({4096}))
    rows = experts_product("rows_kernel", *ROWS)
    assert crowded.of(rows).seconds > COSTS.of(rows).seconds
    uneven = OpCosts(H200, replace(EXPERTS, imbalance=2.0), buffers=frozenset({4096}))
    assert uneven.of(SENT).seconds > COSTS.of(SENT).seconds
    causal, masked = experts_product(ATTENTION, *HEADS), experts_product(ATTENTION, *HEADS, (2, 1, 1024, 1024))
    assert COSTS.of(masked).seconds > 3 * COSTS.of(causal).seconds
    other = experts_product("_scaled_dot_product_efficient_attention", *HEADS, (2, 1, 1024, 1024))
    assert COSTS.of(other).seconds > 2 * COSTS.of(masked).seconds
    assert RATES.product(8192, 4096, 2048, "fp8").seconds < 0.7 * RATES.product(8192, 4096, 2048).seconds


def test_a_weight_gradient_of_few_rows_takes_as_long_as_its_sum_moves() -> None:
    shapes = ((8192, 8192), (8192, 16), (16, 8192))
    few = RecordedOp("addmm", shapes, (4 * 8192**2, 2 * 8192 * 16, 2 * 16 * 8192), 4)
    assert COSTS.of(few).seconds == pytest.approx(8 * 8192**2 / BANDWIDTH)
    shapes = ((2048, 2048), (2048, 65536), (65536, 2048))
    many = RecordedOp("addmm", shapes, (4 * 2048**2, 2 * 2048 * 65536, 2 * 2048 * 65536), 4)
    assert COSTS.of(many).seconds == RATES.product(2048, 2048, 65536).seconds


def test_a_batch_of_small_products_takes_the_time_of_its_bytes() -> None:
    shapes = (1 << 20, 1, 16), (1 << 20, 16, 16), (1 << 20, 1, 16)  # by chunks of a linear attention in PyTorch
    operator = RecordedOp("bmm", shapes, tuple(4 * prod(shape) for shape in shapes), 4)
    assert COSTS.of(operator).seconds == pytest.approx(sum(operator.sizes) / BANDWIDTH, rel=0.01)
    whole = RecordedOp("bmm", ((8, 2048, 2048),) * 3, (2 * 8 * 2048 * 2048,) * 3, 2)
    assert COSTS.of(whole).seconds == pytest.approx(RATES.product(8 * 2048, 2048, 2048).seconds)


def test_the_room_is_that_of_the_rows_of_the_experts_kernels() -> None:
    work = (of_bf16("mm", (9999, 8), (8, 8)), experts_product("rows_kernel", (64, 8), (2, 8, 8), (80, 8)))
    assert buffer_rows((work,)) == {80}
    in_8 = in_8_bits("float8_rows_kernel", (300, 512), (8, 1024, 512), (4096, 1024))
    assert buffer_rows(((in_8,),)) == {4096} and buffer_rows(()) == frozenset()


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


def test_attention_between_bounds_takes_as_long_as_the_pairs_that_are_seen() -> None:
    row = (2, 16384, 16, 192), (2, 16384, 16, 192), (2, 16384, 16, 128)
    names = "attention_kernel", "attention_query_gradient_kernel", "attention_key_gradient_kernel"
    by_most = {
        most: [COSTS.of(experts_product(name, *row, switches=(noted(most),))).seconds for name in names]
        for most in (16384, 8192, 128)
    }
    sizes = 32, 16384, 16384, (192, 128)
    plain = [RATES.attention(direction, *sizes).seconds for direction in ("forward", "backward")]
    assert plain[0] < by_most[16384][0] < 2 * plain[0] and plain[1] < sum(by_most[16384][1:]) < 3 * plain[1]
    for whole, half, window in zip(*by_most.values(), strict=True):
        assert half / whole == pytest.approx(0.75, abs=0.01)  # of the triangle, the half that is nearest
        assert window / whole == pytest.approx((128 + 96) / 8192, rel=0.02)


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


def test_a_part_of_the_state_with_as_many_rows_as_a_buffer_is_updated_whole() -> None:
    room, run = 1 << 24, load_run("deepseek-v2-lite", ["parallel.expert=8", "dispatch.sync_free=2"])
    zero = (RecordedOp("_foreach_zero_", ((room,),), (4 * room,), 4),)
    update = UpdateOps(zero=zero)
    work = (experts_product("rows_kernel", (64, 8), (2, 8, 8), (room, 8)),)
    timers = (StageTimer(run, parse_cluster("8xH100"), 1.2, works) for works in ((), (work,)))
    with_buffer, without = (timer.update(update)[1].seconds for timer in timers)
    assert with_buffer == without
