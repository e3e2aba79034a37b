"""`penstock report` from the outside: where the page goes, and one line where it cannot."""

from functools import partial
from pathlib import Path

from penstock.cli.main import main
from tests.cli import answers
from tests.report.made_runs import run_folder
from tests.trace.tiny import tiny, write

refused = partial(answers.refused, "report")


def test_the_page_stands_in_the_folder_of_the_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "first")
    assert answers.outcome("report", folder)[2].startswith(f"written to {folder / 'report.html'}\n")
    assert "<title>first</title>" in (folder / "report.html").read_text()


def test_another_place_and_devices_may_be_named(tmp_path: Path) -> None:
    trace = write(tmp_path / "rank-0.json", tiny())
    assert main(["report", str(trace), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 1e6
    folder = run_folder(tmp_path / "first")
    assert main(["report", str(folder), "--on", "1xH200"]) == 0
    assert "Dashed: the capacity of H200" in (folder / "report.html").read_text()


def test_a_page_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "first")
    (folder / "metrics.jsonl").write_text("{\n{}\n")
    assert "is no JSON" in refused(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml", "metrics.jsonl"]
