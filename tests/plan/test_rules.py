"""Rules of a plan: each refuses what it should and nothing beside it, and says what the config would say."""

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.devices import PACKAGED
from penstock.base.errors import ConfigError, KernelError
from penstock.config.fit import grid_of, smallest_world
from penstock.config.parallel import RECOMPUTABLE
from penstock.config.rules import RULES as CONFIG_RULES
from penstock.config.run import Run
from penstock.config.tree import build, merge, parse_overrides
from penstock.kernels.tuning import named_device
from penstock.layout.schedules import SCHEDULES
from penstock.models.kernels import kernel_choices, most_sync_free
from penstock.models.rank_model import embedding_places
from penstock.moe.dispatch.collective import AllGatherDispatcher, AllToAllDispatcher, HierarchicalDispatcher
from penstock.moe.dispatch.symmetric import SymmetricDispatcher
from penstock.moe.layer import MoE
from penstock.parallel.axes import make_axes
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group
from penstock.plan.assumptions import device_of
from penstock.plan.hardware import Cluster
from penstock.plan.hardware_file import load_hardware
from penstock.plan.meta_rank import Target, make_meta_rank
from penstock.plan.rules import LEGAL, RULES, Rule, Sizes, advice, config_refusal, illegal, rule_name, sizes_of
from tests.config.small import SMALL, unchecked_run
from tests.examples import examples
from tests.plan.rule_cases import CASES, DENSE, PLAIN, V3, Case
from tools.pages import known_names, rules_of_others

BY_NAME = {rule.name: rule for rule in RULES}
H200 = load_hardware("H200")
IDENTIFIER = re.compile(r"\b[LRDOMGP]\d+\b")
COUNTS = {"L": 18, "R": 17, "D": 10, "O": 13, "M": 16, "G": 12, "P": 6}  # rules of others, by topic

DISPATCHERS = {
    AllGatherDispatcher: "all-gather",
    AllToAllDispatcher: "all-to-all",
    HierarchicalDispatcher: "hierarchical",
    SymmetricDispatcher: "symmetric",
}

WHOLE_NODES = ((2, 2, 1), (8, 4, 1), (16, 8, 2))
"""Ranks, and how many share the experts and each expert, such that nodes of 8 hold equal parts."""

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
SIZE = st.sampled_from((1, 1, 1, 1, 2, 2, 4, 3))


def sizes_for(run: Run, world: int) -> Sizes:
    """Of a run on H200s."""
    return sizes_of(run, Cluster(devices=world, hardware=H200))


def test_every_rule_has_a_name_of_its_own_and_a_case() -> None:
    assert len(BY_NAME) == len(RULES)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in BY_NAME)
    assert {case.rule for case in CASES} == set(BY_NAME)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_has_something_against_what_it_is_about_and_nothing_against_its_neighbour(case: Case) -> None:
    rule = BY_NAME[case.rule]
    against, passes = replace(PLAIN, **case.against), replace(PLAIN, **case.passes)
    reason = rule.check(against)
    assert reason is not None and case.says in reason and "\n" not in reason
    assert rule.check(passes) is None


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_change_that_a_rule_proposes_can_be_made(rule: Rule) -> None:
    build(Run, merge(Run, SMALL.model_dump(), parse_overrides(Run, rule.fix)))


def test_a_layout_of_whole_models_is_projected_and_nothing_is_told() -> None:
    alone = replace(PLAIN, global_batch=1024)
    assert illegal(alone) is None and advice(alone) == []


def test_a_layout_is_only_refused_if_it_cannot_run() -> None:
    wasteful = replace(PLAIN, tp=16)
    assert illegal(wasteful) is None and "tensor-inside-node" in [rule.name for rule, _ in advice(wasteful)]
    impossible = illegal(replace(PLAIN, tp=3))
    assert impossible is not None and impossible[0].name == "sizes-divide-the-ranks"


