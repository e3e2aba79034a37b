"""How a plan is printed, from made-up figures."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.plan_print import conclusion, explain, origins_text, print_plan, sizes_text
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.projection import MEMORY, SLOWER, Advice, Plan, error_text
from tests.cli import answers
from tests.cli.made_plans import GB, plan, projection, refusal, run_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED, PUBLISHED = RESULTS / "projection-h200.json", RESULTS / "plan-published.json"


def printed(shown: Plan) -> list[str]:
    return answers.written(print_plan, shown, ["rows are even"]).splitlines()


def cells(line: str) -> list[str]:
    return re.split(r"  +", line)


def explained(shown: Plan, topic: str) -> list[str]:
    return answers.written(explain, shown, topic).splitlines()


def test_the_conclusion_says_layout_time_speed_and_memory_of_what_there_is() -> None:
    assert conclusion(projection()) == (
        "PP2 EP4, 1f1b, mb 4, all-to-all, recompute none: 11.2 s a step, 46 tokens/s/GPU, 95.0 GB of 206.1 GB"
    )


def test_what_does_not_fit_says_by_how_much_and_which_part_is_largest() -> None:
    told = conclusion(projection(activations=200 * GB))
    assert "does not fit: 38.9 GB too much on rank 0, which needs 245.0 GB of 206.1 GB (activations 200.0 GB)" in told


def test_a_plan_begins_with_question_and_answer_and_a_column_for_each_choice_that_differs() -> None:
    lines = printed(plan(projection(), projection(run_of("training.micro_batch=2"), step=12.5)))
    assert lines[0] == "debug on 16 MI300X (2 nodes of 8), 206.1 GB each"
    assert lines[1] == f"best: {conclusion(projection())}"
    assert lines[2].startswith("range: ")
    assert lines[4].split() == (
        ["layout", "micro-batch", "step", "tokens/s/GPU", "MFU", "bubble", "exposed", "memory", "left"]
    )
    assert " ".join(lines[5].split()) == "1 PP2 EP4 4 11.2 s 46 32.1% 6.7% 34.0 ms 95.0 GB 111.1 GB"
    assert lines[6].split()[:5] == ["2", "PP2", "EP4", "2", "12.5"]
    assert lines[7] == ("all: schedule 1f1b, recompute none, sync-free stage 0, dispatcher all-to-all, shard optimizer")


def test_the_best_is_told_by_component_and_by_part_of_the_step() -> None:
    text = "\n".join(printed(plan(projection())))
    assert "batch     64 rows of 128 = 8,192 tokens a step: 8 x 2 micro-batches of 4" in text
    assert "parameters 10.0 GB, gradients 20.0 GB, master 5.00 GB, moments 10.0 GB, activations 50.0 GB; rank 0" in text
    assert "passes 10.7 s, waiting 0 s, update 500 ms; rank 0, which waits least" in text


def test_layouts_that_are_left_out_are_counted_by_reason_and_illegal_ones_by_rule() -> None:
    refused = (
        refusal("ep-divides", "EP 3 does not divide 64 experts", ep=3, pp=None),
        refusal("heads-divide", "TP 3 does not divide 128 heads", count=21, tp=3),
        refusal(MEMORY, "more than the memory of a device", count=40),
        refusal(SLOWER, "no faster than the best", count=1000),
    )
    lines = printed(plan(projection(), refused=refused))
    told = "left out: 1,062 of 1,063 layouts: 40 do not fit, 1,000 are no faster, 22 are illegal"
    at = lines.index(told)
    assert cells(lines[at + 2]) == ["heads-divide", "21", "TP3", "TP 3 does not divide 128 heads"]
    assert lines[at + 3].split()[:3] == ["ep-divides", "1", "EP3"]


def test_advice_of_a_search_has_the_speed_without_it() -> None:
    told = Advice(rule="tensor-only-to-fit", reason="TP 2 cuts matrices", source="L8")
    refused = (refusal(SLOWER, "no faster", count=9),)
    slow, none = replace(told, without=955.4), told
    lines = printed(replace(plan(projection(), refused=refused), advice=(slow, none)))
    assert "advice: TP 2 cuts matrices (tensor-only-to-fit, L8); without it: 955 tokens/s/GPU" in lines
    assert "advice: TP 2 cuts matrices (tensor-only-to-fit, L8); no layout without it was found to fit" in lines


def test_layouts_within_the_margin_and_the_nearest_one_are_told() -> None:
    refused = (refusal(SLOWER, "no faster", count=9),)
    lines = printed(replace(plan(projection(), refused=refused), close=(projection(step=9.0),)))
    assert any(line.startswith("may not fit: ") and line.endswith(" left") for line in lines)
    lines = printed(replace(plan(refused=refused), nearest=projection(), helps=("32 devices, such as PP8",)))
    assert any(line.startswith("nearest: ") for line in lines) and "would fit: 32 devices, such as PP8" in lines


def test_a_search_without_proof_says_so_in_its_first_line() -> None:
    refused = (refusal(SLOWER, "no faster", count=9),)
    for gap, words in ((0.0, "best: "), (0.123, "12.3% faster may exist: "), (2.8, "up to 3.8 x as fast may exist: ")):
        line = printed(replace(plan(projection(), refused=refused), gap=gap))[1]
        assert line.startswith("best found; not proved: up to " if gap else "best: ") and words in line


def test_nothing_that_fits_is_an_answer() -> None:
    assert printed(plan())[1] == "nothing fits: no grid of 16 devices has the sizes that are asked for"
    refused = (refusal("memory", "moments exceed by 1.0 GB", 7, pp=2), refusal("ep-divides", "EP 3 does not", ep=3))
    lines = printed(plan(refused=refused))
    assert lines[1] == "nothing fits, of 8 layouts"
    assert any("moments exceed by 1.0 GB" in line for line in lines)
    assert printed(plan(refused=refused[:1]))[1] == "nothing fits, of 7 layouts", (
        "a search, also with one reason for all"
    )


def test_one_layout_that_is_refused_gets_its_whole_reason() -> None:
    reason = f"{'long ' * 40}end"
    lines = printed(plan(refused=(refusal("ep-divides", reason, ep=3),)))
    assert lines[1] == f"asked: EP3: refused by ep-divides: {reason}"


def test_a_plan_says_what_it_rests_on() -> None:
    lines = printed(plan(projection()))
    assert "assumed: rows are even" in lines
    figures = next(
        line
        for line in lines
        if line.startswith("figures of MI300X: reported memory, host, efficiency, 3 of 11 collectives")
    )
    assert "; assumed kernels, overhead, host link, 8 of 11 collectives (" in figures
    assert lines[-1].startswith("not measured here: MI300X over nodes; error against 1 published runs of such chips")


@pytest.mark.parametrize(
    ("on", "told"),
    [
        ("4xH200", "error against 45 runs on H200: memory"),
        (
            "16xH200",
            "not measured here: H200 over nodes; error against 27 published runs of such chips by others: speed",
        ),
        ("8xH100", "not measured here: H100 in one node; error against 8 published runs"),
        ("256xB300", "not measured here: B300 over nodes; error against 13 published runs"),
        ("8xA100", "not measured here: A100 in one node, nor compared with a run of others"),
    ],
)
def test_an_error_is_that_of_the_chip_on_one_node_or_on_many(on: str, told: str) -> None:
    assert error_text(parse_cluster(on)).startswith(told)


def test_a_bubble_is_told_with_its_formula_and_what_the_rank_with_the_most_work_adds() -> None:
    (line,) = (line for line in printed(plan(projection())) if line.startswith("bubble "))
    # Passes take 10.7 s and 9.7 s of 10.7 s; two ranks, two micro-batches.
    assert "0.0% while the pipeline fills and drains" in line and "4.7% for the rank with the most work" in line
    assert "((p - 1) / (p - 1 + m v) of equal stages without messages: 33.3%)" in line
    alone = run_of("parallel.pipeline=1")
    assert not any(line.startswith("bubble ") for line in printed(plan(projection(alone))))


def test_measured_hardware_is_told_from_assumed_and_one_node_has_no_network() -> None:
    told = origins_text(parse_cluster("4xH200")).split("; ")
    assert told[0] == "measured kernels, memory, host, efficiency, 5 of 6 collectives"
    assert told[-1].startswith("assumed overhead, host link")


@pytest.mark.parametrize(
    "given", [{"pp": 24, "vpp": 4, "ep": 8, "cp": 2, "tp": 1}, {"ep": 8, "pp": 24, "vpp": 4, "cp": 2}]
)
def test_sizes_stand_in_one_order_without_those_of_one(given: dict[str, object]) -> None:
    assert sizes_text(given) == "CP2 PP24 x 4 EP8"


def test_sizes_that_nobody_settled_are_not_taken_for_one() -> None:
    assert sizes_text({"pp": None, "ep": 1}) == "any"
    assert sizes_text(dict.fromkeys(("tp", "cp", "pp", "ep", "etp"), 1)) == "one rank"
    assert sizes_text(dict.fromkeys(("tp", "cp", "pp", "ep", "etp"), 1) | {"dp": 8}) == "DP8"


def test_memory_is_explained_by_place() -> None:
    lines = explained(plan(projection()), "memory")
    head = next(line for line in lines if line.startswith("component"))
    assert head.split() == ["component", "rank", "0", "rank", "8"]
    assert "activations  50.0 GB             49.0 GB" in lines
    assert "total        95.0 GB             94.0 GB" in lines


def test_a_long_pipeline_is_explained_with_a_row_for_each_place() -> None:
    one = projection()
    many = replace(one, memories=tuple(replace(one.memory, rank=rank) for rank in range(6)))
    lines = explained(plan(many), "memory")
    assert sum(line.startswith("rank ") for line in lines) == 6
    assert next(line for line in lines if line.startswith("place")).split()[:2] == ["place", "parameters"]


def test_activations_are_explained_by_module_and_moment() -> None:
    lines = explained(plan(projection()), "memory.activations")
    assert "other micro-batches  47.0 GB  94.0%" in lines
    assert "layers.1.moe         2.00 GB  4.0%" in lines
    assert "together             50.0 GB" in lines
    assert "rank 8  forward of stage 0  47.0 GB                 49.0 GB" not in lines
    assert any(line.startswith("rank 8  forward of stage 0") and line.endswith("49.0 GB") for line in lines)


def test_time_is_explained_by_place_and_adds_up() -> None:
    lines = explained(plan(projection(step=12.0)), "time")
    rows = {line.split("  ")[0]: cells(line)[1:] for line in lines}
    assert rows["experts"] == ["9.00 s", "8.00 s"]
    assert rows["waiting"] == ["0 s", "1.00 s"]
    assert rows["together"] == ["12.0 s", "12.0 s"]
    assert rows["(exposed)"] == ["34.0 ms", "34.0 ms"]


def test_every_refusal_can_be_read_in_full() -> None:
    reason = "x" * 200
    lines = explained(plan(refused=(refusal("memory", reason, pp=2), refusal("memory", "other", pp=4))), "refused")
    assert any(line.endswith(reason) for line in lines)
    assert any(line.endswith("other") for line in lines)


def test_the_sources_of_the_hardware_can_be_read() -> None:
    lines = explained(plan(projection()), "hardware")
    assert any(line.startswith("memory ") and "rocm-smi" in line for line in lines)


@pytest.mark.parametrize("topic", ["memory", "memory.activations", "time"])
def test_without_a_candidate_there_is_nothing_to_explain(topic: str) -> None:
    with pytest.raises(ValueError, match="no layout fits"):
        explain(plan(), topic)
