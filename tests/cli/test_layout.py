"""`penstock layout`: which rank holds what."""

from pathlib import Path

import pytest

from penstock.cli.layout import step_figures
from penstock.config.fit import grid_of, micro_batches
from penstock.config.size import size_of
from penstock.layout.actions import ActionCosts, play
from penstock.layout.schedules import SCHEDULES, schedule
from tests.cli import answers
from tests.config.small import SMALL, unchecked_run

DOCUMENT = Path(__file__).parents[2] / "docs/layouts.md"


def shown(*arguments: str) -> dict[str, str]:
    """The first block of the output, by label, and under `stages of ranks` and `groups` the lines of the tables."""
    facts, *tables = answers.printed("layout", *arguments).split("\n\n")
    found = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in facts.splitlines()}
    return found | dict(zip(("stages of ranks", "groups"), tables, strict=False))


def cells(table: str) -> list[list[str]]:
    """A table's cells without its head and its note."""
    lines = [line for line in table.strip().splitlines()[1:] if not line.startswith(("dense, experts", "next: "))]
    return [[cell.strip() for cell in line.split("  ") if cell] for line in lines]


def test_one_rank_holds_everything() -> None:
    found = shown("debug")
    assert found["run"] == "debug on 1 rank"
    assert "groups" not in found
    assert [row[:4] for row in cells(found["stages of ranks"])] == [["0", "0", "0", "embedding, layers 0-3, head"]]


def test_both_views_their_groups_and_every_stage_are_shown() -> None:
    sizes = ("parallel.pipeline=2", "parallel.tensor=2", "parallel.context=2", "parallel.expert=4")
    found = shown("debug", *sizes, "model.vocab_size=260", "training.global_batch=16", "--world", "16")
    assert found["dense"] == "16 = pipeline 2 x data 2 x context 2 x tensor 2"
    assert found["experts"] == "16 = pipeline 2 x expert_data 2 x expert 4 x expert_tensor 1"
    assert found["batch"] == "16 rows = data 2 x 2 micro-batches x 4, of 128 positions"
    assert found["shard"] == "optimizer: dense matrices by 4 ranks, experts by 2 ranks"
    assert found["sequence"] == "32 of 128 positions of a row, rank 0: 0-31 (ulysses)"  # 128 / (2 x 2)
    assert found["routed"] == "2 of 8 experts of a layer"
    assert found["stages"] == "Et*2|t*2,L"
    assert [row[:4] for row in cells(found["stages of ranks"])] == [
        ["0", "0-7", "0", "embedding, layers 0-1"],
        ["1", "8-15", "1", "layers 2-3, head"],
    ]
    assert cells(found["groups"]) == [
        ["pipeline", "2", "8", "0 8", "7 15"],
        ["data", "2", "8", "0 4", "11 15"],
        ["context", "2", "8", "0 2", "13 15"],
        ["tensor", "2", "8", "0 1", "14 15"],
        ["expert_data", "2", "8", "0 4", "11 15"],
        ["expert", "4", "4", "0 1 2 3", "12 13 14 15"],  # neighbours, so that experts stay in a node
    ]


def test_the_fewest_ranks_that_fit_are_the_default_also_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text('preset = "debug"\n[parallel]\nexpert = 2\n[training]\nglobal_batch = 8\n', encoding="utf-8")
    assert shown(str(path))["run"] == "two on 2 ranks"
    found = shown("debug", "parallel.pipeline=2", "parallel.expert=4", "training.global_batch=16")
    assert found["run"] == "debug on 8 ranks"  # 2 stages x 4


def test_a_layout_with_chunks_parts_and_prediction_is_shown() -> None:
    stages = ("parallel.pipeline=2", "pipeline.schedule=zb-v", "pipeline.stages_per_rank=2", "model.mtp_layers=1")
    method = ("parallel.context=2", "parallel.context_method=all-gather", "parallel.expert_tensor=2")
    layout = "pipeline.layout=E|t*2|t,|tmL"
    found = shown("debug", *stages, *method, layout, "training.global_batch=8")
    # First and last quarter.
    assert found["sequence"] == "64 of 128 positions of a row, rank 0: 0-31 96-127 (all-gather)"
    assert found["routed"] == "8 of 8 experts of a layer, 1/2 of each"
    assert found["stages"] == "E|t*2|t|tmL"
    assert found["schedule"].startswith("zb-v, bubble ")
    assert [row[2:4] for row in cells(found["stages of ranks"])] == [
        ["0 3", "embedding; layer 3, prediction 0, head"],
        ["1 2", "layers 0-1; layer 2"],
    ]


