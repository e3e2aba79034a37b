"""A page holds everything that it needs, says what the plan says, and is drawn without an error."""

import re
import shutil
import sys
from dataclasses import fields, replace
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from plotly.graph_objects import Figure as CheckedFigure

from penstock import __version__
from penstock.base.errors import PicturesError
from penstock.base.origin import UNKNOWN, commit_of_code
from penstock.config.load import load_run
from penstock.layout.schedules import schedule
from penstock.plan.asked_layout import field_label
from penstock.plan.projection import Layout, Plan, Refusal
from penstock.report import frame
from penstock.report.figure import THEMES, Figure, plotly_json
from penstock.report.page import (
    Curve,
    candidates_table,
    curves_figure,
    page,
    plan_figures,
    scaling_figure,
    write_image,
    write_images,
    write_page,
)
from tests.report.looking import looked_at
from tests.report.plans import too_large, with_schedule

LOOKING = """
  Object.assign(found, { paper: {}, bars: 0, outlines: 0, texts: [] });
  for (const element of document.querySelectorAll(".figure")) {
    found.paper[element.id] = element._fullLayout.paper_bgcolor;
    found.bars += element.querySelectorAll(".bars .point").length;
  }
  const timeline = document.getElementById("timeline-1");
  if (timeline) {
    found.outlines = timeline.querySelectorAll(".scatterlayer .js-fill").length;
    found.texts = [...timeline.querySelectorAll(".textpoint")].map((text) => text.textContent);
    const { xaxis, yaxis } = timeline._fullLayout, frame = timeline.getBoundingClientRect();
    const box = timeline.data.find((trace) => /^(backward|input)/.test(trace.name));
    const clientX = frame.left + xaxis._offset + xaxis.c2p((box.x[0] + box.x[1]) / 2);
    const clientY = frame.top + yaxis._offset + yaxis.c2p((box.y[0] + box.y[2]) / 2);
    timeline.dispatchEvent(new MouseEvent("mousemove", { clientX, clientY }));
    found.hovered = timeline.querySelector(".tip").innerText;
    found.pointed = box.meta.names[0];
    Plotly.Fx.hover(document.getElementById("memory"), [{ curveNumber: 1, pointNumber: 0 }]);
    found.memory = document.querySelector("#memory .hoverlayer").textContent;
  }
"""
"""What these tests want to know of a page of a plan."""


ORIGIN = re.compile('<footer class="faint">(.*)</footer>')


def what_ifs() -> list[Figure]:
    """One of each picture that a plan does not have by itself."""
    scaling = Curve(name="weak", xs=[8, 16], ys=[10.0, 9.0])
    curve = Curve(name="a", xs=[1, 2, 4], ys=[1.0, None, 2.0], notes=["x", "y", "z"])
    return [
        scaling_figure("scaling", "Scaling", "", [scaling]),
        curves_figure("curves", "Curves", "", [curve], x="x", y="y"),
    ]


def test_plotly_knows_every_word_of_every_picture(plan: Plan) -> None:
    for figure in [*plan_figures(plan), *what_ifs()]:
        for theme in THEMES.values():
            picture = plotly_json(figure)
            CheckedFigure({"data": picture["data"], "layout": picture["layout"] | {"template": {"layout": theme}}})


def test_a_page_fetches_nothing_and_is_the_same_again(plan: Plan, tmp_path: Path) -> None:
    text, again = (page(plan, more=what_ifs()) for _ in range(2))
    assert ORIGIN.sub("", again) == ORIGIN.sub("", text)
    with pytest.raises(PicturesError, match="cannot be written"):
        write_page(plan, tmp_path / "nowhere" / "plan.html")
    assert re.findall(r"https?://[^\"' ]*|\b(?:src|href)=|@import|url\(", text) == []


