"""Captured passes and parts give the results of eager ones: with CPU stand-ins for graphs, and replayed by a GPU."""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import DeviceError, KernelError
from penstock.config.load import load_run
from penstock.config.model import Balance
from penstock.config.parallel import Dispatch, Graphs, Offload, Parallel, Recompute
from penstock.config.run import Run
from penstock.kernels.choose import Choice
from penstock.layout.grid import ExpertPlacement
from penstock.models.parameters import fuse_wgrad_accumulation, param_shards
from penstock.models.rank_model import RankModel
from penstock.moe.dispatch.row_capacity import RowCapacity, capacity_trackers, make_room
from penstock.parallel.spans import EnterPhase
from penstock.train.capture import (
    AutoPasses,
    CapturedParts,
    CapturedPasses,
    EagerPasses,
    choose_capture,
    fill,
)
from penstock.train.loop import Progress, open_store, train_run
from penstock.train.optimizer import MasterAdamW
from penstock.train.passes import GlobalBatch, LossRule, cut, forward_backward
from penstock.train.run_folder import create_run_folder
from penstock.train.setup import Session, prepare
from penstock.train.step import Passes, StepResult, StepRule, StopRequest, evaluate, step_rule, train_step
from tests.closeness import assert_equal
from tests.models.families import ATTENTIONS
from tests.parallel.recorded_graph import Graph, SameAddresses
from tests.parallel.recorded_graph import Graphs as RecordedGraphs
from tests.train.tiny_run import (
    CPU,
    ENVIRONMENT,
    Recorder,
    held_out_rows,
    one_rank,
    random_batch,
    tiny_model,
    tiny_moe,
    tiny_run,
)

GPU = torch.device("cuda", 0)


class Recorded(SameAddresses):
    """Graphs of passes, which give nothing back."""

    def capture(self, work: Callable[[], object]) -> Graph:
        return super().capture(lambda: work() or ())


def started(run: Run, passes: Passes | None) -> tuple[RankModel, MasterAdamW, StepRule]:
    torch.manual_seed(0)
    model = one_rank(run)
    optimizer = MasterAdamW(param_shards(model.modules, model.axes), run.optimizer)
    fuse_wgrad_accumulation(model.modules, optimizer.gradient_of)
    rule = step_rule(run, model, CPU) if passes is None else step_rule(run, model, CPU, passes)
    return model, optimizer, rule


def steps(
    run: Run, passes: Passes | None, count: int = 4, *, documents: bool = False
) -> tuple[list[StepResult], list[float], dict[str, Tensor]]:
    """Results of some steps over different data, the held-out loss after each, and the final state."""
    model, optimizer, rule = started(run, passes)
    results, held_out = [], []
    for seed in range(count):
        batch = random_batch(4, 12, seed=seed, documents=documents)
        results.append(replace(train_step(model, optimizer, batch, rule, 1e-2), peak_memory_bytes=0))
        held_out.append(evaluate(model, held_out_rows(), rule.cut, rule.loss).loss)
    tensors = {**model.whole.state_dict(), **{name: part.tensor for name, part in optimizer.parts().items()}}
    return results, held_out, {name: tensor.clone() for name, tensor in tensors.items()}


def assert_same(one: tuple[Any, Any, dict[str, Tensor]], other: tuple[Any, Any, dict[str, Tensor]]) -> None:
    assert one[:2] == other[:2]
    assert_equal(one[2], other[2])


def moe_of(**balance: Any) -> dict[str, Any]:
    return {"model": tiny_moe(balance=Balance(**balance))}


def test_a_run_tells_of_its_graph_and_gives_it_back_at_the_end(tmp_path: Path) -> None:
    run, recorded, told = tiny_run(tmp_path), Recorded(), Recorder()
    session = prepare(run, ENVIRONMENT)
    graphs = CapturedPasses(is_asked_for=True, capture=recorded.capture)
    session = replace(session, graphs=graphs, graphs_note="passes", rule=replace(session.rule, passes=graphs))
    _, folder = create_run_folder(run, number_if_taken=False)
    train_run(session, folder, open_store(run, folder), Progress(), [told], StopRequest())
    assert told.starts[0].graphs == "passes"
    assert [report.graph_pool_bytes for report in told.reports] == [0, *[100_000_000] * 3]  # from the second step on
    assert [len(report.notices) for report in told.reports] == [0, 1, 0, 0]
    assert recorded.log == ["capture 0", *["replay 0"] * 3 * 2, "release 0"]


