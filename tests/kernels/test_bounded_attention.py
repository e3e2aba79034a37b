"""Attention between bounds equals attention with all scores in memory, and its kernels compile for all chips."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.bounded_attention import (
    AttentionBounds,
    AttentionLaunch,
    bounded_attention,
    first_keys,
    has_kernel,
    parts_of,
)
from tests.closeness import assert_close, assert_equal
from tests.kernels.ahead_of_time import CHIPS, TARGETS, compile_launches, on_meta
from tests.kernels.eager_attention import eager_attention, random_documents, seen_by, with_gradients

SCALE = 0.2
WINDOWS = {
    "row": None,
    "window": AttentionWindow(kind="window", size=21),
    "chunk": AttentionWindow(kind="chunk", size=19),
}
TILES = {"forward": (32, 16), "queries": (16, 32), "keys": (32, 16)}
"""Queries and keys of small tiles."""


def _set_small_tiles(monkeypatch: pytest.MonkeyPatch, heads: int = 1) -> None:
    launches = {
        kernel: AttentionLaunch(block_rows=rows, block_columns=columns, heads=heads)
        for kernel, (rows, columns) in TILES.items()
    }
    monkeypatch.setattr("penstock.kernels.bounded_attention.launches_for", lambda *_: launches)


def _drawn(
    rows: int, queries: int, keys: int, heads: tuple[int, int], widths: tuple[int, int], seed: int = 11
) -> tuple[Tensor, ...]:
    """Queries, keys, values, sinks, and the direction in which the output is differentiated; float64 on the CPU."""
    generator, (h, g), (n, m) = torch.Generator().manual_seed(seed), heads, widths
    shapes = ((rows, queries, h, n), (rows, keys, g, n), (rows, keys, g, m), (h,), (rows, queries, h, m))
    q, k, v, sinks_H, direction = (torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes)
    return q, k, v, sinks_H, direction


@pytest.mark.parametrize("documents", [None, "documents"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_the_first_keys_are_those_of_the_mask(window: AttentionWindow | None, documents: str | None) -> None:
    documents_BS = random_documents(3, 70) if documents else None
    first_BS = first_keys(documents_BS, window, 70, torch.device("cpu"))
    assert first_BS.dtype == torch.int32
    key_S = torch.arange(70)
    seen_BSS = (key_S >= first_BS[:, :, None]) & (key_S <= key_S[:, None])
    assert_equal(seen_BSS, seen_by(window, 70, documents_BS))


def test_the_last_query_of_a_key_is_the_last_that_sees_it() -> None:
    first_BS = first_keys(random_documents(2, 50), WINDOWS["window"], 50, torch.device("cpu"))[:, 20:]
    last_BK = AttentionBounds.of(first_BS, 50).last_BK
    for row in range(2):
        for key in range(50):
            seeing = [query for query in range(30) if first_BS[row, query] <= key <= query + 20]
            assert last_BK[row, key] == max(seeing, default=-1)


@pytest.mark.parametrize(
    ("kind", "has_documents", "has_sinks", "heads", "widths", "queries", "packed"),
    [
        ("row", True, False, (2, 2), (48, 32), 83, 1),
        ("row", False, True, (4, 2), (32, 32), 64, 1),
        ("window", False, True, (4, 1), (16, 16), 83, 4),
        ("window", True, True, (4, 2), (32, 16), 37, 8),
        ("chunk", True, False, (6, 2), (32, 32), 50, 2),
        ("chunk", False, False, (3, 1), (32, 32), 83, 1),
    ],
)
def test_outputs_and_gradients_are_those_of_all_scores(
    kind: str,
    has_documents: bool,
    has_sinks: bool,
    heads: tuple[int, int],
    widths: tuple[int, int],
    queries: int,
    packed: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of queries at the end of a row, with more keys before them."""
    _set_small_tiles(monkeypatch, packed)
    window, keys, rows = WINDOWS[kind], 83, 2
    *wide, direction = _drawn(rows, queries, keys, heads, widths)
    documents_BS = random_documents(rows, keys) if has_documents else None
    wide = wide if has_sinks else wide[:3]
    leaves = [x.float().to(device).requires_grad_() for x in wide]
    bounds = AttentionBounds.of(first_keys(documents_BS, window, keys, torch.device("cpu"))[:, -queries:], keys)
    bounds = replace(bounds, first_BQ=bounds.first_BQ.to(device), last_BK=bounds.last_BK.to(device))
    o_BQHM = bounded_attention(*leaves[:3], bounds, scale=SCALE, sinks_H=leaves[3] if has_sinks else None)
    got = with_gradients(o_BQHM, direction.float().to(device), leaves)
    wide = [x.requires_grad_() for x in wide]
    seen_BSS = seen_by(window, keys, documents_BS)[:, -queries:]
    expected = with_gradients(
        eager_attention(*wide[:3], seen_BSS, SCALE, wide[3] if has_sinks else None), direction, wide
    )
    for name, one, other in zip(("output", "dq", "dk", "dv", "dsinks"), got, expected, strict=False):
        assert_close(one, other, tolerance=1e-5, same_dtype=False, what=name)


@pytest.mark.parametrize(("heads", "widths"), [((2, 2), (192, 128)), ((8, 1), (64, 64))], ids=["latent", "grouped"])
def test_the_heads_of_the_models_are_near_float64_in_16_bits(
    heads: tuple[int, int], widths: tuple[int, int], device: torch.device
) -> None:
    _check_16_bits(1, 130, heads, widths, WINDOWS["window"], random_documents(1, 130), device)


