"""Folders that `transformers` saves, with edited keys and tensors: its model, or a refusal that names the edit."""

from collections import Counter

import pytest

from tests.models.huggingface.draws import EXPLAINED, drawn, outcome

CHUNK = 15


@pytest.mark.parametrize("first", range(0, 300, CHUNK))
def test_an_edited_folder_is_the_model_of_transformers_or_is_refused_by_name(first: int) -> None:
    outcomes = {seed: outcome(drawn(seed)) for seed in range(first, first + CHUNK)}
    assert {seed: text for seed, text in outcomes.items() if text not in EXPLAINED} == {}
    counts = Counter(outcomes.values())
    assert counts["equal"] and counts["refused"], counts
