"""Every TOML of docs/data.md describes a run."""

import re
from pathlib import Path

import pytest

from penstock.config.load import load_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_settings_that_are_shown_can_be_loaded(tmp_path: Path, block: str) -> None:
    path = tmp_path / "shown.toml"
    path.write_text(f'preset = "debug"\n{block}', encoding="utf-8")
    assert load_run(str(path)).name == "shown"


def test_settings_are_shown() -> None:
    assert len(BLOCKS) >= 4
