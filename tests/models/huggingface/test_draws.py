"""Folders that `transformers` saves, with edited keys and tensors: its model, or a refusal that names the edit."""

from collections import Counter

import pytest

from tests.models.huggingface.draws import CHOSEN, DRAWS, EXPLAINED, NEWEST, drawn, outcome

PARTS = 6
LATER = range(DRAWS, DRAWS + 48)
NEW = range(NEWEST, NEWEST + 72)
OTHERS = [seed for seed in range(DRAWS) if seed not in CHOSEN]


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("seeds", [CHOSEN, OTHERS, LATER, NEW], ids=["chosen", "others", "later", "new"])
@pytest.mark.often("chosen*", "later*", "new*")
def test_an_edited_folder_is_the_model_of_transformers_or_is_refused_by_name(seeds: list[int], part: int) -> None:
    outcomes = {seed: outcome(drawn(seed)) for seed in seeds[part::PARTS]}
    assert {seed: text for seed, text in outcomes.items() if text not in EXPLAINED} == {}
    counts = Counter(outcomes.values())
    assert counts["equal"] and counts["refused"], counts


def test_chosen_draws_edit_every_key_and_damage_tensors_in_every_way() -> None:
    chosen, others = ([drawn(seed) for seed in seeds] for seeds in (CHOSEN, OTHERS))
    for names in (lambda draw: draw.keys, lambda draw: (draw.damage,), lambda draw: (draw.family.model_type,)):
        assert {name for draw in others for name in names(draw)} <= {name for draw in chosen for name in names(draw)}
