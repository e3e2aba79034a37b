"""No bad call ends in a traceback, takes long, takes much memory, or leaves anything half-written (bad_calls.py)."""

from pathlib import Path

import pytest

from tests.cli.bad_calls import attempt, calls
from tests.cli.bad_material import make_material

CALLS = calls(400)
SAMPLE = CALLS[::40]  # 10 calls, each in a process of its own


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    make_material(folder)
    return folder


def test_calls_are_the_same_every_time_and_reach_every_verb() -> None:
    assert calls(400) == CALLS
    assert len({call.words for call in CALLS}) == 400
    verbs = (
        "init train import export launch data config layout plan trace doctor report ladder preflight calibrate kernels"
    )
    assert set(verbs.split()) <= {call.verb for call in CALLS}


def test_a_sample_of_bad_calls_ends_with_one_line_and_code_2(material: Path) -> None:
    bad = [ended for ended in (attempt(call, material) for call in SAMPLE) if ended.faults]
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.slow
@pytest.mark.timeout(3600)  # 400 processes
def test_400_bad_calls_end_with_one_line_and_code_2(material: Path) -> None:
    bad = [ended for ended in (attempt(call, material) for call in CALLS) if ended.faults]
    assert not bad, "\n".join(map(str, bad))