def test_hybrid_and_no_sharding_are_told_apart() -> None:
    ranks = ("training.global_batch=32", "parallel.expert=2", "--world", "8")
    assert shown("debug", "parallel.shard_size=2", *ranks)["shard"] == (
        "optimizer: dense matrices by 2 of 8 ranks, experts by 2 of 4 ranks"
    )
    assert shown("debug", "parallel.shard=none", *ranks)["shard"] == (
        "none: dense matrices on 8 ranks, experts on 4 ranks"
    )


def test_a_long_group_is_cut_in_the_middle() -> None:
    groups = cells(shown("debug", "parallel.expert=8", "training.global_batch=32")["groups"])
    assert groups[-1] == ["expert", "8", "1", "0 1 2 3 4 ... 7", "0 1 2 3 4 ... 7"]  # one group of 8


@pytest.mark.parametrize(
    "arguments",
    [
        ("parallel.expert=3",),
        ("parallel.expert=4", "--world", "6"),
        ("parallel.pipeline=2", "pipeline.layout=Et*13|t*13xL"),
        ("parallel.pipeline=2", "pipeline.layout=Et*13|t*13,L"),
    ],
)
def test_errors_are_those_that_the_document_quotes(arguments: tuple[str, ...]) -> None:
    assert answers.refused("layout deepseek-v2-lite", *arguments) in DOCUMENT.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "sizes",
    [{"pipeline": 2}, {"tensor": 2}, {"expert": 4, "expert_tensor": 2}, {"pipeline": 2, "tensor": 2, "expert": 2}],
    ids=str,
)
def test_parameters_of_all_ranks_are_the_model(sizes: dict[str, int]) -> None:
    """Tensor-parallel ranks hold norms, routers and narrow projections whole; everything else is divided."""
    path = [f"parallel.{name}={size}" for name, size in sizes.items()]
    table = shown("debug", *path, "model.vocab_size=260", "training.global_batch=32")["stages of ranks"]
    whole = size_of(SMALL.model.model_copy(update={"vocab_size": 260}), 128).parameters
    dense, experts = (sum(_number(row[column]) for row in cells(table)) for column in (4, 5))
    every_expert = 3 * 8 * 3 * 128 * 128  # 3 layers, 8 experts, 3 matrices
    assert experts * sizes.get("expert", 1) * sizes.get("expert_tensor", 1) == pytest.approx(every_expert, rel=0.01)
    share = dense * sizes.get("tensor", 1) / (whole - every_expert)
    assert share == pytest.approx(1, rel=0.01) if "tensor" not in sizes else 1 < share < 1.2


def _number(text: str) -> float:
    number, _, unit = text.partition(" ")
    return float(number) * {"": 1, "k": 1e3, "M": 1e6}[unit]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("batch", [26, 63, 64, 80])
def test_a_long_step_is_told_from_short_ones_exactly(name: str, batch: int) -> None:
    per_rank = SCHEDULES[name].fewest
    overrides = ("parallel.pipeline=2", f"pipeline.schedule={name}", f"pipeline.stages_per_rank={per_rank}")
    run = unchecked_run((*overrides, "training.micro_batch=1", f"training.global_batch={batch}"))
    grid = grid_of(run, 2)
    once = (1.0, 1.5, 0.5, 2.0)[: 2 * per_rank]  # unequal stages
    twice = tuple(2 * time for time in once)
    costs = ActionCosts(forward=once, backward=twice, input=once, weight=once)
    plan = schedule(name, ranks=2, stages_per_rank=per_rank, micro_batches=micro_batches(run, grid))
    played = play(plan, costs)
    bubble, live = step_figures(run, grid, costs)
    assert bubble == pytest.approx(played.bubble, abs=1e-9)
    assert live == pytest.approx(played.peak_live)