@pytest.mark.often(
    "sequence loss-True", "drops-False", "windows-True", "chunks-False", "loss over the global batch-False"
)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        moe_of(aux_loss="global-batch", aux_loss_coef=0.1),
        moe_of(capacity_factor=0.5),
        {"model": tiny_model(attention=ATTENTIONS["gpt-oss"])},
        {"model": tiny_model(attention=ATTENTIONS["llama4"])},
    ],
    ids=["sequence loss", "loss over the global batch", "drops", "windows", "chunks"],
)
def test_replayed_passes_train_as_eager_ones_do(changes: dict[str, Any], documents: bool, tmp_path: Path) -> None:
    run, recorded = tiny_run(tmp_path, **changes), Recorded()
    passes = CapturedPasses(is_asked_for=True, capture=recorded.capture)
    assert_same(steps(run, passes, documents=documents), steps(run, None, documents=documents))
    assert recorded.log == ["capture 0", *["replay 0"] * 3 * 2]


def test_the_memory_of_graphs_is_told_once_and_the_first_step_has_none(tmp_path: Path) -> None:
    passes = CapturedPasses(is_asked_for=False, capture=Recorded().capture)
    parts = captured(SameAddresses(), is_asked_for=False)
    for graphs, size, notice in (
        (passes, 0.1e9, "graphs: one pass captured in 0.2 s; its pool keeps 0.10 GB"),
        (parts, 0.6e9, "graphs: 6 parts captured in 1.5 s; they keep 0.60 GB"),
    ):
        steps(tiny_run(tmp_path), graphs, 1)
        assert (graphs.pool_bytes, graphs.take_notices()) == (0, ())
        steps(tiny_run(tmp_path), graphs, 2)
        assert size <= graphs.pool_bytes < size + 1e5
        assert (graphs.take_notices(), graphs.take_notices()) == ((notice,), ())


def test_a_step_that_is_made_again_gives_the_graph_up_and_the_next_one_captures_another(tmp_path: Path) -> None:
    recorded = Recorded()
    model, optimizer, rule = started(tiny_run(tmp_path), CapturedPasses(is_asked_for=True, capture=recorded.capture))
    model.whole.row_capacity = RowCapacity(ExpertPlacement(experts=4), 1.0)
    whole = [cut(random_batch(4, 12, seed=seed), rule.cut) for seed in range(4)]
    for batch in whole[:2]:
        rule.passes(model, batch, rule.loss)
    make_room(capacity_trackers(model.modules))
    repeated = rule.passes(model, whole[2], rule.loss)
    optimizer.zero_gradients()
    rule.passes(model, whole[3], rule.loss)
    first, second = (["capture 0", "replay 0", "replay 0", "release 0"], ["capture 1", "replay 1", "replay 1"])
    assert recorded.log == first + second
    assert repeated.isfinite().all()


def test_without_memory_passes_stay_eager_and_the_user_hears_it_once(tmp_path: Path) -> None:
    run, recorded = tiny_run(tmp_path), Recorded(fails_at=0)
    passes = CapturedPasses(is_asked_for=False, capture=recorded.capture)
    assert_same(steps(run, passes), steps(run, None))
    assert recorded.log == ["capture 0"]
    (notice,) = passes.take_notices()
    assert notice == "graphs: passes stay eager, there is no memory for a graph (tried to allocate 2 GiB)"


def test_graphs_that_were_asked_for_and_find_no_memory_are_an_error(tmp_path: Path) -> None:
    passes = CapturedPasses(is_asked_for=True, capture=Recorded(fails_at=0).capture)
    for graphs, what in ((passes, "pass"), (captured(SameAddresses(fails_at=2)), "part")):
        with pytest.raises(DeviceError, match=f"no memory for a {what}; got tried to allocate 2 GiB; fix: a smaller"):
            steps(tiny_run(tmp_path), graphs, 2)


