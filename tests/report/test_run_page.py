"""The page of a run opens offline, is drawn without a complaint in light and dark, and does what a reader wants."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from plotly.graph_objects import Figure as CheckedFigure

from penstock.base.errors import HardwareError, RunFolderError, TraceError
from penstock.report.figure import THEMES, channels, plotly_json
from penstock.report.frame import asset
from penstock.report.run_evidence import RunEvidence, gather
from penstock.report.run_page import run_page, sections_of, summary, write_run_page
from tests.report.looking import contrast, looked_at
from tests.report.made_runs import host_folder, metrics_line, piped_folder, run_folder, traced_folder, with_world
from tests.trace.synthetic import Job, make

MOST_BYTES = 6e6

UNIT = re.compile(r"\d ?([kMBT] )?(steps?|tokens|nats/token|tokens/s/[CG]PU|[m\u00b5]?s per step|%|[kMGT]?B)$")
"""How a tile ends."""

ACTING = """
  const pause = (ms) => new Promise((wake) => setTimeout(wake, ms));
  const figure = (name) => document.getElementById(name);
  const figures = [...document.querySelectorAll(".figure")];
  found.paper = figures.map((one) => [one.id, one._fullLayout.paper_bgcolor]);
  found.empty = figures.filter((one) => !one.querySelector("svg path")).map((one) => one.id);
  found.wide = document.documentElement.scrollWidth - innerWidth;

  // Point at a box of the timeline.
  const timeline = figure("timeline"), { xaxis, yaxis } = timeline._fullLayout;
  const place = (time, level) => {
    const frame = timeline.getBoundingClientRect();
    const x = frame.left + xaxis._offset + xaxis.c2p(time), y = frame.top + yaxis._offset + yaxis.c2p(level);
    return { clientX: x, clientY: y, bubbles: true, cancelable: true, buttons: 0, view: window };
  };
  const boxes = timeline.data.find((trace) => trace.meta?.role === "boxes");
  const middle = place((boxes.x[0] + boxes.x[1]) / 2, (boxes.y[0] + boxes.y[2]) / 2);
  timeline.dispatchEvent(new MouseEvent("mousemove", middle));
  found.pointed = timeline.querySelector(".tip").innerText.split("\\n");
  found.box = boxes.meta.names[0];

  // Drag over the first tenth of it, then click twice to see all again.
  const drag = timeline.querySelector(".nsewdrag"), whole = xaxis.range[1];
  const press = (kind, share) => {
    const target = kind === "mousedown" ? drag : document.querySelector(".dragcover") ?? document;
    target.dispatchEvent(new MouseEvent(kind, { ...place(whole * share, -2 * share), buttons: 1 }));
  };
  press("mousedown", 0);
  press("mousemove", 0.05);
  press("mousemove", 0.1);
  press("mouseup", 0.1);
  await pause(400);
  found.zoomed = timeline._fullLayout.xaxis.range[1] / whole;
  await Plotly.relayout(timeline, { "xaxis.range": [0, whole] });

  // Choose another rank of the flame, open a block, and hover over curves and squares.
  const choice = document.querySelector("select.choice");
  if (choice) {
    choice.selectedIndex = 1;
    choice.dispatchEvent(new Event("change"));
    await pause(300);
    found.chosen = figure("flame")._fullData.filter((trace) => trace.visible === true).map((trace) => trace.name);
  }
  const sector = [...figure("flame").querySelectorAll("g.slice")][1];
  found.sectors = figure("flame").querySelectorAll("g.slice").length;
  sector.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  await pause(1200);
  const opened = figure("flame")._fullData.find((trace) => trace.visible === true);
  found.opened = opened.labels[opened.ids.indexOf(opened.level)];
  for (const name of ["loss", "experts", "waiting"]) {
    if (!figure(name)) continue;
    Plotly.Fx.hover(figure(name), name === "loss" ? [{ curveNumber: 0, pointNumber: 1 }] : { xval: 1, yval: 1 });
    found[name] = figure(name).querySelector(".hoverlayer").textContent;
  }
