"""The Grafana dashboard: valid JSON, panels that do not overlap, and questions that the endpoint answers."""

import json
import re
from itertools import pairwise
from typing import Any

from penstock.train.prometheus import ENDPOINT_FIELDS, EXPORTED, EXPORTED_OF_LAYER
from tools.grafana import ACROSS, dashboard

BOARD: dict[str, Any] = json.loads(dashboard())
PANELS: list[dict[str, Any]] = BOARD["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
NAMES = {*EXPORTED.values(), *EXPORTED_OF_LAYER.values(), *ENDPOINT_FIELDS}


def test_every_question_is_about_what_is_told_of_the_chosen_run() -> None:
    for expression in EXPRESSIONS:
        names = re.findall(r"penstock_\w+", expression)
        assert names, expression
        assert set(names) <= NAMES
        assert len(re.findall(r'penstock_\w+\{run="\$run"\}', expression)) == len(names), expression
        assert expression.count("(") == expression.count(")")


def test_every_legend_names_a_label_that_there_is() -> None:
    legends = [target["legendFormat"] for panel in PANELS for target in panel["targets"]]
    assert {name for legend in legends for name in re.findall(r"\{\{(\w+)\}\}", legend)} == {"phase", "layer"}


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
