"""Presets by name, and variants that keep N layers."""

from collections.abc import Sequence

import pytest

from penstock.base.errors import ConfigError
from penstock.config.model import GroupedQueryAttention
from penstock.config.presets.registry import PRESETS, is_preset, keep_layers, preset
from tests.config.small import unchecked_run


def test_a_preset_is_named_as_it_is_called() -> None:
    assert [name for name in PRESETS if preset(name).name != name or not PRESETS[name].__doc__] == []


def test_a_variant_keeps_the_first_layers_and_everything_else() -> None:
    whole, cut = preset("deepseek-v2-lite"), preset("deepseek-v2-lite-8l")
    assert cut.name == "deepseek-v2-lite-8l"
    assert (cut.model.layers, cut.model.dense_layers) == (8, 1)
    restored = cut.model.model_copy(update={"layers": 27})  # of the whole preset
    assert cut.model_copy(update={"name": whole.name, "model": restored}) == whole


@pytest.mark.parametrize(("layers", "dense_layers"), [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3), (61, 3)])
def test_a_cut_leaves_a_layer_with_experts(layers: int, dense_layers: int) -> None:
    model = preset(f"deepseek-v3-{layers}l").model
    assert (model.layers, model.dense_layers, model.mtp_layers) == (layers, dense_layers, 1)


@pytest.mark.parametrize(
    ("layers", "every", "with_experts"), [(1, 1, [0]), (2, 2, [1]), (5, 2, [1, 3]), (48, 2, range(1, 48, 2))]
)
def test_a_cut_keeps_dense_layers_between_those_with_experts(
    layers: int, every: int, with_experts: Sequence[int]
) -> None:
    model = preset(f"llama4-maverick-{layers}l").model
    assert model.moe is not None
    assert model.moe.moe_layer_freq == every
    assert [layer for layer in range(layers) if not model.is_dense(layer)] == list(with_experts)


def test_a_cut_gives_up_the_first_dense_layers_before_those_in_between() -> None:
    run = preset("llama4-maverick")
    run = run.model_copy(update={"model": run.model.model_copy(update={"dense_layers": 3})})
    cuts = {layers: keep_layers(run, layers).model for layers in (1, 2, 3, 4, 6)}
    found = {layers: [layer for layer in range(layers) if not cut.is_dense(layer)] for layers, cut in cuts.items()}
    assert found == {1: [0], 2: [1], 3: [2], 4: [3], 6: [4]}


@pytest.mark.parametrize("name", ["llama4-scout", "gpt-oss-20b"])
def test_a_cut_keeps_what_each_layer_sees(name: str) -> None:
    whole, cut = preset(name).model.attention, preset(f"{name}-5l").model.attention
    assert isinstance(whole, GroupedQueryAttention)
    assert isinstance(cut, GroupedQueryAttention)
    assert [cut.is_global(layer) for layer in range(5)] == [whole.is_global(layer) for layer in range(5)]


def test_a_cut_dense_model_stays_dense() -> None:
    dense = unchecked_run(["model.moe=none", "model.dense_layers=4"])
    model = keep_layers(dense, 2).model
    assert (model.layers, model.dense_layers) == (2, 2)


@pytest.mark.parametrize("layers", [0, 62])  # deepseek-v3 has 61
def test_a_cut_to_layers_that_are_not_there_is_refused(layers: int) -> None:
    with pytest.raises(ConfigError) as raised:
        preset(f"deepseek-v3-{layers}l")
    assert str(raised.value) == f"deepseek-v3-{layers}l: cannot keep {layers} layers of deepseek-v3; allowed: 1 to 61"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("debgu", "debug"),
        ("deepseek-v2-light", "deepseek-v2-lite"),
        ("deepseek-v33-8l", "deepseek-v3-8l"),
        ("zz", None),
    ],
)
def test_an_unknown_preset_is_refused_with_the_nearest_name(name: str, meant: str | None) -> None:
    with pytest.raises(ConfigError) as raised:
        preset(name)
    fix = "" if meant is None else f"; fix: did you mean {meant}?"
    allowed = f"{', '.join(PRESETS)}, or one of them with -8l to keep 8 layers"
    assert str(raised.value) == f"no preset is called {name!r}; allowed: {allowed}{fix}"


@pytest.mark.parametrize(("name", "known"), [("debug", True), ("debug-99l", True), ("debug-l", False), ("x-2l", False)])
def test_names_of_presets_are_known(name: str, known: bool) -> None:
    assert is_preset(name) is known
