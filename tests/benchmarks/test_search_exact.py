"""Layouts that must be slower by the work of their ranks alone hide none that is faster."""

import pytest

from benchmarks.search_agrees import layouts_of
from benchmarks.search_exact import played
from penstock.config.load import load_run
from penstock.plan.candidates import SearchSpace
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.search_request import SearchRequest, neutral_sizes


def test_what_work_alone_makes_slower_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.search_exact.CHECKED", 3)
    run, cluster = load_run("debug"), parse_cluster("4xH200")
    request = SearchRequest(run=run, cluster=cluster, fixed={"cp": "1", "tp": "1"})
    layouts = layouts_of(SearchSpace(neutral_sizes(request, run), run, request.fixed), 20, seed=5)
    slower, fitting, fastest, best = played(run, cluster, layouts, all_of_them=False)
    assert (fastest, best) == played(run, cluster, layouts, all_of_them=True)[2:]
    assert slower >= 6 and fitting + slower <= len(layouts)
