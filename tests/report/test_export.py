"""Pictures become files that other programs can read, or one line says why not."""

import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.base.errors import PicturesError
from penstock.plan.projection import Plan
from penstock.report.curves import Curve, CurveAxes, curves_figure
from penstock.report.export import write_image, write_images
from penstock.report.page import plan_figures


def test_without_a_browser_the_error_says_what_to_install(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> str | None:
        return None

    monkeypatch.setattr(shutil, "which", nothing)
    with pytest.raises(PicturesError, match="apt install chromium"):
        write_image(plan, tmp_path / "plan.png")


def test_a_plan_without_candidates_has_no_picture(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PicturesError, match="nothing to draw"):
        write_image(replace(plan, candidates=()), tmp_path / "plan.svg")


def test_a_browser_that_does_not_draw_is_told(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(name: str) -> str | None:
        return "/bin/true"

    monkeypatch.setattr(shutil, "which", blind)
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
def test_a_png_has_as_many_pixels_as_asked_for(browser: str, plan: Plan, tmp_path: Path) -> None:
    (path,) = write_images(plan_figures(plan)[:1], tmp_path, kind="png", theme="dark", width=600, scale=3)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20]) == 1800


@pytest.mark.slow
def test_pictures_of_what_ifs_are_among_the_files(browser: str, plan: Plan, tmp_path: Path) -> None:
    curve = Curve(name="</div>", xs=[1, 2], ys=[1.0, None])
    more = [curves_figure("sweep", "A <sweep>", 'of "x"', CurveAxes(x="x", y="y"), [curve])]
    paths = write_image(replace(plan, candidates=()), tmp_path / "what if.svg", more=more)
    assert [path.name for path in paths] == ["what if-sweep.svg"] == [path.name for path in tmp_path.iterdir()]
    assert "A <sweep>" in "".join(ElementTree.parse(paths[0]).getroot().itertext())
