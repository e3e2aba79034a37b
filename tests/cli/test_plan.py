"""`penstock plan` from the outside, with projections that are made up; and what it really says of a small run."""

import json
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.cli import plan as verb
from penstock.cli.main import main
from penstock.config.load import load_run
from penstock.models.huggingface.config import huggingface_config
from penstock.plan.hardware_file import load_hardware, write_hardware
from penstock.plan.projection import SLOWER, Plan
from penstock.plan.search import Progress
from penstock.plan.search_request import SearchRequest
from tests.cli import answers
from tests.cli.made_plans import GB, MadeUp, projection, refusal, run_of
from tests.models.huggingface.family_models import VARIANTS

ON = ("--on", "16xMI300X")
LAID_OUT = ("debug", "parallel.pipeline=2", "parallel.expert=4", "training.global_batch=64")


class Searched:
    """A search that finds two layouts and refuses some, and keeps what it was asked."""

    def __init__(self) -> None:
        self.questions: list[SearchRequest] = []

    def __call__(self, question: SearchRequest, progress: Progress, workers: object) -> Plan:
        self.questions.append(question)
        progress("looking")
        return Plan(
            model=question.run.name,
            cluster=question.cluster,
            candidates=(projection(cluster=question.cluster), projection(run_of("training.micro_batch=2"), step=12.5)),
            refused=(refusal(SLOWER, "no faster than the best", count=61),),
            considered=63,
        )


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> MadeUp:
    made_up = MadeUp()
    monkeypatch.setattr(verb, "project", made_up)
    return made_up


@pytest.fixture
def searched(planner: MadeUp, monkeypatch: pytest.MonkeyPatch) -> Searched:
    search = Searched()
    monkeypatch.setattr(verb, "search", search)
    return search


shown = partial(answers.printed, "plan")
told_as_json = partial(answers.told_as_json, "plan")
refused = partial(answers.refused, "plan")


def test_a_search_is_asked_what_the_command_line_says(searched: Searched) -> None:
    options = ("--only", "micro_batch=1,cp=2", "--top", "3", "--imbalance", "1.5", "--saving", "conventional")
    batch = ("--global-batch-tokens", "10000")
    text = shown("debug", "model.layers=2", *ON, *options, *batch)
    (question,) = searched.questions
    assert (question.run.model.layers, question.cluster.devices, question.top) == (2, 16, 3)
    assert {name: f"{value}" for name, value in question.fixed.items()} == {"micro_batch": "1", "cp": "2"}
    assert (question.assumptions.imbalance, question.assumptions.saving) == (1.5, "conventional")
    assert question.global_batch == 80  # 78.1 rows of 128, and 16 devices can share 80.
    assert "best: PP2 EP4" in text
    assert "left out: 61 of 63 layouts: 61 are no faster" in text
    assert "1.5 x their even share" in text


