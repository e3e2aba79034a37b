"""`penstock train --fake-world`: what one rank of many would hold, without any of them."""

import json
import re

import pytest

from tests.cli import answers

UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


@pytest.mark.parametrize(
    ("layout", "world"),
    [("parallel.expert=8", 8), ('parallel.pipeline=4 parallel.expert=2 recompute.modules=["moe"]', 16)],
)
def test_the_total_of_a_rank_is_that_of_its_plan(layout: str, world: int) -> None:
    words = ["deepseek-v2-lite-6l", *layout.split(), "training.global_batch=64"]
    plan = json.loads(answers.printed("plan", *words, "--on", f"{world}xH100", "--layout", "own", "--json"))
    memory = plan["candidates"][0]["memory"]  # of the fullest rank
    printed = answers.printed("train", *words, "--fake-world", f"{world}", "--rank", f"{memory['rank']}")
    number, unit = re.search(r"^total +([\d.]+) (\wB)", printed, re.M).groups()  # type: ignore[union-attr]
    assert float(number) * UNITS[unit] == pytest.approx(memory["total"] - memory["reserve"], rel=5e-3)