def test_what_a_graph_reads_is_filled_with_everything_of_another_micro_batch(tmp_path: Path) -> None:
    _, _, rule = started(tiny_run(tmp_path), None)
    first, second = (cut(random_batch(2, 12, seed=seed, documents=True), rule.cut) for seed in (0, 1))
    own, own_counted = deepcopy(first.micro_batches[0]), first.counted.clone()
    addresses = [tensor.data_ptr() for tensor in (own.reading.tokens_BS, *own.labels, own_counted)]
    other = second.micro_batches[0]
    fill(own, own_counted, other, second.counted)
    assert [tensor.data_ptr() for tensor in (own.reading.tokens_BS, *own.labels, own_counted)] == addresses
    assert_equal((own_counted, own.labels, own.reading.tensors), (second.counted, other.labels, other.reading.tensors))
    assert own.reading.tensors.keys() >= {"tokens_BS", "positions_BS", "ahead 1", "documents_BS"}
    assert not torch.equal(own.reading.tokens_BS, first.micro_batches[0].reading.tokens_BS)


def test_another_shape_share_or_mask_is_refused(tmp_path: Path) -> None:
    _, _, rule = started(tiny_run(tmp_path), None)
    whole = cut(random_batch(2, 12), rule.cut)
    own = deepcopy(whole.micro_batches[0])
    for other, told in (
        (random_batch(2, 10), r"tokens_BS of a graph is torch.int64 \(2, 12\), and .* \(2, 10\) came"),
        (random_batch(4, 12), "a graph of a share of 1.0 is replayed for one of 0.5"),
        (random_batch(2, 12, documents=True), "a graph that reads"),
    ):
        with pytest.raises(AssertionError, match=told):
            fill(own, whole.counted, cut(other, rule.cut).micro_batches[0], whole.counted)


PERMUTE, EXPERTS = (Choice(op, "both", "reference", f"kernels.{op}=reference") for op in ("permute", "experts"))
DENSE = tiny_model(moe=None, dense_layers=2, mtp_layers=0)
ALL_TO_ALL = {"parallel": Parallel(expert=2), "dispatch": Dispatch(method="all-to-all")}
LATER = "from the second step on"
PERHAPS = r"from the third step on if the host limits passes \(graphs.capture=none for never\)"


@pytest.mark.parametrize(
    ("capture", "changes", "choices", "kind", "note"),
    [
        ("none", {}, (), NoneType, "$"),
        ("full", {}, (), CapturedPasses, f"passes, {LATER}$"),
        ("auto", {}, (), AutoPasses, f"passes, {PERHAPS}$"),
        ("auto", {"model": DENSE}, (PERMUTE,), AutoPasses, f"passes, {PERHAPS}$"),
        ("partial", {}, (EXPERTS,), CapturedParts, f"parts of layers, {LATER}$"),
        ("auto", ALL_TO_ALL, (), AutoPasses, f"parts of layers, {PERHAPS}; no passes: dispatch.sync_free lets"),
        ("auto", {}, (PERMUTE,), NoneType, "none: the reference form of permute reads counts on the host$"),
        ("auto", {"parallel": Parallel(pipeline=2)}, (), NoneType, "none: parallel.pipeline has several micro-batches"),
        ("auto", {"parallel": Parallel(shard="full")}, (), NoneType, "none: parallel.shard gathers weights into new"),
        ("auto", {"offload": Offload(activations=("moe",))}, (), NoneType, "none: offload.activations starts copies"),
    ],
)
def test_what_is_captured_is_what_was_asked_for_or_what_can_be(
    capture: str, changes: dict[str, Any], choices: tuple[Choice, ...], kind: type, note: str, tmp_path: Path
) -> None:
    run = tiny_run(tmp_path, device="cuda", graphs=Graphs.model_validate({"capture": capture}), **changes)
    graphs, told = choose_capture(run, GPU, choices)
    assert isinstance(graphs, kind)
    assert re.match(note, told), told


def test_auto_captures_nothing_on_amd_gpus_where_full_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2")
    for capture, kind, note in (("auto", NoneType, "none: by default not on AMD"), ("full", CapturedPasses, "passes,")):
        run = tiny_run(tmp_path, device="cuda", graphs=Graphs.model_validate({"capture": capture}))
        graphs, line = choose_capture(run, GPU, ())
        assert isinstance(graphs, kind) and line.startswith(note)