def random_sizes() -> st.SearchStrategy[Sizes]:
    """Sizes of any kind, most of which cannot be had."""
    number = st.integers(1, 2048)
    return st.builds(
        Sizes,
        model=st.sampled_from((V3, DENSE)),
        world=number,
        node_devices=st.sampled_from((1, 4, 8, 72)),
        vendor=st.sampled_from(("nvidia", "amd", "cpu")),
        global_batch=number,
        sequence_length=st.integers(2, 1 << 20),
        tp=number,
        cp=number,
        pp=number,
        vpp=number,
        ep=number,
        etp=number,
        micro_batch=number,
        schedule=st.sampled_from(("none", *SCHEDULES)),
        recompute=st.lists(st.sampled_from(RECOMPUTABLE), max_size=3).map(tuple),
        sync_free=st.integers(0, 3),
        dispatcher=st.sampled_from(("local", "all-to-all", "all-gather", "symmetric", "hierarchical")),
        shard=st.sampled_from(("none", "optimizer", "full")),
        overlap=st.sampled_from(("none", "shared", "passes")),
        context_method=st.sampled_from(("auto", "all-gather", "ulysses")),
        capture=st.sampled_from(("none", "full", "partial", "auto")),
        reduce=st.sampled_from(("fp32", "bf16")),
        offloads_optimizer=st.booleans(),
    )


@given(sizes=random_sizes())
def test_rules_answer_whatever_they_are_asked(sizes: Sizes) -> None:
    refusal = illegal(sizes)
    assert refusal is None or (refusal[0].kind == "legal" and refusal[1])
    assert all(rule.kind == "advice" and reason for rule, reason in advice(sizes))


@st.composite
def runs(draw: st.DrawFn) -> tuple[Run, int]:
    """Runs of the small model with all that a layout has, unchecked, and ranks."""
    overrides = [
        f"parallel.tensor={draw(SIZE)}",
        f"parallel.context={draw(SIZE)}",
        f"parallel.pipeline={draw(SIZE)}",
        f"parallel.expert={draw(SIZE)}",
        f"parallel.expert_tensor={draw(SIZE)}",
        f"parallel.shard={draw(st.sampled_from(('auto', 'none', 'optimizer', 'full')))}",
        f"parallel.context_method={draw(st.sampled_from(('auto', 'all-gather', 'ulysses')))}",
        f"pipeline.schedule={draw(st.sampled_from(tuple(SCHEDULES)))}",
        f"pipeline.stages_per_rank={draw(SIZE)}",
        f"training.micro_batch={draw(SIZE)}",
        f"training.global_batch={draw(st.sampled_from((4, 12, 48, 96)))}",
        f"training.sequence_length={draw(st.sampled_from((96, 192, 100)))}",
        f"recompute.modules={json.dumps(draw(st.lists(st.sampled_from(RECOMPUTABLE), max_size=2)))}",
        f"dispatch.sync_free={draw(st.integers(0, 3))}",
        f"dispatch.method={draw(st.sampled_from(('auto', 'all-to-all', 'all-gather', 'symmetric', 'hierarchical')))}",
        f"dispatch.overlap={draw(st.sampled_from(('none', 'shared', 'passes')))}",
        f"graphs.capture={draw(st.sampled_from(('none', 'full', 'partial')))}",
        f"model.dense_layers={draw(st.sampled_from((0, 1)))}",
        f"model.moe.moe_layer_freq={draw(st.sampled_from((1, 1, 3)))}",
        f"model.moe.shared_expert_intermediate_size={draw(st.sampled_from((0, 128)))}",
    ]
    kind = draw(st.sampled_from(("plain", "plain", "plain", "pads", "dense")))
    if kind == "pads":
        overrides += ["model.moe.balance.pad_to_capacity=true", "model.moe.balance.capacity_factor=1.25"]
    elif kind == "dense":
        overrides = [one for one in overrides if "model." not in one] + ["model.moe=none", "model.dense_layers=4"]
    run = unchecked_run(overrides)
    return run, draw(st.sampled_from((smallest_world(run), 2 * smallest_world(run), 12)))


