"""Files for people and tools outside: the image, how to cite, what changed, the Grafana dashboard."""

import json
import re
import tomllib
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from penstock.parallel.launch.environment import LaunchFacts
from penstock.parallel.launch.jobs import Job, kubernetes_manifest
from penstock.train.sinks import ENDPOINT_FIELDS, EXPORTED, EXPORTED_OF_LAYER
from tools.grafana import ACROSS, dashboard

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Name and words of every instruction of the Dockerfile, lines joined where a backslash continues them."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(name, words.strip()) for name, _, words in found]


def reaches_the_image(name: str) -> bool:
    """.dockerignore lets a file of the top folder through; its last line that fits decides."""
    outcome = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch(name, line.removeprefix("!")):
            outcome = line.startswith("!")
    return outcome


def test_the_image_begins_at_a_base_that_can_be_chosen_and_keeps_its_pytorch() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "ARG" and found[0][1].startswith("BASE=") and found[1] == ("FROM", "${BASE}")
    assert any(name == "RUN" and "--constraint /tmp/torch.txt" in words for name, words in found)


def test_what_the_image_copies_is_there_and_reaches_it() -> None:
    copied = [word for name, words in instructions() if name == "COPY" for word in words.split()[:-1]]
    assert "penstock" in copied
    for name in copied:
        assert (ROOT / name).exists()
        assert reaches_the_image(name), f".dockerignore keeps {name} out"
    assert not reaches_the_image("tests")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", project["readme"], *project["license-files"]} <= {*copied}, "building reads these"


def test_the_image_works_where_the_manifest_mounts_its_volume() -> None:
    facts = LaunchFacts(vendor="nvidia", world=8, local_world=8)
    job = Job(name="a", words=("train", "debug"), nodes=1, gpus=8, cpus=None, restarts=0, facts=facts)
    manifest = kubernetes_manifest(job, "registry/penstock:1", "shared")
    *_, last = [words for name, words in instructions() if name == "WORKDIR"]  # where the image starts
    assert re.search(rf'workingDir"?: "?{last}\b', manifest)


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["cff-version"], cited["license"]) == ("1.2.0", project["license"])
    assert {"message", "title", "authors"} <= set(cited)
    assert all(set(author) == {"name"} for author in cited["authors"])
    assert f"## [{cited['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert cited["version"] == project.get("version", cited["version"])


BOARD: dict[str, Any] = json.loads(dashboard())
PANELS: list[dict[str, Any]] = BOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAMES = {*EXPORTED.values(), *EXPORTED_OF_LAYER.values(), *ENDPOINT_FIELDS}


def test_every_question_is_about_what_is_told_of_the_chosen_run() -> None:
    for expression in EXPRESSIONS:
        names = re.findall(r"penstock_\w+", expression)
        assert names and set(names) <= NAMES, expression
        assert len(re.findall(r'penstock_\w+\{run="\$run"\}', expression)) == len(names), expression
        assert expression.count("(") == expression.count(")")


def test_every_legend_names_a_label_that_there_is() -> None:
    legends = [target["legendFormat"] for panel in PANELS for target in panel["targets"]]
    assert {name for legend in legends for name in re.findall(r"\{\{(\w+)\}\}", legend)} == {"phase", "layer", "kind"}


def test_panels_have_numbers_of_their_own_and_lie_side_by_side() -> None:
    assert [panel["id"] for panel in PANELS] == list(range(1, len(PANELS) + 1))
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] + place["w"] <= ACROSS for place in places)
    for left, right in pairwise(places):
        assert right["y"] == left["y"] + left["h"] or (right["y"] == left["y"] and right["x"] == left["x"] + left["w"])


def test_the_run_and_where_its_data_lie_can_be_chosen() -> None:
    (variable,) = BOARD["templating"]["list"]
    assert (variable["name"], variable["definition"]) == ("run", "label_values(penstock_run_info, run)")
    assert {panel["datasource"]["uid"] for panel in PANELS} == {f"${{{BOARD['__inputs'][0]['name']}}}"}
