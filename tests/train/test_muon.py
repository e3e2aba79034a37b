"""Muon: the definition in float64, PyTorch's own, and what it is not applied to."""

import math

import pytest
import torch
from torch import Tensor, nn

from penstock.config.load import load_run
from penstock.config.run import Muon as Settings
from penstock.config.run import Optimizer
from penstock.kernels.gram import COEFFICIENTS, orthogonalize
from penstock.layout.sharding import Matrices
from penstock.models.build import meta_model
from penstock.models.parameters import param_shards
from penstock.parallel.axes import ALONE, Axis
from penstock.parallel.shard import ParamShard
from penstock.train import muon
from penstock.train.optimizer import MasterAdamW
from tests.closeness import assert_close

EXACT = Optimizer(learning_rate=0.01, weight_decay=0.1, method="muon", muon=Settings(precision="fp32"))
SHAPES = {"tall": (24, 10), "wide": (7, 33), "experts": (3, 12, 8)}
BLOCKS = {"tall": 1, "wide": 1, "experts": 2}
RATES = (0.02, 0.01, 0.03)


def _seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weights(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(_seeded(*shape, seed=9).to(dtype)) for name, shape in SHAPES.items()}


def _optimizer(weights: dict[str, nn.Parameter], settings: Optimizer) -> MasterAdamW:
    data = Axis(name="dense_data")
    shards = [
        ParamShard(
            name=name,
            parameter=one,
            shape=tuple(one.shape),
            cuts=(),
            data=data,
            matrices=Matrices(tuple(one.shape), BLOCKS[name]),
        )
        for name, one in weights.items()
    ]
    return MasterAdamW(shards, settings)


def _steps(settings: Optimizer, dtype: torch.dtype = torch.float32, divisor: float = 1.0) -> dict[str, Tensor]:
    """State after a few steps."""
    weights = _weights(dtype)
    optimizer = _optimizer(weights, settings)
    for step, rate in enumerate(RATES):
        for name, shape in SHAPES.items():
            optimizer.gradient_of(name).copy_(_seeded(*shape, seed=step))
        optimizer.step(rate, divisor)
        assert not any(optimizer.gradient_of(name).any() for name in SHAPES)
    return {name: part.decoded().tensor for name, part in optimizer.parts().items()}


