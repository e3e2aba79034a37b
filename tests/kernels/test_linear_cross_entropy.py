"""The chunked loss against its definition: both row passes, all gradients, and a vocabulary split over ranks."""

import importlib.util
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels import reference
from penstock.kernels.float8.operators import REFERENCE, Float8Rule
from penstock.kernels.float8.quantized import (
    BLOCKWISE,
    BLOCKWISE_SQUARE,
    E5M2,
    RECIPES,
    ROWWISE,
    Recipe,
    RowColQuantized,
    format_on,
)
from penstock.kernels.float8.reference import multiply, quantize_rows, quantize_weight
from penstock.kernels.float8.triton_operators import TRITON
from penstock.kernels.linear_cross_entropy import default_chunk_tokens, linear_cross_entropy
from penstock.kernels.reference import IGNORED_LABEL
from penstock.kernels.tuning import KernelLaunch
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta
from tests.kernels.parity import assert_near

SMALL = KernelLaunch(block_rows=1, block_columns=32)  # several blocks in a small row, the last one ragged


@dataclass(frozen=True)
class Case:
    """A batch: `ignored` of its `tokens` labels are not counted."""

    tokens: int = 21
    ignored: int = 5
    hidden: int = 16
    vocabulary: int = 75
    z_weight: float = 0.0

    def draw(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """x, head and labels."""
        x_TD = torch.randn(self.tokens, self.hidden, device=device, dtype=dtype)
        head_VD = torch.randn(self.vocabulary, self.hidden, device=device, dtype=dtype)
        labels_T = torch.randint(self.vocabulary, (self.tokens,), device=device)
        labels_T[torch.randperm(self.tokens, device=device)[: self.ignored]] = IGNORED_LABEL
        return x_TD, head_VD, labels_T


CASES = {
    "plain": Case(ignored=0),
    "ignored labels": Case(),
    "z-loss": Case(z_weight=0.1),
    "all labels ignored": Case(tokens=9, ignored=9, z_weight=0.1),
    "one token": Case(tokens=1, ignored=0),
    "no tokens": Case(tokens=0, ignored=0),
    "row smaller than a block": Case(vocabulary=7),
    "one whole chunk": Case(tokens=8, ignored=1),
}


@pytest.fixture(params=["torch", "triton"])
def launch(request: pytest.FixtureRequest, device: torch.device) -> KernelLaunch | None:
    """Both row passes; a GPU never runs the one in torch."""
    if request.param == "torch" and device.type == "cuda":
        pytest.skip("the row pass in torch is for CPUs")
    return SMALL if request.param == "triton" else None


def loss_and_gradients(function, x_TD: Tensor, head_VD: Tensor, *arguments, scale: float = 1.0, **options):
    """Loss, and the gradients of `scale` times it with respect to x and head."""
    x_TD, head_VD = x_TD.detach().requires_grad_(), head_VD.detach().requires_grad_()
    loss = function(x_TD, head_VD, *arguments, **options)
    (loss * scale).backward()
    return loss.detach(), x_TD.grad, head_VD.grad


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_loss_and_gradients_equal_the_reference(case: Case, launch: KernelLaunch | None, device: torch.device) -> None:
    x_TD, head_VD, *rest = *case.draw(device), case.z_weight
    expected = loss_and_gradients(reference.linear_cross_entropy, x_TD.double(), head_VD.double(), *rest, scale=0.37)
    actual = loss_and_gradients(linear_cross_entropy, x_TD, head_VD, *rest, scale=0.37, chunk_tokens=8, launch=launch)
    for one, other in zip(expected, actual, strict=True):
        assert_close(other.double(), one.double(), tolerance=2e-5)


def test_bfloat16_stays_near_float64(launch: KernelLaunch | None, device: torch.device) -> None:
    case = Case(tokens=32, ignored=5, hidden=64, vocabulary=128, z_weight=1e-3)
    x_TD, head_VD, *rest = *case.draw(device, torch.bfloat16), case.z_weight
    head_VD = head_VD / 8  # logits of size 1: 64 products of normal numbers
    expected = loss_and_gradients(reference.linear_cross_entropy, x_TD.double(), head_VD.double(), *rest, scale=0.37)
    actual = loss_and_gradients(linear_cross_entropy, x_TD, head_VD, *rest, scale=0.37, chunk_tokens=16, launch=launch)
    assert actual[0].dtype == torch.float32
    assert actual[1].dtype == actual[2].dtype == torch.bfloat16
    for name, one, other in zip(("loss", "dx", "dhead"), expected, actual, strict=True):
        assert_near(other.bfloat16(), one, name)


def test_large_logits_and_masked_words_stay_finite(launch: KernelLaunch | None, device: torch.device) -> None:
    """logsumexp must not overflow, and a word whose logit is -inf has probability 0 even if it fills a whole block."""
    x_TD = torch.ones(2, 1, device=device)
    head_VD = torch.full((80, 1), float("-inf"), device=device)
    head_VD[40], head_VD[70] = 3.0e4, 3.0e4  # in two blocks of 32; the first block has masked words only
    labels_T = torch.tensor([40, 70], device=device)
    loss = linear_cross_entropy(x_TD, head_VD, labels_T, launch=launch)
    assert_close(loss, torch.tensor(2 * 0.6931472, device=device), tolerance=0.01)  # log 2 for each token


def test_a_label_outside_the_vocabulary_makes_the_loss_nan(launch: KernelLaunch | None, device: torch.device) -> None:
    x_TD, head_VD, labels_T = Case(ignored=0).draw(device)
    for wrong in (-1, 75, 10**12):  # the vocabulary has 75 words
        labels_T[3] = wrong
        assert linear_cross_entropy(x_TD, head_VD, labels_T, launch=launch).isnan()


def test_evaluation_makes_no_gradients(
    launch: KernelLaunch | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_TD, head_VD, labels_T = Case().draw(device)
    head_VD.requires_grad_()
    with torch.no_grad():
        monkeypatch.setattr(torch, "empty_like", lambda *_, **__: pytest.fail("a gradient was allocated"))
        loss = linear_cross_entropy(x_TD, head_VD, labels_T, launch=launch)
    assert not loss.requires_grad
    assert_close(loss, reference.linear_cross_entropy(x_TD, head_VD, labels_T).detach())


@pytest.mark.parametrize("wanted", ["x", "head"])
def test_only_the_wanted_gradient_is_made_and_backward_can_run_twice(
    wanted: str, launch: KernelLaunch | None, device: torch.device
) -> None:
    x_TD, head_VD, labels_T = Case().draw(device)
    leaf = {"x": x_TD, "head": head_VD}[wanted].requires_grad_()
    (expected,) = torch.autograd.grad(reference.linear_cross_entropy(x_TD, head_VD, labels_T), leaf)
    loss = linear_cross_entropy(x_TD, head_VD, labels_T, launch=launch)
    (first,) = torch.autograd.grad(loss, leaf, grad_outputs=torch.tensor(2.0, device=device), retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert_close(second, expected, tolerance=1e-4)
    assert_close(first, 2 * second)


def test_head_gradients_of_two_batches_add_up_in_float32(launch: KernelLaunch | None, device: torch.device) -> None:
    _, head_VD, _ = Case().draw(device, torch.bfloat16)
    head_VD.requires_grad_()
    sum_VD = torch.zeros_like(head_VD, dtype=torch.float32)
    expected_VD = torch.zeros_like(sum_VD, dtype=torch.float64)
    for scale in (0.5, 3.0):
        x_TD, _, labels_T = Case().draw(device, torch.bfloat16)
        loss = linear_cross_entropy(x_TD, head_VD, labels_T, accumulate_into=sum_VD, launch=launch)
        (loss * scale).backward()
        *_, gradient = loss_and_gradients(
            reference.linear_cross_entropy, x_TD.double(), head_VD.double(), labels_T, scale=scale
        )
        expected_VD += gradient
    assert head_VD.grad is None
    assert_near(sum_VD.bfloat16(), expected_VD, "sum of gradients")


def test_chunks_shrink_with_a_large_vocabulary() -> None:
    assert default_chunk_tokens(torch.empty(201_088, 1, dtype=torch.bfloat16)) == 4096
    assert default_chunk_tokens(torch.empty(201_088, 1, dtype=torch.float32)) == 2048  # of twice the bytes


def test_misfits_are_refused(device: torch.device) -> None:
    x, head, labels = Case().draw(device)
    for operands, says in (
        ((x[:, 1:], head, labels), "equal width"),
        ((x, head.double(), labels), "one dtype"),
        ((x, head, labels[1:]), "one for each row"),
        ((x, head, labels.int()), "int64"),
    ):
        with pytest.raises(KernelError, match=says):
            linear_cross_entropy(*operands)


def test_a_cpu_needs_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is loaded a second time, where Triton cannot be imported."""
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.find_spec("penstock.kernels.linear_cross_entropy")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x_TD = torch.ones(3, 2, requires_grad=True)
    module.linear_cross_entropy(x_TD, torch.ones(4, 2), torch.tensor([0, 3, IGNORED_LABEL])).backward()
    assert x_TD.grad is not None


# Products in 8 bits.


def in_8_bits(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, rule: Float8Rule, z_weight: float):
    """Loss and gradients from whole products, each by its definition."""
    recipe, form = rule.head, rule.forward
    assert recipe is not None
    x, head = quantize_rows(x_TD, recipe, form, columns=recipe.columns), quantize_weight(head_VD, recipe, form)
    logits_TV = multiply(x.rows, head.forward, x_TD.dtype).requires_grad_()
    loss = reference.linear_cross_entropy(logits_TV, torch.eye(len(head_VD)), labels_T, z_weight)
    (dlogits_TV,) = torch.autograd.grad(loss, logits_TV)
    dlogits = quantize_rows(dlogits_TV, recipe, rule.gradient, columns=recipe.rows)
    assert dlogits.columns is not None and x.columns is not None
    dhead_VD = multiply(dlogits.columns, x.columns, torch.float32)
    return loss.detach(), multiply(dlogits.rows, head.backward, x_TD.dtype), dhead_VD


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_products_in_8_bits_are_those_of_the_recipe_in_each_chunk(recipe: Recipe) -> None:
    rule = Float8Rule(head=recipe, gradient=E5M2)
    x_TD, head_VD, labels_T = Case(tokens=200, hidden=48, vocabulary=144).draw(torch.device("cpu"))
    chunks = [slice(0, 128), slice(128, 200)]
    losses, dx, dhead = zip(
        *(in_8_bits(x_TD[chunk], head_VD, labels_T[chunk], rule, 0.1) for chunk in chunks), strict=True
    )
    found = loss_and_gradients(linear_cross_entropy, x_TD, head_VD, labels_T, 0.1, chunk_tokens=128, float8=rule)
    for one, other in zip(found, (sum(losses), torch.cat(dx), sum(dhead)), strict=True):
        assert_close(one, other, tolerance=1e-4)  # a number next to a tie may go to its other side


def test_a_sum_of_head_gradients_takes_those_in_8_bits() -> None:
    x_TD, head_VD, labels_T = Case(tokens=32, hidden=32, vocabulary=64).draw(torch.device("cpu"))
    rule, sum_VD = Float8Rule(head=BLOCKWISE_SQUARE), torch.ones(64, 32)
    linear_cross_entropy(x_TD, head_VD.requires_grad_(), labels_T, accumulate_into=sum_VD, float8=rule).backward()
    *_, expected_VD = in_8_bits(x_TD, head_VD.detach(), labels_T, rule, 0.0)
    assert_close(sum_VD, 1 + expected_VD, tolerance=1e-4)


@pytest.mark.parametrize(
    ("recipe", "trains_head", "chunks"), [(BLOCKWISE_SQUARE, True, 2), (BLOCKWISE, False, 0), (ROWWISE, True, 0)]
)
def test_the_gradient_of_logits_is_written_in_8_bits_only_where_no_scale_needs_whole_rows(
    recipe: Recipe, trains_head: bool, chunks: int
) -> None:
    made = []

    def logits_gradient(*arguments: Any, **options: Any) -> RowColQuantized:
        made.append(REFERENCE.logits_gradient(*arguments, **options))
        return made[-1]

    rule = Float8Rule(head=recipe, operators=replace(REFERENCE, logits_gradient=logits_gradient))
    x_TD, head_VD, labels_T = Case(tokens=200, hidden=48, vocabulary=144).draw(torch.device("cpu"))
    x_TD.requires_grad_()
    linear_cross_entropy(x_TD, head_VD.requires_grad_(trains_head), labels_T, chunk_tokens=128, float8=rule)
    assert len(made) == chunks
    with torch.no_grad():
        linear_cross_entropy(x_TD, head_VD, labels_T, chunk_tokens=128, float8=rule)
    assert len(made) == chunks


@pytest.mark.parametrize("recipe", [BLOCKWISE, BLOCKWISE_SQUARE], ids=lambda recipe: recipe.name)
def test_kernels_make_the_products_of_the_definition(recipe: Recipe, device: torch.device) -> None:
    # In float32, because Triton's interpreter cuts bfloat16 off instead of rounding it.
    x_TD, head_VD, labels_T = Case(tokens=160, hidden=128, vocabulary=272).draw(device)
    options = {"chunk_tokens": 128, "launch": SMALL}
    expected, found = (
        loss_and_gradients(linear_cross_entropy, x_TD, head_VD / 8, labels_T, **options, float8=rule)
        for rule in (Float8Rule(head=recipe, operators=operators) for operators in (REFERENCE, TRITON))
    )
    for one, other in zip(expected, found, strict=True):
        assert_close(other, one, tolerance=1e-4)


# A vocabulary that is split over two ranks.

Batch = tuple[Tensor, Tensor, Tensor]
Way = tuple[KernelLaunch | None, Float8Rule | None]


def run_shard(rank: int, folder: str, device: torch.device, ways: list[Way]) -> None:
    """One of two processes: its half of the vocabulary; the results are saved for the test."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    x_TD, head_VD, labels_T = torch.load(f"{folder}/batch.pt", map_location=device)
    shard_VD = head_VD.chunk(2)[rank]
    beyond_T = labels_T.index_fill(0, torch.tensor(0, device=device), len(head_VD))  # the first label is in no shard
    found = []
    for launch, rule in ways:
        options = {"chunk_tokens": 8, "group": dist.group.WORLD, "launch": launch, "float8": rule}
        trained = loss_and_gradients(linear_cross_entropy, x_TD, shard_VD, labels_T, 0.1, **options)
        evaluated = linear_cross_entropy(x_TD, shard_VD, labels_T, 0.1, **options)
        beyond = linear_cross_entropy(x_TD, shard_VD, beyond_T, 0.1, **options)
        found.append((*trained, evaluated, beyond))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def start_shards(case: Case, device: torch.device, folder: Path, ways: list[Way]) -> tuple[Batch, list[list[Any]]]:
    """A batch, and what both ranks found in each of some ways."""
    batch = case.draw(device)
    torch.save(batch, folder / "batch.pt")
    start_method = "spawn" if device.type == "cuda" else "forkserver"  # the latter begins warm (tests/warm.py)
    torch.multiprocessing.start_processes(run_shard, (str(folder), device, ways), nprocs=2, start_method=start_method)
    return batch, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_two_shards_of_the_vocabulary_equal_the_whole(device: torch.device, tmp_path: Path) -> None:
    ways = [(launch, None) for launch in ([SMALL] if device.type == "cuda" else [SMALL, None])]
    batch, ranks = start_shards(Case(vocabulary=90), device, tmp_path, ways)
    loss, dx_TD, dhead_VD = loss_and_gradients(reference.linear_cross_entropy, *batch, 0.1)
    for (loss_0, dx_0, dhead_0, *rest_0), (loss_1, dx_1, dhead_1, *rest_1) in zip(*ranks, strict=True):
        for found, evaluated, beyond in ((loss_0, *rest_0), (loss_1, *rest_1)):
            assert_close(found, loss)
            assert_close(evaluated, loss)
            assert beyond.isnan(), "a label that no rank has"
        assert_close(dx_0 + dx_1, dx_TD, tolerance=1e-4)
        assert_close(torch.cat((dhead_0, dhead_1)), dhead_VD, tolerance=1e-4)


@pytest.mark.parametrize("kernels", [False, True], ids=["definition", "kernels"])
def test_two_shards_in_8_bits_equal_the_whole_in_8_bits(kernels: bool, device: torch.device, tmp_path: Path) -> None:
    """Where blocks of a shard are those of the whole."""
    if not kernels and device.type == "cuda":
        pytest.skip("the row pass in torch is for CPUs")
    rule = Float8Rule(head=BLOCKWISE_SQUARE, operators=TRITON if kernels else REFERENCE)
    way = SMALL if kernels else None, rule
    batch, ((rank_0,), (rank_1,)) = start_shards(Case(vocabulary=256), device, tmp_path, [way])
    options = {"chunk_tokens": 8, "launch": way[0], "float8": rule}
    loss, dx_TD, dhead_VD = loss_and_gradients(linear_cross_entropy, *batch, 0.1, **options)
    assert_close(rank_0[0], loss)
    assert_close(rank_1[0], loss)
    assert_close(rank_0[1] + rank_1[1], dx_TD, tolerance=1e-4)
    assert_close(torch.cat((rank_0[2], rank_1[2])), dhead_VD, tolerance=1e-4)


# Ahead-of-time compilation.

# 16 bytes at once, into registers or shared memory.
WIDE_LOAD = re.compile(r"ld\.global\.v4\.b32|cp\.async\.cg\.shared\.global|load_dwordx4")


@pytest.mark.often("sm_90-both")
@pytest.mark.parametrize("wanted", ["both", "statistics", "gradient"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_without_spills(target: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's pass over rows in training, in evaluation, and one of two ranks' passes; and both ways to scale."""
    x_TD, head_VD, labels_T = on_meta(8192, 2048), on_meta(102_400, 2048), on_meta(8192, dtype=torch.int64)
    sum_VD = on_meta(102_400, 2048, dtype=torch.float32)
    if wanted != "statistics":
        head_VD.requires_grad_()
    if wanted == "gradient":
        monkeypatch.setattr(dist, "all_reduce", lambda *arguments, **options: None)
        monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    options = {"group": SimpleNamespace(size=lambda: 2) if wanted == "gradient" else None}

    def launches() -> None:
        for accumulate_into in (None, sum_VD):
            loss = linear_cross_entropy(x_TD, head_VD, labels_T, 0.1, accumulate_into=accumulate_into, **options)
            if loss.requires_grad:
                loss.backward()

    for compiled in compile_without_spills(target, launches):
        assert WIDE_LOAD.search(compiled.asm), f"{compiled.kernel} must read 16 bytes at a time"


@pytest.mark.often("gfx942")
@pytest.mark.parametrize("target", TARGETS)
def test_its_products_in_8_bits_compile_without_spills(target: str) -> None:
    x_TD, head_VD, labels_T = on_meta(8192, 2048), on_meta(102_400, 2048), on_meta(8192, dtype=torch.int64)
    sum_VD, form = on_meta(102_400, 2048, dtype=torch.float32), format_on("e4m3", target)
    rule = Float8Rule(head=BLOCKWISE_SQUARE, operators=TRITON, forward=form, gradient=form)
    leaves = x_TD.requires_grad_(), head_VD.requires_grad_()

    def launches() -> None:
        linear_cross_entropy(*leaves, labels_T, accumulate_into=sum_VD, float8=rule).backward()

    products = [one for one in compile_without_spills(target, launches) if one.kernel.startswith("float8_")]
    assert len(products) >= 3 and all(one.matrix_instructions for one in products)
