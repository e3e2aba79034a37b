"""The update in one kernel equals its definition to the bit, in every format, and compiles for every chip."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.adamw import (
    MOMENT_DTYPES,
    ROOT_DECADES,
    SIGNED_DECADES,
    AdamWLaunch,
    AdamWScalars,
    AdamWTensor,
    MomentDtype,
    dequantize,
    join,
    launches_of,
    noise,
    numbers,
    quantize,
    round_bf16,
    scalars_of,
    split,
    update,
)
from penstock.kernels.tuning import KernelLaunch
from penstock.plan.op_recorder import OpRecorder
from tests.closeness import assert_close, assert_equal
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta

SMALL = KernelLaunch(block_rows=4, block_columns=128, warps=1)
MASTERS = ("own", "apart", "split")
# Rows of whole blocks, of a block and a part, of less than a block; a stack of matrices; a vector; nothing.
SHAPES = ((5, 256), (3, 144), (7, 20), (2, 3, 130), (37,), (0, 4))


def _tensor(
    shape: tuple[int, ...], moments: MomentDtype, masters: str, device: torch.device, seed: int, *, spread: float = 1.0
) -> AdamWTensor:
    """A tensor after some updates. Values of `spread` decades."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        exponents = spread * torch.rand(shape, generator=generator)
        return torch.randn(shape, generator=generator) * 10.0**-exponents

    master, mean, square = draw(), draw(), draw().square()
    rest: Tensor | None = None
    value = master
    if masters == "apart":
        value, rest = master.bfloat16(), master
    elif masters == "split":
        value, rest = split(master)
    scales: tuple[Tensor | None, Tensor | None] = None, None
    if moments == "int8" and len(shape) > 1:
        (mean, scale1), (square, scale2) = quantize(mean, SIGNED_DECADES), quantize(square.sqrt(), ROOT_DECADES)
        scales = scale1.to(device), scale2.to(device)
    elif moments == "bf16":
        mean, square = mean.bfloat16(), square.bfloat16()
    return AdamWTensor(
        value=value.to(device),
        gradient=draw().to(device),
        master=None if rest is None else rest.to(device),
        moment1=mean.to(device),
        moment2=square.to(device),
        scale1=scales[0],
        scale2=scales[1],
        is_decayed=len(shape) > 1,
        salt=seed - 3,
        start=17 * seed,
    )


def _copy(tensor: AdamWTensor) -> AdamWTensor:
    fields = {name: one.clone() for name, one in vars(tensor).items() if isinstance(one, Tensor)}
    return replace(tensor, **fields)


def _tensors_of(tensor: AdamWTensor) -> dict[str, Tensor]:
    return {name: one for name, one in vars(tensor).items() if isinstance(one, Tensor)}


def _scalars(step: int = 1, divisor: float = 1.0) -> AdamWScalars:
    return scalars_of(step, learning_rate=0.003, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, divisor=divisor)


@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("moments", MOMENT_DTYPES)
def test_the_kernel_equals_the_definition_to_the_bit(moments: MomentDtype, masters: str, device: torch.device) -> None:
    given = [_tensor(shape, moments, masters, device, place, spread=9.0) for place, shape in enumerate(SHAPES)]
    expected = [_copy(one) for one in given]
    found = [one for one in given if one.value.numel()]
    launches = launches_of(given) if device.type == "cuda" else [AdamWLaunch([one], launch=SMALL) for one in found]
    for step, divisor in ((1, 1.0), (2, 3.7)):
        for launch in launches:
            launch.run(_scalars(step, divisor))
        for one in expected:
            update(one, _scalars(step, divisor))
        for ours, theirs in zip(given, expected, strict=True):
            for name, tensor in _tensors_of(theirs).items():
                assert torch.equal(_tensors_of(ours)[name], tensor), f"{name} {tuple(tensor.shape)}, step {step}"
            assert not ours.gradient.any()
            if ours.gradient.numel():
                again = torch.randn(ours.gradient.shape, generator=torch.Generator().manual_seed(step))
                ours.gradient.copy_(again)
                theirs.gradient.copy_(again)


@pytest.mark.gpu
@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("moments", MOMENT_DTYPES)
def test_many_programs_equal_the_definition_on_a_gpu(moments: MomentDtype, masters: str) -> None:
    device = torch.device("cuda")
    given = [_tensor(shape, moments, masters, device, 5) for shape in ((4, 700, 1408), (3000, 100), (2048,), (777, 33))]
    expected = [_copy(one) for one in given]
    for launch in launches_of(given):
        launch.run(_scalars(3, 1.7))
    for ours, theirs in zip(given, expected, strict=True):
        update(theirs, _scalars(3, 1.7))
        assert_equal(_tensors_of(ours), _tensors_of(theirs))


def test_one_launch_updates_many_tensors_of_a_format_and_leaves_their_neighbours_alone(device: torch.device) -> None:
    room = torch.full((64, 48), 5.0, device=device)
    given = [_tensor((8, 48), "fp32", "own", device, seed) for seed in range(3)]
    given[1] = replace(given[1], value=room[20:28])
    expected = [_copy(one) for one in given]
    AdamWLaunch(given, launch=SMALL).run(_scalars())
    for one in expected:
        update(one, _scalars())
    for ours, theirs in zip(given, expected, strict=True):
        assert_equal(_tensors_of(ours), _tensors_of(theirs))
    assert room[:20].eq(5.0).all() and room[28:].eq(5.0).all()