@examples(200)
@given(drawn=runs())
def test_a_legal_rule_refuses_what_the_function_refuses_whose_name_it_has(drawn: tuple[Run, int]) -> None:
    """And those about ranks refuse together what has no grid."""
    run, world = drawn
    sizes = sizes_for(run, world)
    # Where nothing travels, the dispatcher that was asked for is not read, and sizes do not say it.
    about_travel = (
        {"sent-rows-are-counted-by-the-host", "padded-rows-are-sent"} if sizes.dispatcher == "local" else set()
    )
    for function in CONFIG_RULES:
        name = rule_name(function)
        if name in BY_NAME and name not in about_travel:
            assert (BY_NAME[name].check(sizes) is None) == (function(run) is None), name
    about_ranks = LEGAL[:3]
    assert any(rule.check(sizes) for rule in about_ranks) != has_grid(run, world)


def has_grid(run: Run, world: int) -> bool:
    try:
        grid_of(run, world)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(("rows", "is_refused"), [(3, True), (4, False)])
def test_a_schedule_that_wants_micro_batches_has_no_grid_without_them(rows: int, is_refused: bool) -> None:
    overrides = ["parallel.pipeline=2", "pipeline.schedule=dualpipe-v", "pipeline.stages_per_rank=2"]
    run = unchecked_run([*overrides, "training.micro_batch=1", f"training.global_batch={rows}"])
    refused = [rule.name for rule in LEGAL if rule.check(sizes_for(run, 2)) is not None]
    assert refused == (["schedule-has-its-micro-batches"] if is_refused else [])
    assert (config_refusal(run, 2) is not None) == is_refused


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1), ("bf16", 3)])
def test_the_highest_stage_of_kernels_is_the_last_that_their_choice_does_not_refuse(precision: str, most: int) -> None:
    def run_at(stage: int) -> Run:
        return unchecked_run([f"training.precision={precision}", f"dispatch.sync_free={stage}"])

    device = device_of(H200, run_at(0))
    assert most_sync_free(run_at(3), device) == most
    for stage in range(4):
        if stage > most:
            with pytest.raises(KernelError):
                kernel_choices(run_at(stage), device)
        else:
            kernel_choices(run_at(stage), device)


def test_a_refusal_of_the_config_has_the_name_of_its_rule_and_one_line() -> None:
    assert config_refusal(SMALL, 1) is None
    refusal = config_refusal(unchecked_run(["parallel.expert=3"]), 3)
    assert refusal is not None and refusal[0] == "expert-ranks-divide-experts"
    assert refusal[1] == "parallel.expert must divide model.moe.experts (8); got 3; allowed: 1, 2, 4, 8"
    refusal = config_refusal(SMALL, 3)
    assert refusal is not None and refusal[0] == "ranks-fit-the-run" and "\n" not in refusal[1]


def test_a_run_and_its_sizes_say_the_same() -> None:
    run = unchecked_run(["parallel.pipeline=2", "parallel.expert=2", "training.global_batch=64"])
    sizes = sizes_for(run, 8)
    grid = grid_of(run, 8)
    assert (sizes.dp, sizes.edp, sizes.micro_batches) == (grid.data, grid.expert_data, 4)
    assert (sizes.schedule, sizes.vpp, sizes.shard, sizes.dispatcher) == ("1f1b", 1, "optimizer", "symmetric")
    alone = sizes_for(SMALL, 1)
    assert (alone.schedule, alone.vpp, alone.dispatcher) == ("none", 1, "local")


def test_every_rule_of_others_is_decided_once() -> None:
    names = [name for entries in rules_of_others().values() for name in entries]
    numbered = [f"{topic}{number}" for topic, most in COUNTS.items() for number in range(1, most + 1)]
    assert sorted(names) == sorted(["W", *numbered])


