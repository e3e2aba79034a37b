"""Matrices and embeddings of which ranks hold parts give what whole ones give."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.config.fit import grid_of
from penstock.layout.grid import Grid
from penstock.layout.sharding import Cut
from penstock.models.block import FeedForward
from penstock.models.build import build_model
from penstock.models.linear import Embedding, Linear, cut_over, look_up_into
from penstock.models.parameters import initialize, param_shards
from penstock.models.rank_model import build_rank
from penstock.parallel.async_transfer import WeightGradStore
from penstock.parallel.axes import ALONE, Axis, make_axes
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import recomputed
from penstock.parallel.shard import by_rows, own_rows
from tests.closeness import assert_close, assert_equal
from tests.distributed.pool import Pool
from tests.models.families import ATTENTIONS, moe_with, tiny_decoder, tiny_model
from tests.models.layouts import CPU, LAYOUTS, MODELS, V3, every_rank_model, laid_out, part_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

B, S, D, V = 2, 8, 6, 12
INPUTS, OUTPUTS = 8, 16


def _layer_context(rank: int, size: int) -> LayerContext:
    """A rank that is alone but believes that it is one of several: good for everything but talking."""
    axis = Axis(name="tensor", ranks=tuple(range(size)), rank=rank)
    return LayerContext(axes=replace(ALONE, tensor=axis))


def _whole(rows: int, columns: int, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _fill(parameter: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def test_unsharded_and_blockwise_parameters_have_their_cuts() -> None:
    part = Linear(INPUTS, OUTPUTS, _layer_context(1, 2), split="outputs", blocks=2)
    assert part.cuts == {"weight": (Cut(0, 1, 2, blocks=2),)} and part.weight.shape == (OUTPUTS // 2, INPUTS)
    for layer_context in (LayerContext(), _layer_context(1, 2)):
        matrix = Linear(INPUTS, OUTPUTS, layer_context)
        assert matrix.cuts == {"weight": ()} and matrix.weight.shape == (OUTPUTS, INPUTS)
    assert Linear(INPUTS, OUTPUTS, LayerContext(), split="outputs").cuts == {"weight": ()}
    assert Embedding(V, D, LayerContext()).cuts == {"weight": ()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_and_row_parallel_products_with_biases_equal_whole_ones(size: int) -> None:
    by_outputs, by_inputs = _whole(OUTPUTS, INPUTS), _whole(INPUTS, OUTPUTS)
    first_O, second_I, x = torch.randn(OUTPUTS), torch.randn(INPUTS), torch.randn(3, INPUTS)
    summands = []
    for rank in range(size):
        context = _layer_context(rank, size)
        first = Linear(INPUTS, OUTPUTS, context, split="outputs", bias=True)
        second = Linear(OUTPUTS, INPUTS, context, split="inputs", bias=True)
        assert first.cuts["bias"] == first.cuts["weight"] == cut_over(context.axes.tensor, dim=0)
        assert (second.cuts["weight"], second.cuts["bias"]) == (cut_over(context.axes.tensor, dim=1), ())
        _fill(first.weight, by_outputs.chunk(size)[rank])
        _fill(second.weight, by_inputs.chunk(size, dim=1)[rank])
        _fill(first.bias, first_O.chunk(size)[rank])
        _fill(second.bias, second_I)
        summands.append(second(first(x)))
    found = second.shifted(torch.stack(summands).sum(0))
    assert_close(found, F.linear(F.linear(x, by_outputs, first_O), by_inputs, second_I))


def _matrix_and_input(
    dtype: torch.dtype, store: WeightGradStore | None = None, *, bias: bool = False
) -> tuple[Linear, Tensor]:
    matrix = Linear(INPUTS, OUTPUTS, LayerContext(weight_grads=store), bias=bias).to(dtype)
    _fill(matrix.weight, _whole(OUTPUTS, INPUTS))
    if bias:
        _fill(matrix.bias, _whole(1, OUTPUTS, seed=7)[0])
    return matrix, torch.randn(2, 3, INPUTS, generator=torch.Generator().manual_seed(5)).to(dtype)


def _passes(matrix: Linear, x: Tensor, count: int = 2) -> tuple[Tensor, Tensor]:
    """Output, and gradient of the input, of the last of some passes."""
    for _ in range(count):
        x = x.detach().requires_grad_()
        y = matrix(x)
        y.square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_gradient_is_the_same_by_autograd_in_a_buffer_and_deferred(dtype: torch.dtype, bias: bool) -> None:
    store = WeightGradStore()
    matrix, x = _matrix_and_input(dtype, store, bias=bias)
    expected = _passes(matrix, x)
    by_autograd = [parameter.grad for parameter in matrix.parameters()]
    matrix.zero_grad()
    with store.collecting() as work:
        assert_equal(_passes(matrix, x), expected)
    assert matrix.weight.grad is None, "nothing yet"
    for task in work:
        task()
    assert_close([parameter.grad for parameter in matrix.parameters()], by_autograd)

    matrix.zero_grad()
    matrix.main_grad = torch.ones(OUTPUTS, INPUTS)
    assert_equal(_passes(matrix, x, 1), expected)
    with store.collecting() as work:
        assert_equal(_passes(matrix, x, 1), expected)
    work.pop()()
    assert not work and matrix.weight.grad is None
    exact = 2 * (2 * expected[0].double().flatten(0, 1).to(dtype)).double().T @ x.double().flatten(0, 1)
    # Not bit for bit: some CPUs start the second product's sums from the buffer.
    assert_close(matrix.main_grad.double(), 1.0 + exact, tolerance=1e-6)
    if bias:
        assert_close(matrix.bias.grad, by_autograd[1])


def test_a_weight_may_have_a_buffer_and_a_gradient_by_autograd() -> None:
    """As a tied output projection, or a float32 parameter whose gradient is the buffer itself."""
    matrix, x = _matrix_and_input(torch.float32)
    matrix.weight.grad = matrix.main_grad = torch.zeros(OUTPUTS, INPUTS)
    (matrix(x).sum() + matrix.weight.square().sum()).backward()
    assert matrix.weight.grad is matrix.main_grad
    expected = torch.ones(OUTPUTS, 6) @ x.flatten(0, 1) + 2 * matrix.weight.detach()
    assert_close(matrix.main_grad, expected)


def test_a_replay_of_a_network_makes_no_last_product_and_adds_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    network, products, real = FeedForward(D, OUTPUTS, LayerContext()), [0], torch.mm

    def counting(*operands: Tensor, **more: Tensor) -> Tensor:
        products[0] += 1
        return real(*operands, **more)

    monkeypatch.setattr(torch, "mm", counting)
    found = []
    for run in (network, partial(recomputed, network)):
        for matrix in (network.gate_up, network.down):
            matrix.main_grad = torch.zeros_like(matrix.weight)
        x_TD, products[0] = _direction().flatten(0, 1).requires_grad_(), 0
        run(x_TD).square().sum().backward()
        found.append((x_TD.grad, network.gate_up.main_grad, network.down.main_grad))
        assert products[0] == (2 if run is network else 3), "of forward, and of a replay the first alone"
    assert_equal(*found)
    assert all(gradient.any() for gradient in found[0])


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


@pytest.mark.parametrize("device", DEVICES)
def test_a_look_up_adds_each_tokens_gradient_to_its_row(device: str) -> None:
    tokens_BS = torch.tensor([[3, 1, 3], [0, 3, V - 1]], device=device)
    weight_VD = _whole(V, D).bfloat16().to(device).requires_grad_()
    gradient_BSD = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(6)).bfloat16().to(device)
    total_VD = torch.ones(V, D, device=device)
    x_BSD = look_up_into(total_VD, tokens_BS, weight_VD)
    assert torch.equal(x_BSD, F.embedding(tokens_BS, weight_VD))
    x_BSD.backward(gradient_BSD)
    exact_VD = torch.ones(V, D, dtype=torch.float64, device=device)
    exact_VD.index_add_(0, tokens_BS.flatten(), gradient_BSD.double().flatten(0, 1))
    assert_close(total_VD.double(), exact_VD, tolerance=1e-6)
    assert weight_VD.grad is None


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_embedding_adds_to_its_sum_the_same_bits_each_time() -> None:
    embed = Embedding(V, D, LayerContext()).cuda()
    found = []
    for _ in range(2):
        embed.main_grad = torch.zeros(V, D, device="cuda")
        tokens_BS = torch.randint(V, (8, 512), generator=torch.Generator().manual_seed(7)).cuda()
        (embed(tokens_BS) * torch.linspace(-1, 1, 512, device="cuda")[:, None]).sum().backward()
        found.append(embed.main_grad)
    assert embed.weight.grad is None
    assert found[0].any()
    assert torch.equal(*found)


def _tokens() -> Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(2))


def _direction() -> Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(3))


def _embedded(size: int) -> tuple[Tensor, Tensor]:
    """Our positions' embeddings, and the gradient of our range of the vocabulary."""
    axes = make_axes(Grid(world=size, tensor=size))
    embed = Embedding(V, D, LayerContext(axes=axes))
    _fill(embed.weight, _whole(V, D).chunk(size)[axes.rank])
    x_BSD = embed(_tokens())
    (x_BSD * _direction().chunk(size, dim=1)[axes.rank]).sum().backward()
    return x_BSD.detach(), embed.weight.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_embedding_over_ranks_gives_each_its_positions_of_the_whole_one(size: int, ranks: Pool) -> None:
    weight = _whole(V, D).requires_grad_()
    expected_BSD = F.embedding(_tokens(), weight)
    (expected_BSD * _direction()).sum().backward()
    found = ranks.run(size, _embedded, size)
    assert_close(torch.cat([x_BSD for x_BSD, _ in found], dim=1), expected_BSD.detach())
    assert_close(torch.cat([gradient for _, gradient in found]), weight.grad)


