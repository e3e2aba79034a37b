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


def test_two_recordings_have_a_page_with_a_step_of_each_and_what_changed(tmp_path: Path) -> None:
    slower = tiny()
    for slowed in slower["traceEvents"]:
        if slowed["name"].startswith("ampere"):
            slowed["dur"] *= 2
    a, b = write(tmp_path / "a" / "rank-0.json", tiny()), write(tmp_path / "b" / "rank-0.json", slower)
    page = tmp_path / "page.html"
    assert main(["report", str(a), "--diff", str(b), "--html", str(page)]) == 0
    text = page.read_text()
    assert f"<h1>{a} " in text and f"</span> {b}</h1>" in text
    assert "slower: +0.040 ms in 1 row" in text and "<td class=reason>aten::mm</td>" in text
    assert '"rank 0 A' in text and '"rank 0 B' in text
    assert "warning" not in text
    assert "Medians of 2 and 2 steps. A star" in text and "<td>+0.040*</td>" in text
    slower["distributedInfo"]["rank"] = 1
    assert main(["report", str(a), "--diff", str(write(b, slower)), "--html", str(page)]) == 0
    assert "warning: A is of rank 0, B of rank 1" in page.read_text()
    assert "--diff is of recordings alone" in refused(a, "--diff", b, "--html", page, "--no-plan")


def test_a_page_of_two_recordings_is_beside_the_report_and_has_no_stars_without_steps(tmp_path: Path) -> None:
    """A single time of each is always apart, so a star would say nothing."""
    for folder, factor in (("a", 1), ("b", 2)):
        content = tiny()
        content["traceEvents"] = [one for one in content["traceEvents"] if "ProfilerStep" not in one["name"]]
        for slowed in content["traceEvents"]:
            if slowed["name"].startswith("ampere"):
                slowed["dur"] *= factor
        write(tmp_path / folder / "rank-0.json", content)
    assert main(["report", str(tmp_path / "a"), "--diff", str(tmp_path / "b")]) == 0
    assert [path.name for path in (tmp_path / "a").iterdir() if path.suffix == ".html"] == ["diff.html"]
    text = (tmp_path / "a" / "diff.html").read_text()
    assert "No step is marked" in text and "<td>+0.080</td>" in text