@pytest.mark.parametrize("capture", ["full", "partial"])
def test_what_was_asked_for_and_cannot_be_is_refused(capture: str, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, device="auto", graphs=Graphs.model_validate({"capture": capture}))
    reads = (
        f"graphs.capture={capture} is not available: the reference form of permute reads counts.*; fix: leave kernels"
    )
    with pytest.raises(KernelError, match=reads):
        choose_capture(run, GPU, (PERMUTE,))
    with pytest.raises(
        DeviceError, match=f"capture={capture} is not available: device cpu .*; fix: graphs.capture=auto"
    ):
        choose_capture(run, CPU, ())


def test_a_cpu_has_no_graphs(tmp_path: Path) -> None:
    session = prepare(tiny_run(tmp_path, graphs=Graphs(capture="auto")), ENVIRONMENT)
    session.state.batches.close()
    assert (session.graphs, session.graphs_note) == (None, "")


@pytest.mark.parametrize(
    ("behind", "has_room", "captured", "notice"),
    [
        (0.03, True, 1, "graphs: the host limits passes: at their end the device is 3% of their time behind"),
        (
            0.3,
            True,
            0,
            "graphs: passes stay eager, the device limits them: at their end it is 30% of their time behind",
        ),
        (0.03, False, 0, "graphs: passes stay eager, there may be no memory for a graph beside the update"),
    ],
)
def test_auto_captures_from_the_third_step_on_what_the_host_limits_and_has_memory_for(
    behind: float, has_room: bool, captured: int, notice: str, tmp_path: Path
) -> None:
    measured: list[int] = []

    def measure(model: RankModel, batch: GlobalBatch, rule: LossRule, enter: EnterPhase) -> EagerPasses:
        measured.append(len(recorded.log))
        return EagerPasses(forward_backward(model, batch, rule, enter), behind, has_room)

    run, recorded = tiny_run(tmp_path), Recorded()
    passes = AutoPasses(CapturedPasses(is_asked_for=False, capture=recorded.capture), measure)
    assert_same(steps(run, passes), steps(run, None))
    assert measured == [0], "the second step, and before anything is captured"
    assert recorded.log == ["capture 0", *["replay 0"] * 2 * 2][: 5 * captured]
    notices = passes.take_notices()
    assert notices[0].startswith(notice)
    assert len(notices) == 1 + captured
    assert (passes.pool_bytes > 0) == bool(captured)
    passes.release()
    assert passes.pool_bytes == 0


LAYERS = 3
"""Of the tiny model: a dense one, one of experts, and one that predicts further."""

CAPTURES = [f"{what} {number}" for number in range(2 * LAYERS) for what in ("capture", "replay")]
REPLAYS = [f"replay {number}" for number in range(2 * LAYERS)]


def captured(graphs: SameAddresses, *, is_asked_for: bool = True) -> CapturedParts:
    return CapturedParts(is_asked_for=is_asked_for, begin_pool=graphs.begin)


@pytest.mark.often("sequence loss-True", "drops-False", "recomputed-True", "dense-True", "windows-False")
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        moe_of(aux_loss="micro-batch", aux_loss_coef=0.1, z_loss_coef=0.1),
        moe_of(capacity_factor=0.5),
        {"recompute": Recompute(modules=("expert-activation", "shared-expert", "dense"))},
        {"offload": Offload(activations=("dense",))},
        {"model": DENSE},
        {"model": tiny_model(attention=ATTENTIONS["gpt-oss"])},
        {"model": tiny_model(attention=ATTENTIONS["llama4"])},
    ],
    ids=["sequence loss", "micro-batch loss", "drops", "recomputed", "offloaded", "dense", "windows", "chunks"],
)
def test_replayed_parts_train_as_eager_layers_do(changes: dict[str, Any], documents: bool, tmp_path: Path) -> None:
    run, graphs = tiny_run(tmp_path, **changes), SameAddresses()
    eager = steps(run, None, documents=documents)
    assert_same(steps(run, captured(graphs), documents=documents), eager)
    layers = 2 if run.model.moe is None else LAYERS
    recorded = CapturedParts(is_asked_for=True, begin_pool=RecordedGraphs(layers).begin)
    assert_same(steps(run, recorded, documents=documents), eager)
    assert graphs.log[: 1 + 4 * layers] == ["pool", *CAPTURES[: 4 * layers]]
    assert graphs.log[1 + 4 * layers :] == (3 * 2 - 1) * REPLAYS[: 2 * layers]