def _matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices of a parameter: gate and up of an expert are two."""
    return [one for member in tensor.view(-1, *tensor.shape[-2:]) for one in member.chunk(BLOCKS[name])]


def _by_definition(matrix: Tensor, gradients: list[Tensor], settings: Optimizer, divisor: float) -> Tensor:
    """A matrix after the steps, in float64, by singular values instead of products."""
    weight, momentum = matrix.double(), torch.zeros_like(matrix, dtype=torch.float64)
    one = settings.muon
    for rate, gradient in zip(RATES, gradients, strict=True):
        scaled = gradient.double() / divisor
        momentum = one.momentum * momentum + (1 - one.momentum) * scaled
        direction = one.momentum * momentum + (1 - one.momentum) * scaled if one.nesterov else momentum
        u, s, vh = torch.linalg.svd(direction, full_matrices=False)
        s = s / s.square().sum().sqrt()
        a, b, c = COEFFICIENTS
        for _ in range(one.iterations):
            s = a * s + b * s**3 + c * s**5
        weight -= rate * (settings.weight_decay * weight + one.update_rms * math.sqrt(max(matrix.shape)) * (u * s) @ vh)
    return weight


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("is_fused", [False, True])
def test_steps_are_those_of_the_definition(nesterov: bool, is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_is_fused", lambda _: is_fused)  # PyTorch's kernels for lists, as on GPUs
    settings = EXACT.model_copy(update={"muon": Settings(precision="fp32", nesterov=nesterov)})
    state = _steps(settings, divisor=2.0)
    for name, weight in _weights().items():
        gradients = [_matrices(name, _seeded(*SHAPES[name], seed=step)) for step in range(len(RATES))]
        for place, (start, got) in enumerate(
            zip(_matrices(name, weight.detach()), _matrices(name, state[f"model.{name}"]), strict=True)
        ):
            expected = _by_definition(start, [one[place] for one in gradients], settings, 2.0)
            assert_close(got, expected, same_dtype=False, tolerance=1e-5, what=f"{name} {place}")


@pytest.mark.parametrize("name", ["tall", "wide"])
def test_a_matrix_is_updated_as_by_torch(name: str) -> None:
    state = _steps(EXACT.model_copy(update={"muon": Settings()}))
    parameter = _weights()[name]
    theirs = torch.optim.Muon([parameter], weight_decay=EXACT.weight_decay, adjust_lr_fn="match_rms_adamw")
    for step, rate in enumerate(RATES):
        parameter.grad = _seeded(*SHAPES[name], seed=step)
        theirs.param_groups[0]["lr"] = rate
        theirs.step()
    change = (parameter.detach() - _weights()[name]).norm()
    assert (state[f"model.{name}"] - parameter).norm() < 0.01 * change  # products are in bfloat16
    assert_close(state[f"moment1.{name}"], theirs.state[parameter]["momentum_buffer"])
    assert f"moment2.{name}" not in state


def test_an_update_has_the_root_mean_square_of_adamw() -> None:
    matrix = _seeded(1, 96, 160, seed=3)
    scaled = orthogonalize(matrix, 5) * muon.update_scale(Matrices((96, 160)), 0.2)
    assert 0.15 < scaled.square().mean().sqrt() < 0.25
    singular = torch.linalg.svdvals(orthogonalize(matrix, 5)[0])
    assert singular.min() > 0.6 and singular.max() < 1.2


@pytest.mark.parametrize("shape", [(5, 37, 61), (3, 61, 37), (2, 128, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_of_a_matrix_do_not_depend_on_the_stack(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    stack = _seeded(*shape, seed=5).to(dtype)
    whole = orthogonalize(stack, 5)
    for place in range(len(stack)):
        assert torch.equal(orthogonalize(stack[place : place + 1].clone(), 5)[0], whole[place])


def test_a_gradient_of_zeros_only_decays() -> None:
    weights = _weights()
    before = {name: one.detach().clone() for name, one in weights.items()}
    _optimizer(weights, EXACT).step(0.5)
    for name, one in weights.items():
        assert_close(one.detach(), before[name] * (1 - 0.5 * EXACT.weight_decay))


@pytest.mark.parametrize(
    "format_", [{"moment_dtype": "bf16"}, {"moment_dtype": "int8", "store_param_remainders": True}]
)
def test_momentum_in_fewer_bits_stays_near(format_: dict[str, object]) -> None:
    exact, rounded = _steps(EXACT, torch.bfloat16), _steps(EXACT.model_copy(update=format_), torch.bfloat16)
    for name, weight in _weights(torch.bfloat16).items():
        change = (exact[f"model.{name}"] - weight).norm()
        assert 0 < (rounded[f"model.{name}"] - exact[f"model.{name}"]).norm() < 0.1 * change


def test_matrices_of_hidden_layers_have_one_moment_and_all_else_has_two() -> None:
    run = load_run("deepseek-v3-4l", ["model.mtp_layers=1"])
    found = {one.name: one.matrices for one in param_shards([meta_model(run.model)], ALONE)}
    of_muon = {name: one for name, one in found.items() if one is not None}
    assert not any(word in name for name in of_muon for word in ("norm", "router", "embed", "head.", "bias"))
    rest = {name.split(".")[-1] for name in found.keys() - of_muon.keys()}
    assert rest == {"weight", "weight_D", "weight_ED"}
    assert {name.split(".")[0] for name in found.keys() - of_muon.keys() if name.endswith(".weight")} == {
        "embed",
        "head",
    }
    (gate_up,) = {one for name, one in of_muon.items() if name.endswith("gate_up_eFD")}
    assert (gate_up.count, gate_up.rows, gate_up.columns) == (2 * 256, 2048, 7168)
    assert found["blocks.0.ffn.gate_up.weight"] == Matrices((2 * 18432, 7168), blocks=2)
    assert found["mtp.0.join.weight"] == Matrices((7168, 2 * 7168))