def test_a_config_of_hugging_face_is_planned_as_import_makes_it_a_run(
    searched: Searched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs").mkdir()
    Path("theirs/config.json").write_text(json.dumps(huggingface_config(VARIANTS["qwen3-moe"])))
    words = ("training.sequence_length=512", "data.source=synthetic-learnable")
    for target in ("theirs", "theirs/config.json"):
        text = shown(target, *ON, *words)
        assert f"next:  penstock plan {target} {shlex.join(words)} --on 16xMI300X --write best.toml" in text
        run = searched.questions[-1].run
        assert (run.name, run.model, run.training.sequence_length) == ("theirs", VARIANTS["qwen3-moe"], 512)
    answers.printed("import theirs --output mine --config-only", *words)
    assert load_run("mine/run.toml").model_copy(update={"name": "theirs"}) == run
    comparison = shown("--compare", "theirs", "mine/run.toml", "--on", "1xMI300X", words[1])
    assert "theirs" in comparison and len(searched.questions) == 2


def test_forced_balance_and_experts_in_turn_are_even_unless_said_otherwise(searched: Searched) -> None:
    forced = "model.moe.balance.force_load_balance=true"
    assert "get 1.2 x their even share of rows, at most all (--imbalance)" in shown("debug", *ON)
    assert "get 1 x their even share of rows, at most all (model.moe.balance" in shown("debug", forced, *ON)
    text = shown("debug", *ON, "--routing", "in-turn")
    assert "assumed: tokens take the experts in turn" in text and "get 1 x their even share" in text
    shown("debug", *ON, "--routing", "in-turn", "--imbalance", "1.1")
    found = [(one.assumptions.imbalance, one.assumptions.in_turn) for one in searched.questions]
    assert found == [(1.2, False), (1.2, False), (1.0, True), (1.1, True)]


def test_another_trainer_of_a_layout_says_what_is_assumed_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    batch = ("training.precision=bf16", "training.global_batch=64", "--layout", "ep=4")
    ours = told_as_json("debug", *batch, *ON)["candidates"][0]
    theirs = told_as_json("debug", *batch, *ON, "--software", "torchtitan,launch=2")["candidates"][0]
    assert theirs["step_seconds"] > ours["step_seconds"]
    text = shown("debug", *batch, *ON, "--software", "torchtitan,launch=2")
    assert "assumed: torchtitan: dispatch all-to-all, products 1.55" in text and "launch 2.0" in text
    assert "(--software); measured beside ours on one H200" in text
    assert "next:" not in capsys.readouterr().err


def test_overrides_of_a_layout_bind_a_search(searched: Searched) -> None:
    said = ("parallel.expert=4", "training.micro_batch=2", 'recompute.modules=["norm","layer"]', "model.layers=2")
    shown("debug", *said, "dispatch.method=all-gather", "parallel.shard=full", *ON, "--only", "cp=2,ep=4")
    shown("debug", "dispatch.method=auto", "offload.optimizer=false", *ON)
    bound, free = (dict(question.fixed) for question in searched.questions)
    sizes = {"ep": "4", "cp": "2", "micro_batch": "2"}
    assert bound == {**sizes, "recompute": "norm+layer", "dispatcher": "all-gather", "shard": "full"}
    assert free == {"offload": "none"}


def test_a_layout_of_a_file_does_not_bind_a_search(searched: Searched, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "debug"\n[parallel]\nexpert = 4\n')
    shown(str(path), *ON)
    assert [dict(question.fixed) for question in searched.questions] == [{}]


def test_a_layout_that_is_asked_for_comes_with_advice(searched: Searched) -> None:
    words = (*LAID_OUT, *ON, "--layout", "own")
    text = shown(*words)
    assert "advice: PP 2 for a model of" in text and "(small-model-without-pipeline, L11" in text
    told = {one["rule"]: one for one in told_as_json(*words)["advice"]}
    assert told["small-model-without-pipeline"]["changes"] == ["parallel.pipeline=1"]
    assert "advice:" not in shown("debug", *ON)
    assert told_as_json("debug", *ON)["advice"] == []


@pytest.mark.usefixtures("searched")
def test_the_proposed_command_keeps_what_the_answer_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--host-memory", "100.0", "--imbalance", "1.5", "--routing", "in-turn"]
    assert main(["plan", "debug", *ON, *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"{' '.join(words)} --write best.toml")
    assert main(["plan", "debug", *ON]) == 0
    assert not {"--imbalance", "--routing"} & {*capsys.readouterr().out.splitlines()[-1].split()}


def test_an_override_that_needs_the_layout_goes_with_it() -> None:
    sizes = "pp=2,vpp=2,ep=4,schedule=interleaved"
    model = ("deepseek-v2-lite-6l", "model.vocab_size=257", "dispatch.overlap=passes")
    words = (*model, "--on", "8xH200", "--layout")
    assert "asked: PP2 x 2 EP4, interleaved" in shown(*words, sizes)
    assert "refused by passes-stand-beside-each-other" in shown(*words, "ep=8")


def test_json_is_the_contract(searched: Searched) -> None:
    found = told_as_json("debug", *ON)
    assert (found["model"], found["hardware"], found["world"]) == ("debug", "MI300X", 16)
    first = found["candidates"][0]
    assert first["layout"].keys() >= {
        *("pp", "vpp", "ep", "etp", "cp", "tp", "dp", "edp"),
        *("schedule", "micro_batch", "recompute", "sync_free_stage", "dispatcher"),
    }
    assert first["memory"].keys() == {
        *("parameters", "gradients", "master", "moments", "activations"),
        *("buffers", "logits", "reserve", "total", "rank"),
    }
    parts = [size for name, size in first["memory"].items() if name not in ("total", "rank")]
    assert sum(parts) == first["memory"]["total"] == 95 * GB
    assert (first["fits"], first["step_seconds"], first["bubble"]) == (True, 11.2, 0.067)
    (one,) = found["refused"]
    assert (one["layout"], one["rule"], one["count"]) == ({}, SLOWER, 61)
    low, high = found["range"]["tokens_per_second_per_device"]
    assert f"range: {low:,.0f} to {high:,.0f} tokens/s/GPU, as 80% of {found['range']['runs']}" in shown("debug", *ON)


def test_a_layout_is_projected_alone(searched: Searched) -> None:
    found = told_as_json("debug", *ON, "--layout", "pp=2,ep=4,micro_batch=2", "training.global_batch=64")
    assert searched.questions == []
    (one,) = found["candidates"]
    assert (one["layout"]["pp"], one["layout"]["ep"], one["layout"]["dp"], one["layout"]["micro_batch"]) == (2, 4, 8, 2)


def test_a_layout_that_does_not_fit_is_a_candidate_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "project", lambda run, cluster, assumptions: projection(run, cluster, 9.0, 200 * GB))
    assert [one["fits"] for one in told_as_json(*LAID_OUT, *ON, "--layout", "own")["candidates"]] == [False]
    assert "asked: PP2 EP4" in shown(*LAID_OUT, *ON, "--layout", "own")


def test_a_layout_that_cannot_run_is_refused_with_the_rule(planner: MadeUp) -> None:
    words = ("debug", "training.global_batch=64", *ON, "--layout", "ep=16")
    found = told_as_json(*words)
    assert found["candidates"] == []
    (one,) = found["refused"]
    assert (one["rule"], one["layout"]["ep"]) == ("expert-ranks-divide-experts", 16)
    assert "expert-ranks-divide-experts" in shown(*words)
    assert planner.asked == []


def test_the_run_s_own_layout_is_left_as_it_is(planner: MadeUp) -> None:
    shown(*LAID_OUT, *ON, "--layout", "own")
    assert [run for run, _ in planner.asked] == [load_run(LAID_OUT[0], LAID_OUT[1:])]


def test_tokens_of_a_step_become_rows_that_ranks_can_share(planner: MadeUp) -> None:
    shown("debug", *ON, "--layout", "pp=2,ep=4", "--global-batch-tokens", "10000")
    (run, _), *_ = planner.asked
    assert run.training.global_batch == 96  # 78.1 rows of 128, 16 devices share 80, and 8 ranks take 4 at a time.


def test_scaling_starts_from_the_first_candidate(searched: Searched) -> None:
    text = shown("debug", *ON, "--scale", "8,16,32")
    assert "layout: PP2 EP4" in text
    assert "strong scaling: 64 rows" in text
    assert "weak scaling: 64 rows a step on 16 devices" in text
    found = told_as_json("debug", *ON, "--scale", "8,16,32")
    assert [point["asked"]["devices"] for point in found["weak"]] == ["8", "16", "32"]
    assert [point["global_batch"] for point in found["weak"]] == [32, 64, 128]
    assert found["strong"][0]["efficiency"] == 1.0
    assert (found["model"], found["hardware"], found["world"]) == ("debug", "MI300X", 16)


def test_a_sweep_tells_answers_and_refusals(planner: MadeUp) -> None:
    words = (*LAID_OUT, *ON, "--layout", "own", "--sweep", "micro_batch=1,2,8")
    text = shown(*words)
    assert [line.split()[:2] for line in text.splitlines()[3:6]] == [["1", "64"], ["2", "64"], ["8", "64"]]
    found = told_as_json(*LAID_OUT, *ON, "--layout", "own", "--sweep", "cp=2,3")
    assert found["points"][0]["candidate"]["layout"]["cp"] == 2
    assert found["points"][1]["refused"]["rule"] == "ranks-divide-the-sequence"


def test_a_sweep_without_a_layout_searches_each_value_at_the_tokens_of_a_step(searched: Searched) -> None:
    words = ("debug", "training.global_batch=64", *ON)
    text = shown(*words, "--sweep", "parallel.pipeline=1,2", "--only", "ep=4")
    assert [dict(question.fixed) for question in searched.questions] == [{"ep": "4", "pp": n} for n in ("1", "2")]
    assert text.splitlines()[0].endswith("the fastest layout of each parallel.pipeline")
    assert [line.split()[0] for line in text.splitlines()[3:5]] == ["1", "2"] and text.count("PP2 EP4, ") == 2
    searched.questions.clear()
    found = told_as_json(*words, "--sweep", "sequence_length=64,256")
    assert [point["asked"] for point in found["points"]] == [{"sequence_length": "64"}, {"sequence_length": "256"}]
    asked = [(question.run.training.sequence_length, question.global_batch) for question in searched.questions]
    assert asked == [(64, 128), (256, 32)]  # 64 rows of 128
    assert "pp is fixed and swept; got pp=2" in refused(*words, "--only", "pp=2", "--sweep", "pp=1,2")


def test_progress_without_a_terminal_is_a_line_at_most_every_few_seconds(
    searched: Searched, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", "debug", *ON]) == 0
    assert "looking" not in capsys.readouterr().err
    monkeypatch.setattr(verb, "PROGRESS_SECONDS", 0.0)
    assert main(["plan", "debug", *ON, "--json"]) == 0
    out, err = capsys.readouterr()
    assert "looking" in err.splitlines() and json.loads(out) and len(searched.questions) == 2


def test_numbers_of_devices_are_told_with_what_each_leaves_spare(searched: Searched) -> None:
    text = shown("debug", *ON, "--worlds", "16,8")
    rows = [line.split() for line in text.splitlines()[3:5]]
    assert [row[:3] for row in rows] == [["16", "0", "64"], ["8", "8", "64"]]
    assert all("PP2 EP4" in line for line in text.splitlines()[3:5])
    assert [question.cluster.devices for question in searched.questions] == [16, 8]
    found = told_as_json("debug", *ON, "--worlds", "auto")
    assert [point["asked"]["devices"] for point in found["worlds"]] == ["16"]
    assert "--worlds are devices of the cluster; got 32" in refused("debug", *ON, "--worlds", "8,32")


def test_a_training_run_is_told_with_memory_advice_and_what_it_rests_on(planner: MadeUp) -> None:
    words = (*LAID_OUT, *ON, "--layout", "own", "--tokens", "1B", "--watts", "0")
    text = shown(*words)
    assert "phase 1, asked: PP2 EP4, 1f1b" in text and "memory    parameters 10.0 GB" in text
    assert "advice: PP 2 for a model of" in text and "assumed: 0 W of each device" in text
    assert "assumed: the fullest rank's experts get 1.2 x" in text
    assert text.splitlines()[-1].startswith("not measured here: MI300X over nodes")
    found = told_as_json(*words)
    (phase,) = found["phases"]
    assert (found["world"], found["watts"], phase["candidate"]["memory"]["total"]) == (16, 0.0, 95 * GB)
    assert phase["advice"][0]["rule"] in text and found["grounds"][-1] == text.splitlines()[-1]


def test_a_network_is_planned_for_and_told(searched: Searched) -> None:
    text = shown("debug", *ON, "--network", "pod_nodes=1,oversubscription=4,rails=true")
    assert text.startswith("debug on 16 MI300X (2 nodes of 8), pods of 1 node, 4:1 between them, rails, 206.1 GB each")
    assert searched.questions[0].cluster.pod_devices == 8


def test_two_files_are_compared_with_overrides_of_both(planner: MadeUp, tmp_path: Path) -> None:
    for name, rows in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.toml").write_text(f'preset = "debug"\n[training]\nmicro_batch = {rows}\n')
    names = [str(tmp_path / name) for name in ("a.toml", "b.toml")]
    text = shown("training.global_batch=64", *ON, "--compare", *names)
    assert "training.micro_batch  1" in text
    assert {run.training.global_batch for run, _ in planner.asked} == {64}
    found = told_as_json("training.global_batch=64", *ON, "--compare", *names)
    assert {one["field"] for one in found["fields"]} == {"name", "training.micro_batch"}


def test_the_best_is_written_and_loads_as_it_was_projected(
    capsys: pytest.CaptureFixture[str], searched: Searched, tmp_path: Path
) -> None:
    path = tmp_path / "best.toml"
    assert main(["plan", "debug", *ON, "--json", "--write", str(path)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["world"] == 16
    assert captured.err.startswith(f"written to {path}\n")
    assert load_run(str(path)) == run_of()
    assert path.read_text().startswith("# planned by penstock for 16 MI300X (2 nodes of 8), 206.1 GB each\n# PP2 EP4")
    assert [one.name for one in tmp_path.iterdir()] == ["best.toml"]


def test_where_nothing_fits_one_device_a_run_with_state_in_host_memory_is_told(
    planner: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(question: SearchRequest, progress: Progress, workers: object) -> Plan:
        nearest = projection(question.run, question.cluster, activations=300 * GB)
        return Plan(model="debug", cluster=question.cluster, candidates=(), refused=(), considered=1, nearest=nearest)

    monkeypatch.setattr(verb, "search", search)
    words = "offload.optimizer=true offload.gradients=true training.micro_batch=4 'recompute.modules=[]'"
    assert f"would fit: --layout own {words}, data parallel, mb 4" in shown("debug", "--on", "1xMI300X")
    assert "would fit" not in shown("debug", "--on", "1xMI300X", "--only", "micro_batch=4")
    assert "would fit" not in shown("debug", "training.global_batch=8", "--on", "2xMI300X")


@pytest.mark.parametrize(("host", "fits"), [("10", False), ("100", True)])
def test_a_run_needs_the_memory_of_its_host_that_is_said(
    host: str, fits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["offload.optimizer=true", "--on", "1xH200", "--layout", "own", "--host-memory", host, "--json"]
    assert main(["plan", "deepseek-v2-lite-2l", *words]) == 0
    (candidate,) = json.loads(capsys.readouterr().out)["candidates"]
    assert candidate["fits"] is fits


@pytest.mark.parametrize("host", ["inf", "nan", "0.5", "-3", "much"])
def test_a_hosts_memory_that_is_none_is_refused_in_one_line(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "debug", "--on", "1xH200", "--layout", "own", "--host-memory", host]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--host-memory" in line


def test_nothing_is_written_where_nothing_fits(planner: MadeUp, tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    assert "no layout of debug fits" in refused("debug", *ON, "--layout", "ep=16", "--write", path, starts=True)
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_written_by_their_suffix(
    capsys: pytest.CaptureFixture[str], searched: Searched, tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "debug", *ON, "--html", str(page)]) == 0
    text = page.read_text()
    assert "assumed: the fullest rank&#x27;s experts get 1.2 x" in text and "not measured here: MI300X over" in text
    assert f"written to {page}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("debug",), "--on"),
        (ON, "there is nothing to plan"),
        (("nothing", *ON), "no preset is called 'nothing'"),
        (("debug", "--on", "MI300X"), "a cluster is a number of devices"),
        (("debug", "--on", "16xMI999"), "no hardware is called"),
        (("debug", "--on", "9xMI300X"), "9 MI300X cannot be shared evenly among nodes of 8"),
        (("debug", *ON, "--layout", "pq=2"), "a layout has no such part; got pq"),
        (("debug", *ON, "--only", "pp"), "a layout is a list of assignments"),
        (
            ("debug", "parallel.expert=4", *ON, "--only", "ep=2"),
            "differently; got ep=2 and parallel.expert=4; fix: leave one out",
        ),
        (
            ("debug", "parallel.pipeline=2", "pipeline.schedule=interleaved", "dispatch.overlap=passes", *ON),
            "a search looks at no layout with dispatch.overlap; got passes",
        ),
        (("debug", *ON, "--saving", "all"), "'all' is not one of"),
        (("debug", *ON, "--imbalance", "0.5"), "--imbalance"),
        (("debug", *ON, "--imbalance", "inf"), "--imbalance is no number"),
        (("debug", *ON, "--routing", "turn"), "got turn; allowed: router, in-turn, a metrics.jsonl"),
        (("debug", *ON, "--software", "megatron"), "add --layout"),
        (("debug", *ON, "--layout", "own", "--software", "megatorn"), "did you mean megatron?"),
        (("debug", *ON, "--layout", "own", "--software", "own,speed=2"), "--software has no such field"),
        (
            ("debug", *ON, "--layout", "own", "--software", "primus", "--write", "x.toml"),
            "--software has no use for it",
        ),
        (("debug", *ON, "--top", "0"), "--top"),
        (("debug", *ON, "--global-batch-tokens", "0"), "--global-batch-tokens"),
        (("debug", *ON, "--explain", "memory.activation"), "did you mean memory.activations?"),
        (("debug", *ON, "--scale", "8,x"), "--scale is a list of numbers of devices; got 'x'"),
        (("debug", *ON, "--scale", "9"), "9 MI300X cannot be shared evenly"),
        (("debug", *ON, "--sweep", "ep"), "--sweep is no name with values"),
        (("debug", *ON, "--sweep", "ep=2,"), "--sweep is no name with values"),
        (("debug", *ON, "--sweep", "oven=2"), "nothing of this name can be swept"),
        (("debug", *ON, "--sweep", "ep=2", "--scale", "8"), "--scale and --sweep are different questions"),
        (("debug", *ON, "--compare", "debug", "debug"), "--compare names both runs, and TARGET no third; got debug"),
        ((*ON, "--compare", "debug", "nothing"), "no preset is called 'nothing'"),
        (("debug", *ON, "--price", "2", "--mtbf", "100"), "--price is a cost of a training run"),
        (("debug", *ON, "--layout", "ep=8,ep=4"), "a layout names ep twice; got ep=8,ep=4"),
        (("debug", *ON, "--only", "recompute=mo"), "recompute names no such part; got mo"),
        (("debug", *ON, "--only", "sync_free_stage=9"), "sync_free_stage is unknown; got 9; allowed: 0, 1, 2, 3"),
        (
            ("debug", *ON, "--ramp", "1M:1B", "--global-batch-tokens", "9"),
            "and --ramp, without --tokens, say the same batch",
        ),
        (
            ("debug", "training.global_batch=9", *ON, "--global-batch-tokens", "9"),
            "and training.global_batch say the same batch",
        ),
        (("debug", "parallel.expert=2", *ON, "--layout", "ep=4"), "differently; got ep=4 and parallel.expert=2"),
        (("debug", *ON, "--write", "x.json"), "--write writes a file that ends in .toml"),
        (("debug", *ON, "--html", "no/x.html"), "--html: there is no folder no"),
    ],
)
def test_a_mistake_is_one_line(searched: Searched, arguments: tuple[str, ...], told: str) -> None:
    assert told in refused(*arguments)


@pytest.mark.parametrize(
    ("option", "asked"),
    [("--sweep", "micro_batch=1,two"), ("--sweep", "oven=two"), ("--sweep", "rails=two"), ("--scale", "8,two")],
)
def test_what_no_layout_could_answer_is_refused_before_a_search(searched: Searched, option: str, asked: str) -> None:
    assert ("oven" if "oven" in asked else "two") in refused("debug", *ON, option, asked)
    assert not searched.questions


@pytest.mark.slow
def test_a_plan_for_this_machine_trains_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    chip = load_hardware("H200")
    peaks = chip.peaks.model_copy(update={"fp32": 1e12})
    write_hardware(Path("mine.toml"), replace(chip, name="mine", vendor="cpu", peaks=peaks, measured=()))
    short = ("model.layers=2", "training.steps=2", "schedule.warmup_steps=0", "evaluation.rows=0", "device=cpu")
    batch = ("training.global_batch=8", "kernels.experts=reference")
    assert (
        main(["plan", "debug", *short, *batch, "--on", "2xmine.toml", "--layout", "ep=2", "--write", "best.toml"]) == 0
    )
    assert load_run("best.toml").parallel.expert == 2
    assert "asked: EP2, mb 4" in capsys.readouterr().out
    assert main(["train", "best.toml", "--processes", "2"]) == 0
    steps = Path("runs/debug/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps if "loss" in line][-1] == 2