def test_parts_that_were_given_up_are_captured_again_into_another_pool(tmp_path: Path) -> None:
    graphs, run = SameAddresses(), tiny_run(tmp_path)
    parts = captured(graphs)
    steps(run, parts, 2)
    graphs.log.clear()
    parts.release()
    parts.release()
    assert graphs.log == [f"release {number}" for number in range(2 * LAYERS)]
    assert parts.pool_bytes == 0
    steps(run, parts, 1)
    assert graphs.log[2 * LAYERS :][:2] == ["pool", "capture 6"]  # numbers count on


@pytest.mark.often("0", "3")
@pytest.mark.parametrize("fails_at", [0, 1, 3, 5])
def test_without_memory_layers_stay_eager_and_the_user_hears_it_once(fails_at: int, tmp_path: Path) -> None:
    run, graphs = tiny_run(tmp_path), SameAddresses(fails_at=fails_at)
    parts = captured(graphs, is_asked_for=False)
    assert_same(steps(run, parts), steps(run, None))
    assert graphs.captures <= 2 * LAYERS
    released = [entry for entry in graphs.log if entry.startswith("release")]
    assert released == [f"release {number}" for number in range(graphs.captures) if number != fails_at]
    (notice,) = parts.take_notices()
    assert notice == "graphs: layers stay eager, there is no memory for a part (tried to allocate 2 GiB)"


SMALL = (
    "device=cuda",
    "training.precision=bf16",
    "training.deterministic=true",
    "training.global_batch=8",
    "data.source=synthetic-learnable",
    "checkpoint.enabled=false",
    "model.mtp_layers=1",
    "graphs.capture=none",
)


def _start(folder: Path, *overrides: str) -> Session:
    return prepare(load_run("debug", [*SMALL, f"record.folder={folder}", *overrides]), ENVIRONMENT)


def _step(session: Session) -> StepResult:
    batch = session.state.batches.next_batch()
    result = train_step(session.model, session.state.optimizer, batch, session.rule, 1e-3)
    return replace(result, peak_memory_bytes=0)


def _train(session: Session, steps: int = 5) -> tuple[list[StepResult], list[float], dict[str, Tensor]]:
    """Steps, an evaluation after each other one, and the state at the end."""
    results, held_out = [], []
    for step in range(steps):
        results.append(_step(session))
        if step % 2 and session.held_out is not None:
            held_out.append(evaluate(session.model, session.held_out, session.rule.cut, session.rule.loss).loss)
    state = {name: part.tensor.clone() for name, part in session.state.optimizer.parts().items()}
    session.state.batches.close()
    return results, held_out, state


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("capture", "overrides"),
    [
        ("full", ()),
        ("auto", ()),  # passes of a tiny model are launched by far more slowly than they run
        ("full", ("data.document_mask=true", 'recompute.modules=["layer"]')),
        ("partial", ()),
        ("partial", ("data.document_mask=true", 'recompute.modules=["expert-activation", "shared-expert"]')),
        # A host that waits between parts.
        ("partial", ("kernels.experts=reference", "model.moe.balance.capacity_factor=1.0", "dispatch.overlap=shared")),
    ],
)
def test_a_gpu_replays_the_bits_of_eager_passes_and_parts(
    capture: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    eager = _train(_start(tmp_path, *overrides))
    session = _start(tmp_path, *overrides, f"graphs.capture={capture}")
    assert_same(_train(session), eager)
    assert session.graphs is not None
    assert session.graphs.pool_bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("capture", ["full", "partial"])
def test_a_graph_that_was_given_up_is_captured_again(capture: str, tmp_path: Path) -> None:
    eager, _, _ = _train(_start(tmp_path), 4)
    session = _start(tmp_path, f"graphs.capture={capture}")
    graphs = session.graphs
    assert graphs is not None
    results = [_step(session) for _ in range(3)]
    held = torch.cuda.memory_reserved()
    graphs.release()
    assert torch.cuda.memory_reserved() < held
    assert graphs.pool_bytes == 0
    results.append(_step(session))
    assert graphs.pool_bytes > 0
    assert results == eager
    session.state.batches.close()
