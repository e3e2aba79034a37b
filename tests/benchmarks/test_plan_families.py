"""The page of families: every published preset is in it, and clusters are as small as it says."""

from benchmarks.plan_families import LONG, STATE_BYTES, STATE_SHARE, cases, devices_for
from penstock.config.presets.registry import PRESETS
from tools.families_page import SECTIONS


def test_every_published_preset_has_a_section_and_a_search() -> None:
    shown = [name for presets in SECTIONS.values() for name in presets]
    published = {name for name in PRESETS if not name.startswith(("debug", "moe-"))}
    assert len(shown) == len(set(shown)) and set(shown) == published
    assert {case["model"] for case in cases()} == published - {LONG}


def test_a_cluster_holds_the_state_and_half_of_it_would_not() -> None:
    assert devices_for(600_000_000) == 8, "a node is the least"
    for parameters in (46_702_792_704, 235_093_634_560, 295_000_000_000, 671_026_419_200):
        devices = devices_for(parameters)
        assert devices & (devices - 1) == 0
        assert devices / 2 < parameters * STATE_BYTES / STATE_SHARE <= devices
