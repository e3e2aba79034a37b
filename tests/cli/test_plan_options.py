"""Each two options of `penstock plan`: both change the answer, or one line refuses them by their names."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from penstock.base.errors import PenstockError
from penstock.cli import plan as verb
from penstock.cli import plan_request
from penstock.cli.plan_request import USES, PlanOptions
from penstock.config.run import Run, with_values
from penstock.plan.assumptions import Assumptions
from penstock.plan.hardware import Cluster
from penstock.plan.projection import Plan, Projection
from penstock.plan.search_request import SearchRequest
from tests.cli import answers
from tests.cli.made_plans import projection

Values = Mapping[str, Any]

OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "on": ("16xMI300X", "32xMI300X"),
    "target": ("two.toml", "three.toml"),
    "overrides": (["optimizer.beta1=0.8"], ["optimizer.beta1=0.7"]),
    "layout": ("ep=4", "ep=2"),
    "only": ("ep=4", "ep=2"),
    "global_batch_tokens": (32_768, 65_536),
    "top": (3, 5),
    "network": ("pod_nodes=1,oversubscription=2", "pod_nodes=1,oversubscription=4"),
    "host_memory": (100.0, 200.0),
    "explain": ("time", "hardware"),
    "compare": (("two.toml", "three.toml"), ("three.toml", "two.toml")),
    "scale": ("8,16", "8,32"),
    "worlds": ("8", "16"),
    "sweep": ("micro_batch=1,2", "micro_batch=1,4"),
    "imbalance": (1.5, 1.6),
    "routing": ("in-turn", "router"),
    "saving": ("conventional", "run"),
    "software": ("megatron", "primus"),
    "tokens": ("1B", "2B"),
    "ramp": ("1M:2M", "1M:3M"),
    "stages": ("256:1M", "256:2M"),
    "price": (3.0, 0.0),
    "watts": (500.0, 0.0),
    "mtbf": (50_000.0, 3.0),
    "json": (True, False),
    "write": (Path("a.toml"), Path("b.toml")),
    "force": (True, False),
    "html": (Path("a.html"), Path("b.html")),
    "png": (Path("a.png"), Path("b.png")),
    "svg": (Path("a.svg"), Path("b.svg")),
}
"""Two values of each option, by its field."""

NEEDED: Mapping[str, Values] = {
    "software": {"layout": "ep=4"},
    "force": {"write": Path("a.toml")},
    **{name: {"tokens": "1T"} for name in ("price", "watts", "mtbf")},
}
"""What an option is given with."""


def drawn(*given: object) -> float:
    """A share of 1 that follows from values and is another one for other values."""
    return crc32(repr(given).encode()) / 2**32


def made_up(run: Run, cluster: Cluster, assumptions: Assumptions) -> Projection:
    return projection(run, cluster, step=1e-3 * (0.5 + drawn(run, cluster, assumptions)))


def searched(question: SearchRequest, *_: object) -> Plan:
    """As many candidates as are asked for; their runs follow from all else that is asked."""
    rows = question.global_batch or question.run.training.global_batch
    asked = drawn(question.run, question.cluster, sorted(question.fixed.items()), question.assumptions)
    run = with_values(question.run, training={"global_batch": rows}, optimizer={"epsilon": 1e-8 * (1 + asked)})
    best = made_up(run, question.cluster, question.assumptions)
    candidates = (best,) * question.top
    return Plan(model=run.name, cluster=question.cluster, candidates=candidates, refused=(), considered=99)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Values, bool], str]:
    """The output and the files of a plan that computes nothing, or the line that refuses it."""
    for number, name in ((2, "two"), (3, "three")):
        text = f'preset = "debug"\n[model]\nlayers = {number}\n[training]\nmicro_batch = 1\nglobal_batch = 64\n'
        Path(f"{name}.toml").write_text(text)
    runs, clusters = cache(verb.load_run_or_model), cache(plan_request.parse_cluster)
    replaced = {
        "project": made_up,
        "search": searched,
        "meta_workers": nullcontext,
        "load_run_or_model": lambda name, overrides, is_whole: runs(name, overrides, is_whole=is_whole),
        "write_page": lambda plan, path, more, grounds: path.write_text(f"{plan} {more} {grounds}"),
        "write_image": lambda plan, path, more: [path] * bool(path.write_text(f"{plan} {more}")),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(verb, name, function)
    monkeypatch.setattr(plan_request, "parse_cluster", clusters)
    monkeypatch.setattr(plan_request, "find_browser", lambda: "")
    files = [value for name in ("write", "html", "png", "svg") for value in OPTIONS[name]]

    def outcome(values: Values, is_there: bool) -> str:
        for path in files:
            path.unlink(missing_ok=True)
            if is_there:
                path.touch()
        try:
            text = answers.written(partial(verb.plan, **values))
        except PenstockError as error:
            return f"error: {error}"
        return text + "".join(f"{path}: {path.read_text()}" for path in files if path.exists())

    return outcome


def option(name: str) -> str:
    return "TARGET" if name == "target" else f"--{name.replace('_', '-')}"


def test_the_options_are_those_of_the_verb_and_of_the_table() -> None:
    names = [field.name for field in fields(PlanOptions)]
    assert names == list(OPTIONS)
    known = {*map(option, names), "--routing FILE"}
    assert known >= {*USES, *(name for use in USES.values() for name in (*use.never, *use.needs))}


def test_each_of_two_options_changes_the_answer_or_both_are_refused(answer: Callable[[Values, bool], str]) -> None:
    faults = []
    for pair in combinations(OPTIONS, 2):
        needed = {name: value for one in pair for name, value in NEEDED.get(one, {}).items()}
        base = {"on": "16xMI300X", **needed}
        if "compare" not in pair:
            base["target"] = "two.toml"
        first, second, third = (
            answer(base | {name: OPTIONS[name][at] for name, at in zip(pair, which, strict=True)}, "force" in pair)
            for which in ((0, 0), (1, 0), (0, 1))
        )
        if first.startswith("error: "):
            named = [any(option(part) in first for part in (name, *NEEDED.get(name, ()))) for name in pair]
            if not all(named) or "\n" in first:
                faults.append(f"{pair}: {first}")
        elif first in (second, third):
            faults.append(f"{pair}: {pair[0] if first == second else pair[1]} changes nothing")
    assert not faults, "\n".join(faults)