def test_what_stands_for_a_rule_of_others_exists_and_names_it() -> None:
    entries = {name: entry for entries in rules_of_others().values() for name, entry in entries.items()}
    verdicts = ("config", "plan", "projection", "environment", "doctor", "moot", "theirs")
    for entry in entries.values():
        rules = entry.get("rules", ())
        assert set(rules) <= known_names() and entry["verdict"] in verdicts, entry
        assert rules or entry.get("why") or entry["verdict"] in verdicts[2:5] + verdicts[6:], entry
        assert rules or entry["verdict"] != "config", entry
    for rule in RULES:
        for name in IDENTIFIER.findall(rule.source):
            assert rule.name in entries[name]["rules"], f"{rule.name} comes from {name}"


def test_measurements_that_rules_quote_are_those_of_the_results() -> None:
    layouts = json.loads((RESULTS / "layouts-h200x4.json").read_text())["numbers"]["layouts"]
    speeds = {name: one["tokens_per_second_per_gpu"] for name, one in layouts.items()}
    gib = {name: one["peak_memory_gib"] for name, one in layouts.items()}
    whole = speeds["EP 4, ZeRO-1"]
    assert f"{1 - speeds['PP 2 x EP 2'] / whole:.0%}" == "11%" and "11 %" in BY_NAME["small-model-without-pipeline"].doc
    assert f"{1 - speeds['TP 2 folded with EP 4'] / whole:.0%}" == "8%"
    assert f"{gib['EP 4, ZeRO-1'] - gib['EP 4, FSDP']:.0f}" == "5" and "5 GiB" in BY_NAME["gathers-once-a-step"].doc


def test_every_source_that_is_a_file_is_there() -> None:
    root = RESULTS.parents[1]
    for rule in RULES:
        for path in re.findall(r"docs/[\w/.-]+\.md", rule.source):
            assert (root / path).is_file(), rule.name
        for name in re.findall(r"[\w-]+\.json", rule.source):
            assert (RESULTS / name).is_file(), rule.name


def test_links_in_a_node_are_as_much_faster_than_the_network_as_the_rule_says() -> None:
    ratios = []
    for path in PACKAGED.glob("*.toml"):
        node = tomllib.loads(path.read_text())["node"]
        ratios.append(node["link_bytes_per_second"] / node["network_bytes_per_second"])
    assert (round(min(ratios)), round(max(ratios))) == (4, 18)
    assert "4 to 18 times" in BY_NAME["expert-product-inside-node"].doc


def test_rules_are_asked_without_pytorch() -> None:
    code = "import sys, penstock.plan.rules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("method", "world", "expert", "expert_tensor"),
    [
        *((method, *sizes) for method in ("auto", "all-gather", "hierarchical") for sizes in WHOLE_NODES),
        ("auto", 24, 4, 3),
        ("auto", 24, 8, 3),
    ],
)
@pytest.mark.parametrize("stage", [0, 2])
def test_the_dispatcher_of_sizes_is_the_one_that_the_model_gets(
    method: str, world: int, expert: int, expert_tensor: int, stage: int
) -> None:
    overrides = [f"parallel.expert={expert}", f"parallel.expert_tensor={expert_tensor}"]
    overrides += ["model.moe.moe_intermediate_size=384"]
    overrides += [f"dispatch.method={method}", f"dispatch.sync_free={stage}", "training.global_batch=192"]
    run = unchecked_run([*overrides, "training.precision=bf16"])
    start_fake_process_group(0, world)
    try:
        axes = make_axes(grid_of(run, world), embedding_places(run), 0, H200.node.devices)
        rank = make_meta_rank(run, axes, Target(device=named_device("H200", "bf16"), ranks_per_node=H200.node.devices))
    finally:
        stop_process_group()
    (kind,) = {type(module.dispatcher) for module in rank.decoders[0].modules() if isinstance(module, MoE)}
    assert DISPATCHERS[kind] == sizes_for(run, world).dispatcher