"""
"""Acts like a reader."""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> RunEvidence:
    return gather(traced_folder(tmp_path_factory.mktemp("traced") / "first"))


@pytest.fixture(scope="module")
def light(browser: str, traced: RunEvidence) -> dict[str, Any]:
    return looked_at(browser, run_page(traced), ACTING, "--blink-settings=preferredColorScheme=1")


def test_plotly_knows_every_word_of_every_picture(tmp_path: Path, traced: RunEvidence) -> None:
    piped = gather(piped_folder(tmp_path / "piped"), on="2xH200")
    for found in (traced, piped, gather(host_folder(tmp_path / "host"))):
        for figure in (one for part in sections_of(found) for one in part.figures):
            picture = json.loads(json.dumps(plotly_json(figure), allow_nan=False))
            for theme in THEMES.values():
                CheckedFigure({"data": picture["data"], "layout": picture["layout"] | {"template": {"layout": theme}}})


def test_the_page_has_ten_parts_and_a_way_to_each_that_has_content(traced: RunEvidence) -> None:
    text = run_page(traced)
    assert len(sections_of(traced)) == 11
    full = [part.name for part in sections_of(traced) if part.figures or part.cards]
    assert re.findall(r'class="part" id="part-(\w+)"', text) == [*full, "missing"]
    assert re.findall(r'<a href="#(part-\w+)"', text) == re.findall(r'class="part" id="(part-\w+)"', text)


def test_the_page_fetches_nothing_and_is_small(traced: RunEvidence) -> None:
    text = run_page(traced)
    assert re.findall(r"https?://[^\"' ]*|\b(?:src)=|@import|url\(", text) == []
    assert len(text) < MOST_BYTES


@pytest.mark.slow
def test_it_is_drawn_without_a_complaint(light: dict[str, Any], traced: RunEvidence) -> None:
    assert light["errors"] == []
    names = [figure.name for part in sections_of(traced) for figure in part.figures]
    assert [name for name, _ in light["paper"]] == names
    wanted = {"loss", "gradient", "speed", "step", "memory", "timeline", "flame", "waiting", "bytes", "experts"}
    assert wanted <= set(names)
    assert light["empty"] == [] and light["wide"] <= 0


def test_a_reader_points_zooms_chooses_opens_and_hovers(light: dict[str, Any]) -> None:
    assert light["pointed"][0] == light["box"]
    assert light["pointed"][1].startswith("rank 0") and "takes" in light["pointed"][2]
    assert light["zoomed"] == pytest.approx(0.1, abs=0.02)
    assert light["chosen"] == ["rank 1"] and light["sectors"] > 10
    assert light["opened"] == "forward"
    assert "train 6.5000" in light["loss"]
    assert "x the mean" in light["experts"]
    assert "waited for 1" in light["waiting"] and "ms" in light["waiting"]


@pytest.mark.slow
def test_it_follows_the_readers_system(browser: str, light: dict[str, Any], tmp_path: Path) -> None:
    found = gather(piped_folder(tmp_path / "run"), on="2xH200")
    dark = looked_at(browser, run_page(found), ACTING, "--blink-settings=preferredColorScheme=0")
    assert dark["errors"] == [] and dark["empty"] == []
    assert {paper for _, paper in light["paper"]} == {THEMES["light"]["paper_bgcolor"]}
    assert {paper for _, paper in dark["paper"]} == {THEMES["dark"]["paper_bgcolor"]}


def test_a_run_without_traces_says_what_to_record(browser: str, tmp_path: Path) -> None:
    text = run_page(gather(run_folder(tmp_path / "run", device="NVIDIA H200")))
    assert text.count("No step was traced; record some steps: penstock train") == 1
    assert "profile.start=5 profile.steps=2" in text and "Memory, Timeline, Flame, Roofline" in text
    assert "Times are of the plan" in text and "penstock train debug" in text
    found = looked_at(browser, text, "found.figures = document.querySelectorAll('.figure svg.main-svg').length;")
    assert found["errors"] == [] and found["figures"] > 0


def test_a_run_on_a_cpu_has_a_page(browser: str, tmp_path: Path) -> None:
    text = run_page(gather(host_folder(tmp_path / "run", ranks=2)))
    assert (
        "no operator runs in 67.0% of the step" in text and "aten::addmm" in text and "on 2 x AMD EPYC, EP2 DP2" in text
    )
    assert looked_at(browser, text, "")["errors"] == []


def test_a_run_that_made_no_step_has_a_page_without_empty_parts(tmp_path: Path) -> None:
    text = run_page(gather(run_folder(tmp_path / "run", steps=0)))
    assert re.findall(r'class="part" id="part-(\w+)"', text) == ["setting", "missing"]
    assert text.count("No step of the run is recorded") == 1 and ">Loss, Speed, Goodput<" in text
    assert "<td></td>" not in text and 'class="faint"></p>' not in text


def test_traces_alone_are_enough_and_have_no_heading_for_what_only_runs_record(tmp_path: Path) -> None:
    found = gather(make(Job()).write(tmp_path / "traces"))
    assert found.run is None and found.lines == () and found.verdict is not None
    assert "no metrics" in found.lacks.steps and found.speed_unit == "tokens/s/GPU"
    shown = re.findall(r'class="part" id="part-(\w+)"', run_page(found))
    assert "verdict" in shown and not {"loss", "speed"} & {*shown}


def test_every_tile_has_a_unit(traced: RunEvidence, tmp_path: Path) -> None:
    cpu = gather(run_folder(tmp_path / "run", device="AMD EPYC", mfu=None))
    assert summary(cpu)["speed"] == "2,048 tokens/s/CPU"
    for name, text in [*summary(traced).items(), *summary(cpu).items()]:
        assert name == "wall" or UNIT.search(text), (name, text)


def test_no_wall_is_green_and_its_words_can_be_read() -> None:
    css = asset("page.css")
    grounds = re.findall(r"\.wall[ .{][^}]*?background: (#[0-9a-f]{6});", css)
    assert len(grounds) == 3
    for ground in grounds:
        red, green, blue = channels(ground)
        assert green < max(red, blue) and contrast("#ffffff", ground) >= 4.5
    over = re.findall(r"--over: (#[0-9a-f]{6});", css)
    papers = [theme["paper_bgcolor"] for theme in THEMES.values()]
    assert all(contrast(text, paper) >= 4.5 for text, paper in zip(over, papers, strict=True))


@pytest.mark.slow
def test_many_ranks_and_many_steps_fit_into_a_page(browser: str, tmp_path: Path) -> None:
    job = make(Job(ranks=72, experts=72, steps=1, layers=8, hot_rank=5))
    folder = run_folder(tmp_path / "run", steps=1)
    lines = [metrics_line(step, layers=30) for step in range(1, 6_001)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job.write(folder / "profile")
    text = run_page(gather(folder, plans=False))
    assert len(text) < MOST_BYTES
    assert "64 of 72 recorded ranks" in text and "A point is the mean of 6 recorded steps" in text
    assert looked_at(browser, text, "")["errors"] == []


def test_names_that_others_wrote_are_only_text(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", device="</script><b>x")
    text = run_page(gather(folder))
    assert "<b>x" not in text and "&lt;b&gt;x" in text
    for _ in range(2):  # the second page replaces the first
        write_run_page(gather(folder), folder / "report.html")
    clock = re.compile(r"\d\d:\d\d UTC")  # the page says when it was written
    assert clock.sub("", (folder / "report.html").read_text()) == clock.sub("", text)
    assert {path.name for path in folder.iterdir()} == {"config.toml", "metrics.jsonl", "starts.jsonl", "report.html"}


def test_a_run_without_a_trace_is_told_how_to_record_one(tmp_path: Path) -> None:
    found = gather(run_folder(tmp_path / "run"))
    assert found.answer is None and "run/config.toml profile.start=5 profile.steps=2" in found.lacks.trace
    assert "--on names the devices" in found.lacks.plan
    assert "nothing else to judge by" in found.lacks.verdict
    assert len(found.lines) == 12


def test_a_missing_plan_has_a_reason(tmp_path: Path) -> None:
    known = gather(run_folder(tmp_path / "known", device="NVIDIA H200"), plans=False)
    assert known.projection is None and "--no-plan" in known.lacks.plan
    unknown = gather(run_folder(tmp_path / "unknown", device="Some CPU"))
    assert "no hardware file is of Some CPU" in unknown.lacks.plan
    folder = with_world(run_folder(tmp_path / "odd", "parallel.pipeline=2", "training.global_batch=8"), 2)
    assert "no plan on 3 x H200" in gather(folder, on="3xH200").lacks.plan


def test_the_device_of_a_start_finds_its_hardware_file_unless_the_user_names_hardware(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", device="NVIDIA H200")
    found, other = gather(folder), gather(folder, on="1xMI300X")
    assert found.projection is not None and found.projection.cluster.hardware.name == "H200"
    assert found.verdict is not None and found.judged.source == "plan"
    assert '<p class="faint">penstock train debug | 2026-01-01 00:00:00 UTC</p>' in run_page(found)
    assert other.projection is not None and other.projection.cluster.hardware.name == "MI300X"
    with pytest.raises(HardwareError):
        gather(folder, on="1xNOTHING")


def test_traces_of_devices_are_judged(traced: RunEvidence) -> None:
    assert [one.rank for one in traced.ranks] == [0, 1, 2, 3] and not traced.is_host
    assert traced.verdict is not None and traced.verdict.bottleneck == "communication"
    assert traced.projection is not None and traced.lacks.plan == ""


def test_traces_of_a_cpu_are_judged(tmp_path: Path) -> None:
    found = gather(host_folder(tmp_path / "run", ranks=2))
    assert found.is_host and len(found.ranks) == 2
    assert found.verdict is not None and found.verdict.bottleneck == "host"
    assert found.judged.operators[0].name == "aten::addmm"


def test_an_empty_folder_and_a_damaged_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no trace"):
        gather(tmp_path)
    folder = run_folder(tmp_path / "run")
    (folder / "profile").mkdir()
    (folder / "profile" / "rank-0.json").write_text('{"traceEvents": [')
    with pytest.raises(TraceError):
        gather(folder)


@pytest.mark.parametrize("file", ["metrics.jsonl", "starts.jsonl"])
def test_a_damaged_file_of_a_run_is_refused(tmp_path: Path, file: str) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / file).write_text("{\n{}\n")
    with pytest.raises(RunFolderError, match="is no JSON"):
        gather(folder)


def test_the_critical_path_stands_beside_the_timeline_with_the_rows_of_the_command_line(tmp_path: Path) -> None:
    found = gather(traced_folder(tmp_path / "run"), plans=False)
    (part,) = [part for part in sections_of(found) if part.name == "timeline"]
    ((title, html),) = part.cards
    assert title == "Critical path" and found.answer is not None
    row = found.answer.path.rows()[0]
    assert f"<td>{row.rank}</td>" in html and f"<td>{row.total_us / 1e3:,.2f} ms</td>" in html
    assert row.rank == 2, "the rank with hot experts"
    cpu = sections_of(gather(host_folder(tmp_path / "cpu", ranks=1)))
    assert not any(part.cards for part in cpu if part.name == "timeline")


def test_the_wall_clock_of_all_processes_is_a_bar_and_goodput_a_key_figure(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=4)
    assert "Goodput" not in summary(gather(folder, plans=False))
    lines: list[dict[str, Any]] = [
        {"begin": 1000.0, "step": 0, "queued": 0.0},
        {"end": 1100.0, "step": 4, "seconds": {"start": 20.0, "training": 80.0}},
        {"begin": 1150.0, "step": 2, "queued": 30.0},
        {"end": 1200.0, "step": 4, "seconds": {"training": 50.0}},
    ]
    (folder / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = gather(folder, plans=False)
    assert found.wall_seconds == {"training": 90.0, "start": 20.0, "lost": 40.0, "queued": 30.0, "down": 20.0}
    assert summary(found)["goodput"] == "45.0%"
    (part,) = [part for part in sections_of(found) if part.name == "goodput"]
    (figure,) = part.figures
    assert {bar["name"]: bar["x"][0] for bar in figure.data} == pytest.approx(
        {kind: seconds / 60 for kind, seconds in found.wall_seconds.items()}, rel=1e-3
    )
    assert figure.caption.startswith("Goodput 45.0%: training of steps that are kept, over 3:20")