def _check_16_bits(
    rows: int,
    length: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    window: AttentionWindow | None,
    documents_BS: Tensor | None,
    device: torch.device,
    seed: int = 11,
) -> None:
    """In bfloat16 on a GPU; the interpreter multiplies only float16."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    *wide, direction = (x.to(device) for x in _drawn(rows, length, length, heads, widths, seed))
    first_BS = first_keys(None if documents_BS is None else documents_BS.to(device), window, length, device)
    leaves = [x.to(dtype).requires_grad_() for x in wide]
    scale = widths[0] ** -0.5
    o_BQHM = bounded_attention(*leaves[:3], AttentionBounds.of(first_BS, length), scale=scale, sinks_H=leaves[3])
    got = with_gradients(o_BQHM, direction.to(dtype), leaves)
    wide = [x.requires_grad_() for x in wide]
    seen_BSS = seen_by(window, length, documents_BS).to(device)
    expected = with_gradients(eager_attention(*wide[:3], seen_BSS, scale, wide[3]), direction, wide)
    for name, one, other in zip(("output", "dq", "dk", "dv", "dsinks"), got, expected, strict=True):
        assert one.dtype == dtype
        assert_close(one, other, tolerance=0.01, by="norm", same_dtype=False, what=name)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize(
    ("heads", "widths"),
    [((4, 4), (192, 128)), ((16, 2), (64, 64)), ((8, 2), (128, 128)), ((5, 1), (128, 128))],
    ids=str,
)
def test_long_rows_are_near_float64_on_a_gpu(heads: tuple[int, int], widths: tuple[int, int], kind: str) -> None:
    window = WINDOWS[kind] and replace(WINDOWS[kind], size=300)
    generator = torch.Generator().manual_seed(5)
    for seed, length, documents in ((1, 1900, True), (2, 1024, False)):
        documents_BS = (torch.rand(2, length, generator=generator) < 0.005).cumsum(1) if documents else None
        _check_16_bits(2, length, heads, widths, window, documents_BS, torch.device("cuda"), seed)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["row", "window"])
def test_a_captured_pass_follows_the_documents_and_never_waits(kind: str) -> None:
    device, length, heads, widths = torch.device("cuda"), 700, (8, 2), (128, 128)
    *leaves, direction = (x.to(device, torch.bfloat16) for x in _drawn(2, length, length, heads, widths))
    leaves = [x.requires_grad_() for x in leaves]
    documents_BS = random_documents(2, length).to(device)
    scale = widths[0] ** -0.5

    def both_passes() -> list[Tensor]:
        first_BS = first_keys(documents_BS, WINDOWS[kind], length, device)
        bounds = AttentionBounds.of(first_BS, length, WINDOWS[kind])
        o_BQHM = bounded_attention(*leaves[:3], bounds, scale=scale, sinks_H=leaves[3])
        return with_gradients(o_BQHM, direction, leaves)

    both_passes()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            both_passes()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both_passes()
    documents_BS.copy_(documents_BS.flip(0).flip(1).neg())  # other borders
    graph.replay()
    assert_equal(captured, both_passes())


def test_repeated_passes_have_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _set_small_tiles(monkeypatch)
    *leaves, direction = (x.to(device, torch.float16) for x in _drawn(1, 70, 70, (4, 2), (32, 32)))
    leaves = [x.requires_grad_() for x in leaves]
    bounds = AttentionBounds.of(first_keys(random_documents(1, 70).to(device), None, 70, device), 70)
    one, other = (
        with_gradients(bounded_attention(*leaves[:3], bounds, scale=SCALE, sinks_H=leaves[3]), direction, leaves)
        for _ in range(2)
    )
    assert_equal(one, other)


def test_heads_of_one_or_two_powers_of_two_have_kernels() -> None:
    assert [parts_of(width) for width in (64, 128, 192, 48)] == [(64, 0), (128, 0), (128, 64), (32, 16)]
    assert has_kernel(192, 128) and has_kernel(64, 64) and has_kernel(48, 32)
    assert not has_kernel(112, 128) and not has_kernel(64, 96) and not has_kernel(8, 64)


HEADS = {"latent": (16, 16, 192, 128), "64": (64, 8, 64, 64), "128": (32, 4, 128, 128)}
# Bytes of a thread. On Hopper the fastest tiles of the keys' kernel spill some; on Blackwell the compiler spills a few
# although it leaves registers unused.
SPILLS = {"sm_90": 128, "sm_100": 32}


@pytest.mark.often("sm_90-latent-row")
@pytest.mark.parametrize("most", [4096, 128], ids=["row", "window"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_compile_with_few_spills(target: str, heads: tuple[int, int, int, int], most: int) -> None:
    h, g, n, m = heads
    q, k, v, sinks_H = on_meta(4, 4096, h, n), on_meta(4, 4096, g, n), on_meta(4, 4096, g, m), on_meta(h)
    bounds = AttentionBounds(*(on_meta(4, 4096, dtype=torch.int32) for _ in range(2)), most)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks_H)]

    def both_passes() -> None:
        o_BQHM = bounded_attention(*leaves[:3], bounds, scale=SCALE, sinks_H=leaves[3])
        o_BQHM.backward(torch.empty_like(o_BQHM))

    found = compile_launches(target, both_passes)
    assert len(found) == 3
    for compiled in found:
        assert compiled.spills <= SPILLS.get(target, 0) and compiled.shared_bytes <= CHIPS[target].shared_bytes, (
            compiled.summary
        )
        assert compiled.matrix_instructions, compiled.summary
