"""However ranks divide an optimizer, gradients, masters, moments and norm are those of one process.

Gradients are multiples of 1/64 that bfloat16 holds exactly, and so are their sums: they are equal bit for bit in any
order of summing. The norm is a sum of squares in another order. PyTorch's fused AdamW on CPUs rounds the last values of
a tensor another way than those that fill its vectors, so masters and moments differ by a bit where a value is among the
last ones here and not there. Muon's are equal to the bit: matrices are orthogonalized whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from penstock.config.parallel import Offload, Parallel
from penstock.config.run import Muon, Optimizer
from penstock.layout.grid import Grid
from penstock.layout.sharding import Cut, LocalSlice, Matrices
from penstock.parallel.axes import Axes, make_axes
from penstock.parallel.shard import ParamShard, ShardedTensor, shard_fully
from penstock.train.optimizer import MasterAdamW
from tests.closeness import assert_close, assert_equal
from tests.distributed.pool import Pool
from tests.train.small_model import SETTINGS, holdings_of

SHAPES = {
    "units.0.up": (6, 3),
    "units.0.norm": (7,),
    "units.0.router": (4, 3),
    "units.1.down": (1, 9, 2),  # one expert: its rows are divided
    "units.1.stack": (3, 3, 2),  # ranks divide the second expert
    "units.1.bias": (1,),  # fewer rows than ranks
    "units.1.scale": (),
    "embed": (8, 4),
}
CUT = {"units.0.up": Cut(dim=0, index=0, count=2, blocks=3), "embed": Cut(dim=1, index=0, count=2)}
BLOCKS = {"units.0.up": 3, "units.1.down": 1, "units.1.stack": 1}  # of matrices that Muon updates
REPLICATED = ("units.0.router", "units.1.scale")
STEPS, MICRO_BATCHES, RATE = 2, 2, 0.01  # RATE: learning rate


@dataclass(frozen=True)
class Case:
    """A layout: 4 ranks, or those of the grid."""

    parallel: Parallel
    bf16: bool = False
    bucket_values: int | None = None
    offload: bool = False
    int8: bool = False  # moments in 8 bits, masters in the bits that are missing
    muon: bool = False

    @property
    def settings(self) -> Optimizer:
        changes: dict[str, object] = {"moment_dtype": "int8", "store_param_remainders": True} if self.int8 else {}
        if self.muon:
            changes |= {"method": "muon", "muon": Muon(precision="fp32")}
        return SETTINGS.model_copy(update=changes)

    @property
    def grid(self) -> Grid:
        return Grid(world=4, tensor=self.parallel.tensor)

    def __str__(self) -> str:
        changes = {**self.parallel.model_dump(exclude_defaults=True), **vars(self)}
        return "-".join(f"{key}={value}" for key, value in changes.items() if key != "parallel" and value)


@dataclass(frozen=True)
class Outcome:
    """What some steps led to on one rank; gradients are those of the last step."""

    parts: dict[str, ShardedTensor]
    gradients: dict[str, Tensor]
    norms: list[float]
    parameters: dict[str, Tensor]


class Unit(nn.Module):
    """Adds up products of its parameters and what it is given: those are the gradients."""

    def forward(self, total: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        for name, parameter in self.named_parameters(recurse=False):
            total = total + (parameter.float().view(gradients[name].shape) * gradients[name]).sum()
        return total


class Whole(Unit):
    """Two units and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList([Unit(), Unit()])

    def forward(self, total: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        for place, unit in enumerate(self.units):
            prefix = f"units.{place}."
            own = {name.removeprefix(prefix): one for name, one in gradients.items() if name.startswith(prefix)}
            total = unit(total, own)
        return super().forward(total, gradients)


def _exact(shape: tuple[int, ...], *seeds: int) -> Tensor:
    """Multiples of 1/64 below 1/2; sums of up to 8 are exact in bfloat16."""
    seed = sum(value * 101**place for place, value in enumerate(seeds))
    return torch.randint(-31, 32, shape, generator=torch.Generator().manual_seed(seed)).float() / 64


def _gradient(name: str, step: int, micro_batch: int, data: int, tensor: int) -> Tensor:
    """Of the whole parameter, from the tokens that one rank sees. Tensor-parallel ranks that share it see the same."""
    place = list(SHAPES).index(name)
    return _exact(SHAPES[name], place, step, micro_batch, data, 0 if name in CUT else tensor)


def _matrices(name: str) -> Matrices | None:
    return Matrices(SHAPES[name], BLOCKS[name]) if name in BLOCKS else None


def _cuts(name: str, axes: Axes) -> tuple[Cut, ...]:
    return (replace(CUT[name], index=axes.tensor.rank),) if name in CUT and axes.tensor.size > 1 else ()


def _take(whole: Tensor, pieces: tuple[LocalSlice, ...], shape: tuple[int, ...]) -> Tensor:
    taken = torch.full(shape, torch.nan)
    for piece, values in ShardedTensor(tensor=taken, shape=tuple(whole.shape), pieces=pieces).views():
        values.copy_(whole[_box(piece.whole, piece.sizes)])
    return taken


def _box(starts: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def _model(case: Case, take: Callable[[str, Tensor], Tensor], *, masters: bool = False) -> Whole:
    """`masters`: what FSDP2 shall divide is float32."""
    model = Whole()
    for place, (name, shape) in enumerate(SHAPES.items()):
        path, _, last = name.rpartition(".")
        is_precise = not case.bf16 or "router" in name or (masters and name not in REPLICATED)
        value = nn.Parameter(take(name, _exact(shape, place, 99)).to(torch.float32 if is_precise else torch.bfloat16))
        model.get_submodule(path).register_parameter(last, value)
    return model


def _outcome(optimizer: MasterAdamW, model: nn.Module, norms: list[float], gradients: dict[str, Tensor]) -> Outcome:
    parameters = {name: one.detach() for name, one in model.named_parameters() if not isinstance(one, DTensor)}
    parts = {name: part.decoded() for name, part in optimizer.parts().items()}
    return Outcome(parts, gradients, norms, parameters)


def _train(case: Case) -> Outcome:
    axes = make_axes(case.grid, shard_size=case.parallel.shard_size)
    tensor = axes.tensor

    def holding(name: str, parameter: nn.Parameter) -> ParamShard:
        cuts = _cuts(name, axes)
        partial, data = (tensor,) if tensor.size > 1 and not cuts else (), axes.dense_data
        shape, matrices = SHAPES[name], _matrices(name)
        return ParamShard(
            name=name, parameter=parameter, shape=shape, cuts=cuts, data=data, partial=partial, matrices=matrices
        )

    def take(name: str, whole: Tensor) -> Tensor:
        one = holding(name, nn.Parameter(torch.empty(0)))
        return _take(whole, one.pieces(), one.local_shape)

    compute = torch.bfloat16 if case.bf16 else torch.float32
    full = case.parallel.shard == "full"
    model = _model(case, take, masters=full)
    if full:
        ignored, cpu = {model.get_parameter(name) for name in REPLICATED}, torch.device("cpu")
        inner = {model.units[1]: axes.dense_data}  # its stacks become matrices
        shard_fully([model.units[0]], model, axes.dense_data, case.parallel, cpu, compute, ignored, inner)
    holdings = [holding(name, parameter) for name, parameter in model.named_parameters()]
    optimizer = MasterAdamW(
        holdings,
        case.settings,
        parallel=case.parallel,
        axes=axes,
        bucket_values=case.bucket_values,
        offload=Offload(optimizer=case.offload),
    )
    norms = []
    for step in range(STEPS):
        optimizer.zero_gradients()
        for micro in range(MICRO_BATCHES):
            place = axes.dense_data.rank, tensor.rank
            given = {name: take(name, _gradient(name, step, micro, *place)) for name in SHAPES}
            model(torch.zeros(()), given).backward()
        optimizer.reduce_gradients()
        norms.append(optimizer.gradient_norm().item())
        # With AdamW's factors 1 - beta a moment would hide a gradient's last bits.
        gradients = {name: gradient.clone() for name, gradient in optimizer.gradients()}
        optimizer.step(RATE)
    return _outcome(optimizer, model, norms, gradients)


def _alone(case: Case) -> Outcome:
    model = _model(case, lambda _, whole: whole)
    held = [replace(one, matrices=_matrices(one.name)) for one in holdings_of(model)]
    optimizer = MasterAdamW(held, case.settings)
    norms = []
    for step in range(STEPS):
        optimizer.zero_gradients()
        for name in SHAPES:
            for micro in range(MICRO_BATCHES):
                for data in range(case.grid.data):
                    for tensor in range(1 if name in CUT else case.grid.tensor):
                        optimizer.gradient_of(name).add_(_gradient(name, step, micro, data, tensor))
        norms.append(optimizer.gradient_norm().item())
        # With AdamW's factors 1 - beta a moment would hide a gradient's last bits.
        gradients = {name: gradient.clone() for name, gradient in optimizer.gradients()}
        optimizer.step(RATE)
    return _outcome(optimizer, model, norms, gradients)


def _cases() -> list[Case]:
    cases = []
    for tensor, shard_size in ((1, 0), (1, 2), (2, 0)):
        for shard in ("none", "optimizer", "full"):
            if shard != "none" or not shard_size:
                parallel = Parallel(tensor=tensor, shard=shard, shard_size=shard_size)
                cases.append(Case(parallel, bf16=shard_size == 2))
    cases += [Case(one.parallel.model_copy(update={"reduce": "bf16"}), bf16=True) for one in cases[:3]]
    cases.append(Case(Parallel(shard="optimizer", shard_size=2), bucket_values=5))
    cases += [
        Case(Parallel.model_validate({"shard": shard}), bf16=True, offload=True)
        for shard in ("none", "optimizer", "full")
    ]
    cases += [
        Case(Parallel.model_validate({"shard": shard}), bf16=True, offload=shard == "optimizer", int8=True)
        for shard in ("none", "optimizer", "full")
    ]
    cases += [replace(case, muon=True, bucket_values=20 * place) for place, case in enumerate(cases[:8])]
    cases += [
        Case(Parallel.model_validate({"shard": shard}), bf16=True, int8=True, muon=True)
        for shard in ("none", "optimizer", "full")
    ]
    cases.append(Case(Parallel(shard="full", reshard="backward", prefetch=2), bf16=True))
    cases.append(Case(Parallel(shard="full", prefetch=0, reduce="bf16"), bf16=True))
    return cases


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_every_division_gives_the_state_of_one_process_and_each_value_is_written_once(ranks: Pool, case: Case) -> None:
    expected = _alone(case)
    found = ranks.run(4, _train, case)
    for rank in found:
        assert rank.norms == found[0].norms
        assert_close(rank.norms, expected.norms, what="norms")
        for name, gradient in rank.gradients.items():
            pieces = rank.parts[f"model.{name}"].pieces
            assert torch.equal(gradient, _take(expected.gradients[name], pieces, tuple(gradient.shape))), name
        for name, held in rank.parts.items():
            wanted = _take(expected.parts[name].tensor, held.pieces, tuple(held.tensor.shape))
            if case.muon and name.partition(".")[2] in BLOCKS:
                assert torch.equal(held.tensor, wanted), name
            assert_close(held.tensor, wanted, tolerance=1e-6, what=name)
        for name, value in rank.parameters.items():
            if case.parallel.tensor == 1:
                assert torch.equal(value, found[0].parameters[name]), name
                assert_close(value, expected.parameters[name], tolerance=0.01 if case.bf16 else 1e-6, what=name)
    for name, part in expected.parts.items():
        written = torch.zeros(part.shape)  # how often each value is written
        for rank in found:
            held = rank.parts[name]
            assert held.shape == part.shape
            for piece in held.pieces if held.writes else ():
                written[_box(piece.whole, piece.sizes)] += 1
        assert torch.equal(written, torch.ones(part.shape)), name


def _load(case: Case, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    axes = make_axes(case.grid)
    model = _model(case, lambda _, whole: torch.zeros_like(whole))
    holdings = [
        ParamShard(name=name, parameter=one, shape=SHAPES[name], cuts=(), data=axes.dense_data)
        for name, one in model.named_parameters()
    ]
    offload = Offload(optimizer=case.offload)
    optimizer = MasterAdamW(holdings, SETTINGS, parallel=case.parallel, axes=axes, offload=offload)
    for name, part in optimizer.parts().items():
        part.tensor.copy_(_take(saved[name], part.pieces, tuple(part.tensor.shape)))
    optimizer.loaded()
    optimizer.step(0.0)
    assert optimizer.parts()["step"].tensor.item() == STEPS + 1
    dist.barrier()
    return {name: one.detach() for name, one in model.named_parameters()}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_parameters_follow_masters_that_are_loaded(ranks: Pool, shard: str, offload: bool) -> None:
    case = Case(Parallel.model_validate({"shard": shard}), bf16=True, offload=offload)
    alone = _alone(case)
    for parameters in ranks.run(4, _load, case, {name: part.tensor for name, part in alone.parts.items()}):
        assert_equal(parameters, alone.parameters)


@pytest.mark.parametrize(
    ("shard", "weights", "gradients", "optimizer"), [("none", 2, 4, 12), ("optimizer", 2, 4, 3), ("full", 1, 1, 2)]
)
@pytest.mark.parametrize("offload", [False, True])
def test_memory_is_known_before_there_is_any(
    shard: str, weights: int, gradients: int, optimizer: int, offload: bool
) -> None:
    """Bytes for each value of a bfloat16 model, of which 4 ranks hold a copy."""
    settings = Parallel.model_validate({"shard": shard})
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        data = make_axes(Grid(world=4)).dense_data
        full = shard == "full"
        model = nn.Linear(8, 16, bias=False, device="meta", dtype=torch.float32 if full else torch.bfloat16)
        if full:
            shard_fully([], model, data, settings, torch.device("cpu"), torch.bfloat16, ignored=set(), inner={})
        holding = ParamShard(name="weight", parameter=model.weight, shape=(16, 8), cuts=(), data=data)
        memory = MasterAdamW([holding], SETTINGS, parallel=settings, offload=Offload(optimizer=offload)).memory()
    finally:
        dist.destroy_process_group()
    assert (memory.weights, memory.gradients) == (128 * weights, 128 * gradients)
    if offload:
        # All of it fits into one chunk, each of whose tensors begins at a multiple of 512 bytes.
        assert memory.host == 128 * optimizer
        assert memory.optimizer == 2 * (512 * 3 if optimizer != 2 else 512 * 2)
    else:
        assert (memory.optimizer, memory.host) == (128 * optimizer, 0)
