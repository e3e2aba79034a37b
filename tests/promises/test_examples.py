"""What people copy works as it stands: the files in examples/, the code of docs/api.md, presets written out."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.config.load import load_run
from penstock.config.presets.registry import PRESETS
from penstock.train.metrics import record
from tests.train.tiny_run import HELD_OUT, step_report

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
COMMAND = re.compile(r"^# +(penstock .*?)(?: +#.*)?$", re.MULTILINE)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which the examples are where a clone has them."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_python(text: str, names: dict[str, Any]) -> None:
    """Execute a block of a document or a notebook."""
    exec(compile(text, "block", "exec"), names)  # noqa: S102


def test_every_example_is_in_the_list_and_says_what_to_type() -> None:
    listed = re.findall(r"\]\(([\w.-]+)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.name != "README.md")
    for path in EXAMPLES.glob("*.toml"):
        assert any(path.name in line for line in COMMAND.findall(path.read_text())), path.name


def test_own_text_trains_one_book(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "Of all the rivers that the traveller crossed, number {} was the widest.\n\n"
    (here / "book.txt").write_text("".join(sentence.format(number) for number in range(6000)))
    assert main(["train", "examples/own-text.toml", "--dry-run"]) == 0, capsys.readouterr().err
    assert "run own-text is new" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("continue-qwen3", 8), ("eight-gpus", 8), ("slurm", 32)),
        *(("amd-v2-lite", 8), ("amd-v2", 32), ("amd-moe-1t", 768), ("amd-moe-2t", 768)),
    ],
)
def test_a_rank_of_a_large_example_can_be_built(
    name: str, ranks: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", f"examples/{name}.toml", "--fake-world", str(ranks), "--rank", str(ranks - 1)]
    assert main(words) == 0, capsys.readouterr().err
    assert f"rank {ranks - 1} of {ranks}" in capsys.readouterr().out
    assert {path.name for path in here.iterdir()} == {"examples"}


def test_the_job_of_slurm_is_what_its_command_prints(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = next(line for line in COMMAND.findall((EXAMPLES / "slurm.toml").read_text()) if "launch" in line)
    (here / "examples" / "slurm.sh").unlink()
    assert main(command.split()[1:]) == 0, capsys.readouterr().err
    assert (here / "examples" / "slurm.sh").read_text() == (EXAMPLES / "slurm.sh").read_text()


def test_the_notebook_trains_and_reads_the_metrics_of_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [record(step_report(step, evaluation=HELD_OUT if step % 2 == 0 else None)) for step in range(1, 7)]
    (here / "runs" / "first").mkdir(parents=True)
    (here / "runs" / "first" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    notebook = json.loads((EXAMPLES / "train.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    names: dict[str, Any] = {}
    for cell in cells:
        of_code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | of_code
        if of_code:
            assert cell["outputs"] == [], "outputs are not kept"
            run_python(
                "".join(cell["source"]).replace("STEPS, WARM_UP, PEAK = 50, 10", "STEPS, WARM_UP, PEAK = 2, 1"), names
            )
    losses = [result.loss for result in names["results"]]
    assert len(losses) == 2 and losses[1] < losses[0]
    out = capsys.readouterr().out
    assert all(text in out for text in ("active for a token", "bits/byte", "layer 1", "tokens/s"))


def test_the_code_of_the_api_page_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "tests" / "trace" / "data" / "dlrm", here / "runs" / "first" / "profile")
    (here / "runs" / "first" / "profile" / "LICENSE").unlink()  # not a trace
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    statements = [line for line in blocks[0].splitlines() if line.strip() and not re.match(r"from |import ", line)]
    assert len(statements) <= 12
    for block in blocks:
        run_python(block, {})
    out = capsys.readouterr().out
    assert re.search(r"loss \d\.\d+ nats/token, gradient norm \d", out)
    assert all(text in out for text in ("s a step", "us\n", "parameters"))


@pytest.mark.parametrize("name", [*PRESETS, "deepseek-v2-lite-8l"])
def test_a_preset_that_is_written_out_is_the_same_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", name, "--toml"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    path = tmp_path / "written.toml"
    path.write_text(out, encoding="utf-8")
    assert load_run(str(path)) == load_run(name)
