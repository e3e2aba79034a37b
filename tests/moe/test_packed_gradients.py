"""Gradients of the experts' outputs that are pushed in 8 bits: the numbers that are quantized on arrival else."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from penstock.base.errors import KernelError
from penstock.config.parallel import Dispatch
from penstock.kernels.float8 import recipes
from penstock.kernels.float8.expert_ffn import expert_ffn
from penstock.kernels.float8.gradient_side_channel import GradientSideChannel
from penstock.kernels.float8.operators import REFERENCE, Float8Operators, Float8Rule
from penstock.kernels.float8.quantized import row_bytes
from penstock.kernels.float8.recipes import BLOCKWISE, BLOCKWISE_SQUARE, E4M3, E5M2, MXFP8, Format, Recipe
from penstock.kernels.float8.reference import quantize_rows
from penstock.kernels.float8.triton_operators import TRITON
from penstock.kernels.tuning import target_of
from penstock.layout.grid import Grid
from penstock.moe.dispatch import symmetric
from penstock.moe.dispatch.contract import Dispatcher, DispatchMetadata, ExpertRows
from penstock.moe.layer import MoE
from penstock.moe.routing import Routing, Scope
from penstock.parallel.async_transfer import TransferStream
from penstock.parallel.axes import ALONE, Axes, Axis, make_axes
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import RecomputeRule
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers, allocate
from penstock.plan.op_recorder import OpRecorder
from tests.closeness import assert_equal, decibels
from tests.moe.mixture import make_layer, plain_moe
from tests.parallel.symmetric_ranks import run_ranks

D, F, EXPERTS, RANKS = 256, 128, 4, 2

READ = Float8Rule(dispatch=BLOCKWISE, experts=BLOCKWISE)


@dataclass(frozen=True)
class InSixteen:
    """A dispatcher whose gradients travel as they are."""

    inner: Dispatcher

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        rows, metadata = self.inner.dispatch(x_TD, routing)
        return replace(rows, gradients=None), metadata

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        return self.inner.combine(y_RD, metadata)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a layer runs."""

    rule: Float8Rule = READ
    tokens: int = 12
    dtype: torch.dtype = torch.float32
    bias: bool = False
    in_sixteen: bool = False  # gradients travel as they are
    recompute: tuple[str, ...] = ()
    leaves: bool = False  # transfers leave beside other work
    bound: float = 0  # of the row capacity; 0 has the host read how many rows there are
    passes: int = 1  # backward passes over the one graph

    @property
    def sizes(self) -> BufferSizes:
        width = D * self.dtype.itemsize
        return BufferSizes(tokens=self.tokens // RANKS, top_k=2, row_bytes=width, ranks=RANKS)


def axes_of(rank: int) -> Axes:
    expert = Axis(name="expert", ranks=tuple(range(RANKS)), rank=rank)
    grid = Grid(world=RANKS, expert=RANKS)
    return Axes(grid=grid, rank=rank, expert=expert, expert_node=replace(expert, name="expert_node"))


def layer_of(case: Case, buffers: SymmetricBuffers | None, device: torch.device) -> MoE:
    context = LayerContext(
        axes=ALONE if buffers is None else axes_of(buffers.peers.rank),
        float8=case.rule,
        dispatch=Dispatch(sync_free=2, row_capacity_factor=case.bound) if case.bound else Dispatch(),
        buffers=buffers,
        recompute=RecomputeRule(kinds=frozenset(case.recompute)),
        transfers=TransferStream(device) if case.leaves else None,
    )
    layer, expert = make_layer(plain_moe(EXPERTS, F, bias=case.bias), context, D), context.axes.expert
    generator = torch.Generator().manual_seed(1)
    for name, parameter in layer.named_parameters():  # values as the experts of one rank alone have them
        is_experts = name.startswith("experts")
        whole = torch.empty(EXPERTS, *parameter.shape[1:]) if is_experts else torch.empty(parameter.shape)
        nn.init.normal_(whole, std=whole.shape[-1] ** -0.5, generator=generator)
        parameter.data = whole.chunk(expert.size)[expert.rank] if is_experts else whole
    if case.in_sixteen:
        layer.dispatcher = InSixteen(layer.dispatcher)
    layer.experts.to(case.dtype)
    return layer.to(device)


def drawn(case: Case, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes_T1 = torch.randn(case.tokens, 1, generator=generator).exp()
    return (torch.randn(case.tokens, D, generator=generator) * sizes_T1).to(case.dtype)


def results_of(buffers: SymmetricBuffers | None, case: Case, device: torch.device) -> dict[str, Tensor]:
    """Output of a rank, and the gradients of all passes together."""
    place, ranks = (0, 1) if buffers is None else (buffers.peers.rank, RANKS)
    layer = layer_of(case, buffers, device)
    x_TD, dy_TD = (drawn(case, seed).chunk(ranks)[place].to(device) for seed in range(2))
    (y_TD,) = layer.layer_context.run("moe", layer, x_TD.requires_grad_(), Scope(), None)
    for left in reversed(range(case.passes)):
        y_TD.backward(dy_TD, retain_graph=left > 0)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y_TD.detach(), "x": x_TD.grad, **gradients}


CPU, META = torch.device("cpu"), torch.device("meta")
SIMULATED = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are simulated in Triton's interpreter")


def _solve(case: Case) -> list[dict[str, Tensor]]:
    found: list[dict[str, Tensor]] = run_ranks(results_of, case.sizes, case, CPU)
    return found


@contextmanager
def _pushed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.dtype, int]]]:
    seen, push_rows = [], symmetric.push_rows

    def note(rows_T: Tensor, *arguments: Any, **options: Any) -> None:
        seen.append((rows_T.dtype, rows_T.shape[1]))
        push_rows(rows_T, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(symmetric, "push_rows", note)
        yield seen


BYTES, PLAIN = (torch.uint8, row_bytes(D, BLOCKWISE)), (torch.float32, D)


PUSHED_BACK = {
    "same blocks": (Case(), BYTES),
    "squares": (Case(rule=replace(READ, experts=BLOCKWISE_SQUARE)), BYTES),
    "16 bits": (Case(rule=replace(READ, experts=None)), PLAIN),
    "other blocks": (Case(rule=replace(READ, experts=MXFP8)), PLAIN),
    "biases": (Case(bias=True), PLAIN),
    "beside other work": (Case(leaves=True), BYTES),
}


@SIMULATED
@pytest.mark.parametrize(("case", "back"), PUSHED_BACK.values(), ids=PUSHED_BACK)
def test_gradients_are_pushed_as_bytes_where_experts_quantize_them_so(
    case: Case, back: tuple[torch.dtype, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _pushed(monkeypatch) as seen:
        _solve(case)
    assert sorted(seen, key=str) == sorted([BYTES, back] * RANKS, key=str)


RECIPES = {
    "blockwise": (BLOCKWISE, E4M3),
    "e5m2": (BLOCKWISE, E5M2),
    "squares": (BLOCKWISE_SQUARE, E4M3),
    "mxfp8": (MXFP8, E4M3),
}


@SIMULATED
@pytest.mark.parametrize(
    ("recipe", "gradient", "operators"),
    [
        *(pytest.param(*given, REFERENCE, id=f"{name}-definition") for name, given in RECIPES.items()),
        # The kernels' own tests have three of these; interpreted they take long.
        *(
            pytest.param(*given, TRITON, id=f"{name}-triton", marks=[pytest.mark.slow] * (name != "squares"))
            for name, given in RECIPES.items()
        ),
    ],
)
def test_rows_of_gradients_are_those_that_are_quantized_on_arrival(
    recipe: Recipe, gradient: Format, operators: Float8Operators
) -> None:
    """So all that comes of them is equal; the gradient of down reads their columns, made of 8 bits instead of 16.

    Scales are powers of two, so only numbers that are small beside others of their columns are rounded twice.
    """
    dispatch = BLOCKWISE if recipe is BLOCKWISE_SQUARE else recipe
    case = Case(rule=Float8Rule(dispatch=dispatch, experts=recipe, gradient=gradient, operators=operators))
    for found, plain in zip(_solve(case), _solve(replace(case, in_sixteen=True)), strict=True):
        down, plain_down = found.pop("experts.down_eDF"), plain.pop("experts.down_eDF")
        assert_equal(found, plain)
        assert decibels(down, plain_down) > (22 if gradient is E4M3 else 17)


HOW = {
    "layer again": Case(recompute=("moe",)),
    "activation again": Case(recompute=("expert-activation",)),
    "beside other work": Case(leaves=True),
    "two passes": Case(passes=2),
    "two passes, layer again": Case(passes=2, recompute=("moe",)),
}


@SIMULATED
@pytest.mark.parametrize("case", HOW.values(), ids=HOW)
def test_experts_find_them_however_the_layer_runs(case: Case) -> None:
    for found, once in zip(_solve(case), _solve(Case()), strict=True):
        assert_equal(found, {name: one * (1 if name == "y" else case.passes) for name, one in once.items()})


@SIMULATED
def test_places_that_hold_nothing_may_hold_anything() -> None:
    """What is not written is NaN, in rows and in scales."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        found, once = _solve(Case(bound=2.0)), _solve(Case())
    finally:
        torch.use_deterministic_algorithms(before)
    assert_equal(found, once)


@SIMULATED
def test_ranks_that_push_gradients_in_8_bits_give_what_one_rank_gives() -> None:
    alone, found = results_of(None, Case(), CPU), _solve(Case())
    for name, whole in alone.items():
        if name.startswith("experts") or name in ("y", "x"):
            together = torch.cat([one[name] for one in found])
        else:
            together = torch.stack([one[name] for one in found]).sum(0)
        # A weight's gradient is contracted over rows, and which of them share a scale depends on their order.
        assert decibels(together, whole) > (25 if name.startswith("experts") else 60), name


def test_a_plan_counts_their_bytes() -> None:
    case = Case(rule=replace(READ, operators=TRITON), bound=2.0)
    memory = torch.empty(case.sizes.total_bytes, dtype=torch.uint8, device=META)
    buffers, pushed, tokens = SymmetricBuffers(case.sizes, memory, [0] * RANKS, 0), [], case.sizes.tokens
    for one in (case, replace(case, in_sixteen=True)):
        layer, tape = layer_of(one, buffers, META), OpRecorder()
        with tape:
            (y_TD,) = layer(torch.empty(tokens, D, device=META, requires_grad=True), Scope())
            y_TD.sum().backward()
        pushed.append([one.sizes[0] for one in tape.cut() if one.name == "push_rows_kernel"])
    packed, plain = (tokens * size for size in (row_bytes(D, BLOCKWISE), 4 * D))
    assert pushed == [[packed, packed], [packed, plain]]


# The side channel.


def test_a_side_channel_is_empty_once_its_gradient_was_taken() -> None:
    channel, rows = GradientSideChannel(), quantize_rows(torch.randn(2, D), BLOCKWISE, E4M3)
    assert channel.take() is None and not channel.is_expected
    channel.expect()
    channel.put(rows)
    assert channel.is_expected and channel.take() is rows and channel.take() is None


def _run_experts(channel: GradientSideChannel | None) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x_ND, matrices = torch.randn(6, D), (torch.randn(2, 2 * F, D), torch.randn(2, D, F))
    counts_e = torch.tensor([2, 3], dtype=torch.int32)
    return expert_ffn(x_ND.requires_grad_(), *matrices, counts_e, float8=READ, gradients=channel), x_ND


def test_experts_whose_side_channel_is_empty_read_the_gradient_of_autograd() -> None:
    (y_RD, x_ND), (plain_RD, plain_ND) = _run_experts(GradientSideChannel()), _run_experts(None)
    y_RD.square().sum().backward()
    plain_RD.square().sum().backward()
    assert torch.equal(x_ND.grad, plain_ND.grad)


def test_gradients_of_other_blocks_are_refused() -> None:
    channel = GradientSideChannel()
    y_RD, _ = _run_experts(channel)
    channel.put(quantize_rows(y_RD, MXFP8, E4M3))
    with pytest.raises(KernelError, match="rows in 8 bits must be those of the output's gradient"):
        y_RD.sum().backward()


def _on_a_gpu(rank: int, folder: Path, case: Case) -> None:
    """On a rank: gradients pushed as they are, then in 8 bits, the second time beside what leaves the stream."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS, device_id=device)
    buffers = allocate(case.sizes, make_axes(Grid(world=RANKS, expert=RANKS)).expert, device)
    cases = replace(case, in_sixteen=True), case, replace(case, leaves=True)
    found = [results_of(buffers, one, device) for one in cases]
    buffers.check()
    torch.save([{name: tensor.cpu() for name, tensor in one.items()} for one in found], folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
@pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE, MXFP8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("bound", [0.0, 2.0], ids=["counted", "bounded"])
def test_on_gpus_rows_of_gradients_are_those_that_are_quantized_on_arrival(
    tmp_path: Path, recipe: Recipe, gradient: str, bound: float
) -> None:
    target = target_of(torch.device("cuda", 0))
    if problem := recipes.obstacle(recipe, target):
        pytest.skip(problem)
    rule = Float8Rule(
        dispatch=BLOCKWISE if recipe is BLOCKWISE_SQUARE else recipe,
        experts=recipe,
        forward=recipes.format_on("e4m3", target),
        gradient=recipes.format_on(gradient, target),
        operators=TRITON,
    )
    case = Case(rule=rule, tokens=3000, dtype=torch.bfloat16, bound=bound)
    # Not the tests' own ranks, which are forks: CUDA does not survive one.
    start_processes(_on_a_gpu, (tmp_path, case), nprocs=RANKS, start_method="spawn")
    for rank in range(RANKS):
        plain, *packed = torch.load(tmp_path / f"{rank}.pt")
        for found in packed:
            assert decibels(found.pop("experts.down_eDF"), plain["experts.down_eDF"]) > 40
            assert_equal(found, {name: plain[name] for name in found})