def test_the_definition_is_torchs_adamw() -> None:
    one = _tensor((40, 64), "fp32", "own", torch.device("cpu"), 1)
    weight = torch.nn.Parameter(one.value.clone())
    optimizer = torch.optim.AdamW([weight], lr=0.003, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer.state[weight] = {
        "step": torch.tensor(4.0), "exp_avg": one.moment1.clone(), "exp_avg_sq": one.moment2.clone()
    }  # fmt: skip
    weight.grad = one.gradient / 2.5
    optimizer.step()
    update(one, _scalars(5, 2.5))
    assert_close(one.value, weight.detach(), tolerance=1e-6)
    assert_close(one.moment2, optimizer.state[weight]["exp_avg_sq"], tolerance=1e-6)


def test_split_masters_are_exact_and_their_weights_the_nearest() -> None:
    masters = torch.randn(1 << 16) * 10.0 ** torch.randint(-30, 30, (1 << 16,))
    value, rest = split(masters)
    assert torch.equal(join(value, rest), masters)
    assert value.dtype == torch.bfloat16 and rest.dtype == torch.int16
    is_tie = rest == -(1 << 15)
    assert torch.equal(value[~is_tie], masters.bfloat16()[~is_tie])


@pytest.mark.parametrize("decades", [SIGNED_DECADES, ROOT_DECADES])
def test_codes_are_found_again_and_rounding_is_to_a_neighbour(decades: int) -> None:
    table = torch.tensor(numbers(decades))
    assert len(table) == 1 << decades and table.diff().min() > 0 and table[-1] == 1.0
    stored = torch.stack((torch.cat((table[:127], table[-1:])), table[-128:])) * 0.37  # each row has the largest number
    for chance in (None, torch.zeros(2, 128, dtype=torch.int32), torch.full((2, 128), 65535, dtype=torch.int32)):
        codes, scales = quantize(stored, decades, chance)
        assert torch.equal(dequantize(codes, scales, decades), stored)
    x = torch.rand(64, 128) ** 6
    codes, scales = quantize(x, decades)
    low, high = table[(codes.long() - 1).clamp(min=0)], table[(codes.long() + 1).clamp(max=len(table) - 1)]
    share = x / scales
    assert (low <= share).all() and (share <= high).all()


def test_rounding_by_noise_has_the_right_mean() -> None:
    x = torch.full((4096, 128), 0.3)
    x[:, 0] = 1.0  # the scale
    x[:, 1:64] = 3e-8  # below the least number of 8 decades
    one, two = noise(x, 0, 7)
    assert abs(float(one.float().mean()) / 32767.5 - 1) < 0.01 and abs(float(two.float().mean()) / 32767.5 - 1) < 0.01
    for decades in (SIGNED_DECADES, ROOT_DECADES):
        found = dequantize(*quantize(x, decades, one), decades)
        assert abs(float(found[:, 64:].mean()) / 0.3 - 1) < 1e-3
    assert abs(float(found[:, 1:64].mean()) / 3e-8 - 1) < 0.02
    assert abs(float(round_bf16(x, two)[:, 64:].float().mean()) / 0.3 - 1) < 1e-4


def test_small_steps_move_moments_in_few_bits_as_far_as_float32() -> None:
    device = torch.device("cpu")
    found = {}
    for moments in MOMENT_DTYPES:
        one = _tensor((64, 128), moments, "split", device, 3)
        generator = torch.Generator().manual_seed(0)
        for step in range(1, 101):
            one.gradient.copy_(torch.randn(64, 128, generator=generator) * 0.01 + 0.02)
            update(one, _scalars(step))
        assert one.master is not None
        found[moments] = join(one.value, one.master)
    start = _tensor((64, 128), "fp32", "split", device, 3)
    assert start.master is not None
    moved = found["fp32"] - join(start.value, start.master)
    for moments in ("bf16", "int8"):
        assert_close(found[moments] - found["fp32"], torch.zeros_like(moved), least=float(moved.norm()), by="norm",
                     tolerance=0.05)  # fmt: skip


def test_a_dry_run_counts_the_bytes() -> None:
    with OpRecorder() as recorder:
        for masters, moments in (("apart", "fp32"), ("split", "int8")):
            one = _tensor((4, 256), moments, masters, torch.device("cpu"), 0)
            meta = replace(one, **{name: tensor.to("meta") for name, tensor in _tensors_of(one).items()})
            for launch in launches_of([meta]):
                launch.run(_scalars())
    apart, split_ = (one for one in recorder.cut() if one.name == "adamw_kernel")
    assert apart.sizes == (1024 * 16, 1024 * 18)  # the weight is written only: 34 bytes a value
    assert split_.sizes == (1024 * 10 + 64,) * 2  # two scales for each block of 128
    assert (apart.switches, split_.switches) == ((), ("CODES",))


@pytest.mark.often("sm_90-int8-split", "gfx942-bf16-apart")
@pytest.mark.parametrize("masters", MASTERS)
@pytest.mark.parametrize("moments", MOMENT_DTYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles_without_spills(target: str, moments: MomentDtype, masters: str) -> None:
    one = _tensor((4, 256), moments, masters, torch.device("cpu"), 0)
    launch = AdamWLaunch([one])
    (compiled,) = compile_without_spills(target, lambda: launch.run(_scalars()))
    loads = {"sm": "ld.global.v4.b32", "gf": "global_load_dwordx4"}[target[:2]]
    assert loads in compiled.asm, "gradients are loaded 16 bytes at a time"


def test_tables_have_the_addresses_of_the_tensors() -> None:
    one = _tensor((4, 256), "int8", "split", torch.device("cpu"), 0)
    table = AdamWLaunch([one])._table[0].tolist()
    assert table[0] == one.value.data_ptr() and table[6] == one.scale2.data_ptr()  # type: ignore[union-attr]
    assert table[7:11] == [256, 2, 8, 0]
    assert on_meta(1).data_ptr() == 0
