"""Our models equal the code of `transformers`: logits, loss and every gradient, in plain rows and in packed ones."""

from pathlib import Path

import pytest

from tests.models.huggingface.family_models import VARIANTS
from tests.models.huggingface.parity import TOLERANCES, compare


@pytest.mark.often("*-packed", "mixtral-plain", "deepseek-v3-plain")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_loss_and_every_gradient_equal_transformers(name: str, packed: bool, tmp_path: Path) -> None:
    found = compare(VARIANTS[name], tmp_path, packed=packed)
    too_large = {figure: found for figure, allowed in TOLERANCES.items() if not getattr(found, figure) <= allowed}
    assert not too_large, f"allowed: {TOLERANCES}"
