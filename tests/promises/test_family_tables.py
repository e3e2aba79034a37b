"""The table of families judges by the numbers alone, and the page of models names every preset and family."""

from typing import Any

from penstock.config.presets.registry import PRESETS
from penstock.models.huggingface.families import FAMILIES
from tools.family_tables import parity, parity_verdict
from tools.models_page import models_page


def _figures(gradient: float) -> dict[str, Any]:
    return {"logits": 1e-7, "loss": 0.0, "gradient": gradient, "weight": "blocks.12.attention.query.weight"}


def _result(gradient: float) -> dict[str, Any]:
    models = [
        {"model": "mixtral", "family": "mixtral", "plain": _figures(2e-6), "packed": _figures(gradient)},
        {"model": "mixtral, window", "family": "mixtral", "plain": _figures(1e-6), "packed": _figures(1e-6)},
    ]
    tolerances = {"logits": 2e-5, "loss": 1e-5, "gradient": 1e-4}
    return {"environment": {"transformers": "5.23.0"}, "numbers": {"tolerances": tolerances, "models": models}}


def test_a_model_passes_if_both_kinds_of_rows_do() -> None:
    assert parity_verdict(_result(3e-6)).startswith("2 of 2 models of 1 families pass, beside transformers 5.23.0.")
    failed = parity_verdict(_result(3e-4))
    assert failed.startswith("1 of 2 models")
    assert failed.endswith("The largest differences: logits 1.0e-07, loss 0.0e+00, gradient 3.0e-04.")


def test_weights_are_named_within_their_layer() -> None:
    row = parity(_result(3e-6)).splitlines()[3]
    assert row == (
        "| mixtral | 1.0e-07 | 2.0e-06 | `attention.query.weight` | 1.0e-07 | 3.0e-06 | `attention.query.weight` |"
    )


def test_the_page_names_every_preset_and_family() -> None:
    page = models_page()
    assert all(f"| `{name}` |" in page for name in PRESETS)
    assert all(f"| {name} |" in page for name in FAMILIES)