def test_a_page_names_command_date_version_and_commit(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/penstock", "plan", "my run", "--html", "<p>.html"])
    commit = f", commit {commit_of_code()}" if commit_of_code() != UNKNOWN else ""
    (line,) = ORIGIN.findall(page(plan))
    command, date, version = unescape(line).split(" | ")
    assert (command, version) == ("penstock plan 'my run' --html '<p>.html'", f"Penstock {__version__}{commit}")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", date)
    assert "<p>.html" not in page(plan)


def test_the_page_of_a_large_step_is_small(plan: Plan) -> None:
    large = schedule("interleaved", ranks=16, stages_per_rank=4, micro_batches=64)
    assert len(page(with_schedule(plan, large))) < 6e6


def test_ranks_are_left_out_where_a_step_has_too_many_passes(plan: Plan) -> None:
    large = schedule("1f1b", ranks=16, stages_per_rank=1, micro_batches=1024)
    figure = next(one for one in plan_figures(with_schedule(plan, large)) if one.is_wide)
    names = [name.partition(" \u00b7 ")[0] for name in figure.layout["yaxis"]["ticktext"]]
    assert (names[0], names[-1]) == ("rank 0", "rank 15") and len(names) == 7
    assert "7 of 16 ranks are drawn" in figure.caption
    assert sum(len(trace["x"]) for trace in figure.data if trace.get("meta", {}).get("role") == "boxes") < 6 * 16_000


def test_tables_say_what_the_plan_says(plan: Plan) -> None:
    text = page(plan)
    assert f"{plan.considered:,} layouts looked at" in text
    assert text.count("<td class=memory>") == len(plan.candidates)
    assert f"{plan.candidates[0].time.tokens_per_second_per_device:,.0f}" in text
    assert "layers-divide" in text and "4 layers do not fill &lt;6&gt; stages" in text
    assert text.index("layers-divide") < text.index("activations overflow by 12.3 GB"), "most layouts first"
    many = tuple(Refusal(layout={"pp": pp}, rule="memory", reason=f"{pp}", count=1) for pp in range(2, 32))
    assert "18 more, of 18 layouts" in page(replace(plan, refused=many))
    assert "<h2>Refused</h2>" in text and "<h2>Refused</h2>" not in page(replace(plan, refused=()))


def test_the_table_has_every_field_in_which_candidates_differ(plan: Plan) -> None:
    first = plan.candidates[0]
    named = {field.name: "x" if field.type is str else 7 for field in fields(Layout)}
    twins = [
        first,
        *(replace(first, layout=replace(first.layout, **{name: value})) for name, value in named.items()),
        replace(first, run=load_run("debug", ["training.sequence_length=64"])),
    ]
    table = candidates_table(replace(plan, candidates=tuple(twins)))
    for name in [*named, "training.sequence_length"]:
        assert re.search(f"<th[^>]*>{field_label(name)}</th>", table), name
    rows = [re.sub(r"<td>\d+</td>", "", row, count=1) for row in re.findall("<tr>.*?</tr>", table)[1:]]
    assert len({*rows}) == len(rows) == len(twins)


def test_what_all_candidates_have_is_said_once(plan: Plan) -> None:
    table = candidates_table(replace(plan, candidates=plan.candidates[:1]))
    assert "With: PP 2, " in table and "<th>PP</th>" not in table and "TP 1" not in table


def test_every_tile_of_a_plan_has_a_unit(plan: Plan) -> None:
    tiles = dict(re.findall(r"<dt>([^<]*)</dt><dd[^>]*>([^<]*)</dd>", page(plan)))
    assert tiles["speed"].endswith(" tokens/s/GPU") and tiles["time"].endswith("s per step")
    assert tiles["memory"].count(" GB") == 2 and tiles["MFU"].endswith("%") and tiles["bubble"].endswith("%")


def test_a_name_cannot_end_a_script(plan: Plan) -> None:
    text = page(replace(plan, model="</script><b>"))
    assert "<b></h1>" not in text and "</script><b>" not in text
    curve = Curve(name="</script>", xs=[1], ys=[1])
    assert page(plan, more=[curves_figure("c", "C", "", [curve], x="x", y="y")]).count("</script>") == 3


def test_a_plan_without_candidates_has_a_page(plan: Plan) -> None:
    text = page(replace(plan, candidates=()))
    assert "No layout fits" in text and 'class="figure"' not in text


def test_a_layout_that_was_asked_for_and_does_not_fit_is_marked(plan: Plan) -> None:
    text = page(replace(plan, candidates=(too_large(plan.candidates[0]),)))
    assert 'class="bar over"' in text and "asked for" in text and "fastest" not in text


def test_without_plotly_the_error_says_what_to_install(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda name: None)
    with pytest.raises(PicturesError, match=r"fix: pip install plotly"):
        page(plan)


@pytest.fixture(scope="module")
def light(browser: str, plan: Plan) -> dict[str, Any]:
    """What a browser on a light system makes of a page with every kind of picture."""
    return looked_at(browser, page(plan, more=what_ifs()), LOOKING, "--blink-settings=preferredColorScheme=1")


@pytest.mark.slow
def test_a_page_is_drawn_without_a_complaint(light: dict[str, Any], plan: Plan) -> None:
    figures = plan_figures(plan)
    assert light["errors"] == []
    assert set(light["paper"]) == {figure.name for figure in [*figures, *what_ifs()]}
    bars = [trace for figure in figures for trace in figure.data if trace["type"] == "bar"]
    assert light["bars"] == sum(len(trace["x"]) for trace in bars)
    timeline = next(figure for figure in figures if figure.name == "timeline-1")
    assert light["outlines"] == len(timeline.data)
    labels = [label for trace in timeline.data for label in trace["meta"].get("labels", ())]
    assert sorted(light["texts"]) == sorted(labels), "boxes of a small step all have room for their number"


def test_the_pointer_finds_the_box_under_it(light: dict[str, Any]) -> None:
    name, lane, times, held = light["hovered"].splitlines()
    assert name == light["pointed"] and lane == "rank 0 \u00b7 16% idle"
    assert re.fullmatch(r"from [\d.]+ ms, takes 20 ms", times) and re.fullmatch(r"held: [12](\.0)? GB", held)
    assert "gradients" in light["memory"] and "GB" in light["memory"]


@pytest.mark.slow
def test_a_page_follows_the_readers_system(browser: str, plan: Plan, light: dict[str, Any]) -> None:
    dark = looked_at(browser, page(plan), LOOKING, "--blink-settings=preferredColorScheme=0")
    assert set(light["paper"].values()) == {THEMES["light"]["paper_bgcolor"]}
    assert set(dark["paper"].values()) == {THEMES["dark"]["paper_bgcolor"]}


@pytest.mark.slow
def test_sixteen_ranks_are_drawn(browser: str, plan: Plan) -> None:
    large = schedule("zb-v", ranks=16, stages_per_rank=2, micro_batches=64)
    found = looked_at(browser, page(with_schedule(plan, large)), LOOKING)
    assert found["errors"] == [] and found["outlines"] == 8


def test_without_a_browser_the_error_says_what_to_install(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(PicturesError, match="apt install chromium"):
        write_image(plan, tmp_path / "plan.png")


def test_a_plan_without_candidates_has_no_picture(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PicturesError, match="nothing to draw"):
        write_image(replace(plan, candidates=()), tmp_path / "plan.svg")


def test_a_browser_that_does_not_draw_is_told(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true")
    with pytest.raises(PicturesError, match="did not draw memory, step-time, timeline-1"):
        write_images(plan_figures(plan), tmp_path)


@pytest.mark.slow
def test_every_picture_is_an_svg_that_says_what_it_shows(browser: str, plan: Plan, tmp_path: Path) -> None:
    paths = write_image(plan, tmp_path / "plan.svg")
    assert [path.name for path in paths] == ["plan-memory.svg", "plan-step-time.svg", "plan-timeline-1.svg"]
    for path, figure in zip(paths, plan_figures(plan), strict=True):
        root = ElementTree.parse(path).getroot()
        assert root.attrib["width"] == "1000"
        assert figure.title in "".join(root.itertext())


@pytest.mark.slow
def test_a_png_has_two_pixels_for_each_of_the_figure(browser: str, plan: Plan, tmp_path: Path) -> None:
    (path,) = write_images(plan_figures(plan)[:1], tmp_path, kind="png")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20]) == 2000


@pytest.mark.slow
def test_pictures_of_what_ifs_are_among_the_files(browser: str, plan: Plan, tmp_path: Path) -> None:
    curve = Curve(name="</div>", xs=[1, 2], ys=[1.0, None])
    more = [curves_figure("sweep", "A <sweep>", 'of "x"', [curve], x="x", y="y")]
    paths = write_image(replace(plan, candidates=()), tmp_path / "what if.svg", more=more)
    assert [path.name for path in paths] == ["what if-sweep.svg"] == [path.name for path in tmp_path.iterdir()]
    assert "A <sweep>" in "".join(ElementTree.parse(paths[0]).getroot().itertext())
