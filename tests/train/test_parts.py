"""What ranks of one layout write, ranks of any other read."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from penstock.layout.sharding import LocalSlice
from penstock.parallel.shard import ShardedTensor, whole
from penstock.train import manifest
from penstock.train.manifest import fill_parts, write_parts
from tests.examples import examples
from tests.train.layouts import Layout, ranks_of, write_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@st.composite
def tensors_and_layouts(draw: st.DrawFn) -> tuple[Tensor, Layout, Layout]:
    """A tensor, and two layouts whose cuts divide it. Rows may be fewer than the ranks that divide them."""
    cuts = st.tuples(st.integers(1, 3), st.integers(1, 2))
    dims = draw(st.integers(0, 3))
    first, second = (
        draw(st.lists(cuts, min_size=dims, max_size=dims)),
        draw(st.lists(cuts, min_size=dims, max_size=dims)),
    )
    sizes = [draw(st.integers(1, 2)) * a * b * c * d for (a, b), (c, d) in zip(first, second, strict=True)]
    values = torch.randint(0, 2**15, sizes, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    tensor = values.to(draw(st.sampled_from(DTYPES)))
    layouts = [
        Layout(tuple(c for c, _ in one), tuple(b for _, b in one), draw(st.integers(1, 4)), draw(st.integers(1, 2)))
        for one in (first, second)
    ]
    return tensor, layouts[0], layouts[1]


@examples(30)  # each waits for the disk
@given(tensors_and_layouts())
def test_what_one_layout_wrote_every_other_reads(case: tuple[Tensor, Layout, Layout]) -> None:
    tensor, before, after = case
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = write_ranks(folder, [{"w": part} for part in before.parts(tensor)])
        for expected in after.parts(tensor):
            target = torch.zeros_like(expected.tensor)
            fill_parts(
                folder,
                written.tensors,
                {"w": ShardedTensor(tensor=target, shape=expected.shape, pieces=expected.pieces)},
            )
            assert torch.equal(target, expected.tensor)


def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(64.0).view(8, 8)
    written = write_ranks(tmp_path, ranks_of({"w": tensor}, {"w": Layout((4, 1), (1, 1))}, 4))
    read: list[tuple[str, str, tuple[slice, ...]]] = []

    class Spy:
        def __init__(self, path: Path, framework: str) -> None:
            self.name, self.file = path.name, safe_open(path, framework)

        def __enter__(self) -> "Spy":
            return self

        def __exit__(self, *error: object) -> None: ...

        def get_slice(self, key: str) -> Any:
            return SpySlice(self, key)

    class SpySlice:
        def __init__(self, spy: Spy, key: str) -> None:
            self.spy, self.key = spy, key

        def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
            read.append((self.spy.name, self.key, index))
            return self.spy.file.get_slice(self.key)[index]

    monkeypatch.setattr(manifest, "safe_open", Spy)
    target = torch.zeros(4, 4)
    fill_parts(
        tmp_path,
        written.tensors,
        {"w": ShardedTensor(tensor=target, shape=(8, 8), pieces=(LocalSlice((0, 0), (1, 2), (4, 4)),))},
    )
    assert torch.equal(target, tensor[1:5, 2:6])
    columns = slice(2, 6)
    assert read == [
        ("tensors-00000-00000.safetensors", "w[0:2, 0:8]", (slice(1, 2), columns)),
        ("tensors-00001-00000.safetensors", "w[2:4, 0:8]", (slice(0, 2), columns)),
        ("tensors-00002-00000.safetensors", "w[4:6, 0:8]", (slice(0, 1), columns)),
    ]


def test_a_rank_that_writes_nothing_leaves_no_file_and_says_what_it_holds(tmp_path: Path) -> None:
    written = write_parts(tmp_path, {"w": whole(torch.ones(3), writes=False), "n": whole(torch.ones(0, 2))}, 5)
    assert list(tmp_path.iterdir()) == []
    assert {name: one.kind for name, one in written.tensors.items()} == {"w": "float32 [3]", "n": "float32 [0, 2]"}
    assert not any(one.rectangles for one in written.tensors.values())


def test_files_hold_as_many_tensors_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FILE_BYTES", 100)
    sizes = [10, 15, 1, 60, 5, 20]  # floats: 40 60 | 4 | 240 | 20 80
    tensors = {str(index): torch.full((size,), float(index)) for index, size in enumerate(sizes)}
    written = write_parts(tmp_path, {name: whole(tensor) for name, tensor in tensors.items()}, 1)
    files = [next(iter(one.rectangles.values())) for one in written.tensors.values()]
    assert [int(file[14:19]) for file in files] == [0, 0, 1, 2, 3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written.files) == sorted(set(files))
    into = {name: whole(torch.zeros_like(tensor)) for name, tensor in tensors.items()}
    fill_parts(tmp_path, written.tensors, into)
    assert all(torch.equal(into[name].tensor, tensor) for name, tensor in tensors.items())