def _fed_forward(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Our tokens' outputs, and gradients of them and of both matrices."""
    axes = make_axes(Grid(world=size, tensor=size))
    network = FeedForward(D, OUTPUTS, LayerContext(axes=axes))
    gate, up = (half.chunk(size)[axes.rank] for half in _whole(2 * OUTPUTS, D).chunk(2))
    _fill(network.gate_up.weight, torch.cat((gate, up)))
    _fill(network.down.weight, _whole(D, OUTPUTS, seed=4).chunk(size, dim=1)[axes.rank])
    x_TD = _direction().flatten(0, 1).chunk(size)[axes.rank].requires_grad_()
    y_TD = network(x_TD)
    y_TD.square().sum().backward()
    return y_TD.detach(), x_TD.grad, network.gate_up.weight.grad, network.down.weight.grad


def test_a_network_over_ranks_gives_each_its_tokens_of_the_whole_one(ranks: Pool) -> None:
    x_TD = _direction().flatten(0, 1).requires_grad_()
    gate_up = _whole(2 * OUTPUTS, D).requires_grad_()
    down = _whole(D, OUTPUTS, seed=4).requires_grad_()
    gate, up = F.linear(x_TD, gate_up).chunk(2, dim=-1)
    expected = F.linear(F.silu(gate) * up, down)
    expected.square().sum().backward()
    found = ranks.run(2, _fed_forward, 2)
    outputs, inputs, gate_ups, downs = zip(*found, strict=True)
    assert_close(torch.cat(outputs), expected.detach(), tolerance=1e-5)
    assert_close(torch.cat(inputs), x_TD.grad, tolerance=1e-4)
    both = zip(*(gradient.chunk(2) for gradient in gate_ups), strict=True)
    assert_close(torch.cat([part for half in both for part in half]), gate_up.grad, tolerance=1e-4)
    assert_close(torch.cat(downs, dim=1), down.grad, tolerance=1e-4)


@pytest.mark.often("*-everything", "v3-*", "grouped queries-tensor")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_shards_have_the_values_of_the_whole_model(model: str, layout: str) -> None:
    # bfloat16 where ranks round their own parts.
    run, world = laid_out(MODELS[model], layout, "bf16" if layout.startswith("experts") else "fp32")
    whole = dict(build_model(run, CPU).named_parameters())
    for rank_model in every_rank_model(run, world, CPU):
        for holding in param_shards(rank_model.modules, rank_model.axes):
            expected = part_of(whole[holding.name].detach(), holding)
            assert holding.parameter.dtype == expected.dtype
            assert torch.equal(holding.parameter, expected), f"{holding.name} on rank {rank_model.axes.rank}"


def test_norms_start_with_one_biases_and_buffers_with_zero_and_all_else_is_drawn() -> None:
    decoder = build_model(laid_out(V3, "one rank")[0], CPU)
    for buffer in decoder.buffers():
        buffer.fill_(7)
    initialize(decoder, seed=1, std=0.05)
    assert all(not buffer.any() for buffer in decoder.buffers())
    embed = decoder.get_parameter("embed.weight")
    assert (embed.std().item(), embed.mean().item()) == (pytest.approx(0.05, rel=0.1), pytest.approx(0.0, abs=0.005))
    one, other = (decoder.get_parameter(f"blocks.{layer}.attention.out.weight") for layer in (1, 2))
    assert not torch.equal(one, other)
    for family in ("gpt-oss", "qwen3", "olmoe"):
        decoder = tiny_decoder(tiny_model(family="plain", attention=ATTENTIONS[family]))
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                assert (parameter == 1).all(), name
            elif ".attention." in name:
                assert parameter.any() != name.endswith(".bias"), name
        assert family != "gpt-oss" or all(block.attention.sinks_H.all() for block in decoder.blocks.values())


def _sharded(layout: str) -> list[tuple[str, tuple[int, int], Tensor]]:
    """Name, rows and values of what a rank holds under FSDP."""
    run, world = laid_out(V3, layout, "bf16")
    run = run.model_copy(update={"parallel": run.parallel.model_copy(update={"shard": "full"})})
    model = build_rank(run, make_axes(grid_of(run, world)), CPU)
    return [(one.name, *own_rows(one.parameter)[::-1]) for one in param_shards(model.modules, model.axes)]


def test_rows_that_data_parallel_ranks_divide_have_the_values_of_the_whole_in_float32(ranks: Pool) -> None:
    run, world = laid_out(V3, "data")
    whole = dict(build_model(run, CPU).named_parameters())
    for held in ranks.run(world, _sharded, "data"):
        assert {name for name, _, _ in held} == whole.keys()
        for name, rows, values in held:
            assert values.dtype == torch.float32
            assert torch.equal(values, by_rows(whole[name])[slice(*rows)]), name


def test_experts_are_drawn_one_by_one_whatever_their_number() -> None:
    models = [moe_with(tiny_model("deepseek-v2"), experts=count) for count in (4, 8)]
    few, many = (tiny_decoder(one).get_parameter("blocks.1.ffn.experts.gate_up_eFD") for one in models)
    assert torch.equal(few, many[:4])
    assert not torch.equal(many[0], many[1])
