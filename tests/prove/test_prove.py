"""Random compositions equal one process; a planted fault is found and made small, and a tie is told from a fault."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from penstock.cli import prove as verb
from penstock.cli.main import main
from penstock.config.load import load_run
from penstock.config.parallel import OFFLOADABLE, RECOMPUTABLE
from penstock.kernels.tuning import named_device
from penstock.layout.schedules import SCHEDULES
from penstock.models.kernels import kernel_choices
from penstock.prove.choices import Choices, first_flip
from penstock.prove.composition import FAMILIES, Device, base_of, composition_of, family_overrides, refusal
from penstock.prove.draws import draw, draw_graphs
from penstock.prove.play import Saved, StepFigures, first_difference, worst_factor, worst_tensor
from penstock.prove.proof import Prover, Verdict, outcomes
from penstock.prove.ranks import Assignment, Children, Played, PlayError, Ranks, decode, encode
from penstock.train.capture import READS_COUNTS
from tests.closeness import assert_equal
from tests.distributed.pool import Pool
from tests.prove.chosen import CHOSEN, OFTEN, SEED, settings_of
from tests.prove.pool_ranks import PoolRanks

SLOW_SECONDS = 1200


def told(outcome: Verdict) -> str:
    return f"{outcome.text}\n{outcome.composition.command}"


@pytest.mark.often(*map(str, OFTEN))
@pytest.mark.parametrize("number", CHOSEN)
def test_a_random_composition_equals_one_process(number: int, ranks: Pool, tmp_path: Path) -> None:
    outcome = Prover(PoolRanks(ranks), tmp_path).judge(draw(SEED, number))
    assert outcome.kind in ("equal", "tie"), told(outcome)


AXES = ("parallel.tensor", "parallel.context", "parallel.pipeline", "parallel.expert", "parallel.expert_tensor")


def test_every_axis_schedule_way_of_tokens_and_option_is_played_by_every_test_run() -> None:
    played = {one for number in OFTEN for one in settings_of(draw(SEED, number))}
    wanted = {f"{axis}={size}" for axis in AXES for size in (2, 4) if (axis, size) != ("parallel.expert_tensor", 4)}
    wanted |= {f"pipeline.schedule={name}" for name in SCHEDULES}
    wanted |= {f"dispatch.method={name}" for name in ("auto", "all-to-all", "all-gather", "hierarchical")}
    wanted |= {f"dispatch.sync_free={stage}" for stage in range(4)} | {"dispatch.row_capacity_factor=1.0"}
    wanted |= {f"dispatch.overlap={kind}" for kind in ("shared", "passes")}
    wanted |= {f"dispatch.balance={kind}" for kind in ("bounded", "exact", "auto")}
    wanted |= {f"parallel.shard={kind}" for kind in ("none", "optimizer", "full")} | {"parallel.shard_size=2"}
    wanted |= {f"parallel.context_method={kind}" for kind in ("all-gather", "ulysses")}
    wanted |= {f"recompute.modules {name}" for name in RECOMPUTABLE} | {"offload.optimizer=true"}
    wanted |= {f"offload.activations {name}" for name in OFFLOADABLE}
    wanted |= {"optimizer.method=muon", "training.precision=bf16", "data.document_mask=true"}
    wanted |= {"prove.then", "prove.labels=some", "prove.weights=imported", "prove.weights=saved"}
    wanted |= {"data.source=standard-library", "model.attention.rope.theta=100.0", "schedule.decay=cosine"}
    assert wanted - played == set()


def test_state_in_formats_of_its_own_is_compared_by_its_values(ranks: Pool, tmp_path: Path) -> None:
    formats = ("training.precision=bf16", "optimizer.store_param_remainders=true", "optimizer.moment_dtype=bf16")
    outcome = Prover(PoolRanks(ranks), tmp_path).judge(composition_of(2, ("model.layers=2", *formats)))
    assert outcome.kind in ("equal", "tie"), told(outcome)


def test_experts_by_token_ids_may_have_a_capacity(ranks: Pool, tmp_path: Path) -> None:
    words = ("model.family=plain", "model.layers=2", "model.moe.router.num_hash_layers=1")
    words += ("model.moe.balance.aux_loss=none", "model.moe.balance.aux_loss_coef=0")
    words += ("model.moe.balance.capacity_factor=1.0", "parallel.expert=2")
    outcome = Prover(PoolRanks(ranks), tmp_path).judge(composition_of(2, words))
    assert outcome.kind in ("equal", "tie"), told(outcome)


@pytest.mark.slow
@pytest.mark.timeout(2 * SLOW_SECONDS)
def test_twenty_minutes_of_random_compositions_equal_one_process(ranks: Pool, tmp_path: Path) -> None:
    begin, prover = time.monotonic(), Prover(PoolRanks(ranks), tmp_path)
    for _, outcome in outcomes(prover, SEED + 1):
        assert outcome.kind != "fault", told(prover.smallest(outcome))
        if time.monotonic() - begin > SLOW_SECONDS:
            break


def test_draws_are_the_same_every_time_and_mostly_legal() -> None:
    made = [draw(3, number) for number in range(40)]
    assert made == [draw(3, number) for number in range(40)]
    assert sum(refusal(one) is None for one in made) > 28
    words = {one.partition("=")[0].partition(".")[0] for composition in made for one in composition.overrides}
    assert words >= {"model", "training", "data", "parallel", "dispatch", "pipeline", "recompute", "offload"}


class FaultyRanks:
    """Ranks that compute nothing, and are wrong where two settings meet."""

    shift = 0.01

    def __init__(self, kind: str, shift: float = shift) -> None:
        self.kind, self.shift = kind, shift

    def play(self, ranks: int, part: Assignment) -> list[Played]:
        words = set(part.overrides)
        is_wrong = words >= {"parallel.tensor=2", "model.tie_word_embeddings=true"}
        if self.kind == "keys":
            is_wrong = "parallel.expert=2" in words and "model.attention.indexer.index_topk=16" not in words
        if self.kind == "clamp" and words & {"model.moe.clamped.limit=0.5005", "model.moe.balance.bias_rule=sign"}:
            is_wrong = False
        if self.kind == "rounding":
            is_wrong = is_wrong and "training.precision=bf16" in words
        if self.kind == "chance":
            is_wrong = is_wrong and "model.rms_norm_eps=5e-07" not in words
        if is_wrong and self.kind == "traceback":
            raise PlayError("rank 1:\nTraceback ...\nKeyError: 'head'")
        if is_wrong and self.kind == "line":
            raise PlayError("this machine cannot do that", is_line=True)
        shift = (1.0 if self.kind == "keys" else self.shift) if is_wrong and not part.given else 0.0
        flips = is_wrong and not part.given and self.kind not in ("wrong", "clamp", "keys", "rounding", "chance")
        chosen = [[1, 0]] if flips else [[0, 1]]
        margin = 1e-7 if self.kind == "tie" else 0.5
        choices = {(0, 1): Choices(torch.tensor([[0.3, 0.3]]), torch.tensor(chosen)[:, :1], *seen(margin))}
        tensors = {"model.a": 1.0, "moment1.a": 2.0, "moment2.a": 3.0}
        first = [(name, (1,), [((0,), torch.zeros(1))]) for name in tensors]
        last = [(name, (1,), [((0,), torch.tensor([value + shift]))]) for name, value in tensors.items()]
        trace = StepFigures([4.0 + shift], [1.0], [0.0, 0.0], 0.0, [0], {})
        others = [Played(trace, [], [], choices)] * (ranks - 1)
        return [Played(trace, first, last, choices), *others]

    def close(self) -> None:
        """Nothing runs."""


def seen(margin: float) -> tuple[torch.Tensor, ...]:
    """The weight of one slot, that it was kept, and its margins."""
    return torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.tensor([margin]), torch.tensor([float("inf")])


PLANTED = (
    *("parallel.tensor=2", "model.layers=3", "training.z_loss_coef=0.001", "model.tie_word_embeddings=true"),
    *("recompute.modules=norm", "data.document_mask=true"),
)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("wrong", "loss 2.5e-03, parameters 1.0e-02, moments 5.0e-03, one tensor 5.0e-03; most of moment1.a"),
        ("traceback", "KeyError: 'head'"),
        ("flip", "by margins up to 5.0e-01, which is no tie"),
    ],
)
def test_a_fault_is_made_as_small_as_its_two_settings(kind: str, text: str, tmp_path: Path) -> None:
    prover = Prover(FaultyRanks(kind), tmp_path)
    fault = prover.judge(composition_of(4, PLANTED))
    assert fault.kind == "fault" and text in fault.text
    smallest = prover.smallest(fault)
    assert smallest.composition.command == (
        "penstock prove --processes 2 parallel.tensor=2 model.tie_word_embeddings=true"
    )
    assert text in smallest.text


def test_what_equals_one_process_with_its_choices_is_a_tie(tmp_path: Path) -> None:
    outcome = Prover(FaultyRanks("tie"), tmp_path).judge(composition_of(2, PLANTED))
    assert (outcome.kind, outcome.figures["loss"]) == ("tie", 0.0)
    assert outcome.text == "step 0, layer 1: 2 tokens chose other experts, by margins up to 1.0e-07"


CLAMP = ("model.moe.clamped={limit=0.5}",)
QUANTILE = ("model.moe.router.expert_bias=true", "model.moe.balance.bias_rule=quantile")


@pytest.mark.parametrize(
    ("jump", "reason"),
    [
        (CLAMP, "a value is at the limit of the clamp: model.moe.clamped.limit=0.5005 agrees"),
        (QUANTILE, "a quantile lies between other scores: model.moe.balance.bias_rule=sign agrees"),
    ],
    ids=["clamp", "quantile"],
)
def test_what_agrees_beside_a_jump_is_a_tie(jump: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    words = PLANTED + jump
    verdict = Prover(FaultyRanks("clamp"), tmp_path).judge(composition_of(2, words))
    assert verdict.kind == "tie" and verdict.composition.overrides == words and verdict.text.endswith(reason)
    assert Prover(FaultyRanks("wrong"), tmp_path).judge(composition_of(2, words)).kind == "fault"


@pytest.mark.parametrize(
    ("kind", "shift", "expected"),
    [("rounding", 0.06, "tie"), ("rounding", 0.1, "fault"), ("wrong", 0.06, "fault")],
    ids=["a little over", "far over", "in float32 too"],
)
def test_in_few_bits_a_fault_is_one_in_float32_too_or_far_over_the_bounds(
    kind: str, shift: float, expected: str, tmp_path: Path
) -> None:
    words = (*PLANTED, "training.precision=bf16")
    verdict = Prover(FaultyRanks(kind, shift), tmp_path).judge(composition_of(2, words))
    assert verdict.kind == expected, verdict.text
    assert ("; float32 agrees" in verdict.text) == (expected == "tie")


def test_what_agrees_when_an_indexer_chooses_all_keys_is_a_tie_in_16_bits_only(tmp_path: Path) -> None:
    sizes = ("kv_lora_rank=16", "qk_nope_head_dim=8", "qk_rope_head_dim=8", "v_head_dim=8", "q_lora_rank=16")
    latent = tuple(f"model.attention.{one}" for one in sizes)
    indexer = "model.attention.indexer={index_n_heads=2, index_head_dim=8, index_topk=6}"
    words = (*latent, indexer, "parallel.expert=2")
    prover = Prover(FaultyRanks("keys"), tmp_path)
    verdict = prover.judge(composition_of(2, (*words, "training.precision=bf16")))
    assert verdict.kind == "tie", verdict.text
    assert verdict.text.endswith("the indexer chose other keys: model.attention.indexer.index_topk=16 agrees")
    assert prover.judge(composition_of(2, words)).kind == "fault"


def test_draws_for_gpus_are_wider_and_mostly_legal_and_compare_with_definitions() -> None:
    made = [draw(1, number, 2) for number in range(30)]
    legal = [one for one in made if refusal(one) is None]
    assert len(legal) > 20 and {one.ranks for one in legal} == {1, 2}
    words = {one.partition("=")[0] for composition in legal for one in composition.overrides}
    assert words >= {"kernels.all", "kernels.attention", "graphs.capture", "float8.dense", "offload.gradients"}
    for one in legal:
        kept = {word for word in one.alone if word.startswith(("kernels.", "graphs.", "parallel."))}
        assert kept == {"kernels.all=reference", "kernels.attention=math"}
        assert one.run.model.hidden_size == 256 and one.run.device == "cuda"
    assert all(one.capture and not one.eager().capture for one in (draw_graphs(3, number, 1) for number in range(20)))


@pytest.mark.parametrize(("gpus", "least"), [(1, 18), (2, 12)])
def test_draws_with_graphs_are_mostly_what_a_gpu_can_capture(gpus: int, least: int) -> None:
    captured = 0
    for number in range(20):
        drawn = draw_graphs(3, number, gpus)
        if refusal(drawn) is None:
            run = drawn.run
            choices = kernel_choices(run, named_device("H200", run.training.precision))
            counted = {one.op for one in choices if one.backend == "reference"} & set(READS_COUNTS[drawn.capture])
            captured += not counted or run.model.moe is None
    assert captured >= least


def test_one_process_reads_a_row_at_a_time_unless_losses_depend_on_micro_batches() -> None:
    words = ("training.micro_batch=2", "training.global_batch=8", "parallel.expert=2")
    balance = "model.moe.balance.aux_loss="
    assert composition_of(2, (*words, f"{balance}sequence")).alone == ("training.global_batch=8", f"{balance}sequence")
    kept = composition_of(2, (*words, f"{balance}micro-batch")).alone
    assert kept == ("training.micro_batch=2", "training.global_batch=8", f"{balance}micro-batch")


def test_another_layout_must_read_the_bits_that_the_first_one_saved(tmp_path: Path) -> None:
    words = ("training.steps=4", "prove.then=4 parallel.expert=4")
    composition = composition_of(2, (*words, "parallel.tensor=2"))
    then = composition.then
    assert then is not None and then.ranks == 4 and then.overrides == ("training.steps=4", "parallel.expert=4")
    assert composition.alone == ("training.steps=4",)
    verdict = Prover(FaultyRanks("none"), tmp_path).judge(composition)  # they save 1 and read 0
    assert (verdict.kind, verdict.text) == (
        "fault",
        "what another layout reads from a checkpoint differs: model.a, moment1.a, moment2.a",
    )


def test_a_run_that_begins_with_weights_must_have_their_bits(tmp_path: Path) -> None:
    verdict = Prover(FaultyRanks("none"), tmp_path).judge(composition_of(2, ("prove.weights=saved",)))
    assert (verdict.kind, verdict.text) == ("fault", "what a run begins with differs: model.a")


@pytest.mark.parametrize("word", ["prove.labels=none", "prove.then=", "prove.steps=4"])
def test_a_setting_that_prove_does_not_have_is_refused(word: str, tmp_path: Path) -> None:
    verdict = Prover(FaultyRanks("none"), tmp_path).judge(composition_of(2, (word,)))
    assert (verdict.kind, verdict.text) == ("refused", f"no such setting: {word}")


def test_a_small_model_of_every_family_is_legal_and_has_its_parts() -> None:
    base = base_of("cpu")
    model = load_run("debug", base).model
    for preset in FAMILIES:
        whole = load_run(preset).model
        small = load_run("debug", (*base, *family_overrides(preset, model, 1, 0.1))).model
        assert (small.family, small.hidden_size) == (whole.family, 32)
        assert (small.moe is None) == (whole.moe is None)
        assert small.attention.rope.theta == whole.attention.rope.theta


class GraphRanks:
    """Ranks whose captured graphs forget the last bit of one tensor in the third step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def play(self, ranks: int, part: Assignment) -> list[Played]:
        is_wrong = {"graphs.capture=full", "model.tie_word_embeddings=true"} <= set(part.overrides)
        self.steps.append(part.steps)
        value = torch.tensor([1.0]).nextafter(torch.tensor([2.0 if is_wrong else 1.0]))
        saved = [(name, (1,), [((0,), value)]) for name in ("model.a", "moment1.a", "moment2.a")]
        start = [(name, (1,), [((0,), torch.zeros(1))]) for name, _, _ in saved]
        trace = StepFigures([4.0] * part.steps, [float("nan")] * part.steps, [], 0.0, [0] * part.steps, {})
        one = replace(trace, norms=[1.0]) if part.has_choices else trace
        return [Played(one, start, saved, {})] * ranks


def test_graphs_must_give_the_bits_of_eager_passes(tmp_path: Path) -> None:
    ranks = GraphRanks()
    words = ("graphs.capture=full", "data.document_mask=true", "training.deterministic=true")
    assert Prover(ranks, tmp_path, 1).judge(composition_of(1, words, "cuda")).kind == "equal"
    assert ranks.steps == [2, 2, 8, 8]  # the eager one beside one process, then graphs beside it
    prover = Prover(ranks, tmp_path, 1, replays=1000)
    fault = prover.judge(composition_of(1, (*words, "model.tie_word_embeddings=true"), "cuda"))
    assert fault.text == "rank 0: graphs and eager passes differ: model.a, by up to 1.2e-07"
    assert ranks.steps[4:] == [1000, 1000]
    command = "penstock prove --device cuda --processes 1 graphs.capture=full model.tie_word_embeddings=true"
    assert prover.smallest(fault).composition.command == command


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_bits_are_compared_of_tensors_of_any_shape(shape: tuple[int, ...]) -> None:
    def ended(value: float) -> tuple[StepFigures, Saved]:
        return StepFigures([1.0], [1.0], [], 0.0, [0], {}), [
            ("model.a", shape, [((0,) * len(shape), torch.full(shape, value))])
        ]

    assert first_difference(ended(0.0), ended(0.0)) == ""
    assert (first_difference(ended(0.0), ended(-0.0)) == "model.a, by up to 0.0e+00") == (0 not in shape)


def test_rounding_cancels_in_a_factor_and_a_wrong_factor_or_a_lost_row_does_not() -> None:
    numbers = torch.Generator().manual_seed(1)
    rows = 0.3 + torch.randn(100, 64, 64, generator=numbers)  # gradients of a hundred rows of a batch
    exact, noise = rows.sum(0), torch.randn(64, 64, generator=numbers)

    def ended(gradient: torch.Tensor) -> StepFigures:
        tensors = {"moment1.wide": gradient, "moment1.bias": gradient[0], "moment1.unused": torch.zeros(64, 64)}
        return StepFigures([], [], [], 0.0, [], tensors)

    rounded = exact + 0.05 * noise * exact.norm() / noise.norm()
    assert worst_factor(ended(rounded), ended(exact)) < 2e-3
    assert worst_tensor(ended(rounded), ended(exact))[0] > 0.04
    for wrong in (1.01 * rounded, rounded - rows[7]):
        assert 0.8e-2 < worst_factor(ended(wrong), ended(exact)) < 1.3e-2


@dataclass
class PlantedRanks:
    """Ranks that give the gradient of one weight a wrong factor, unless they are the one process to compare with."""

    inner: Ranks
    alone: str  # an override of that process only
    factor: float = 1.0
    name: str = "moment1.head.weight"

    def play(self, ranks: int, part: Assignment) -> list[Played]:
        played = self.inner.play(ranks, part)
        is_wrong = ranks > 1 or (self.alone and self.alone not in part.overrides)
        return [self.planted(one) for one in played] if is_wrong else played

    def planted(self, played: Played) -> Played:
        def times(name: str) -> float:
            return self.factor if name == self.name else 1.0

        end = [(name, shape, [(at, x * times(name)) for at, x in pieces]) for name, shape, pieces in played.end]
        assert any(name == self.name for name, _, _ in end)
        return replace(played, end=end)


@pytest.mark.parametrize(("words", "factor"), [((), 1.002), (("training.precision=bf16",), 1.15)], ids=["fp32", "bf16"])
def test_a_wrong_factor_of_one_gradient_is_a_fault(
    words: tuple[str, ...], factor: float, ranks: Pool, tmp_path: Path
) -> None:
    planted = PlantedRanks(PoolRanks(ranks), "")
    layout = composition_of(2, ("parallel.expert=2", "model.layers=1", *words))
    verdict = Prover(planted, tmp_path).judge(layout)
    assert verdict.kind == "equal", verdict.text
    planted.factor = factor
    verdict = Prover(planted, tmp_path).judge(layout)
    assert verdict.kind == "fault" and "most of moment1.head.weight" in verdict.text, verdict.text


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_gradient_that_is_wrong_by_a_twentieth_is_a_fault_in_bfloat16_on_a_gpu(tmp_path: Path) -> None:
    children = Children("cuda")
    try:
        planted = PlantedRanks(children, "kernels.all=reference")
        layout = composition_of(1, ("model.layers=2", "training.precision=bf16", "kernels.all=triton"), "cuda")
        verdict = Prover(planted, tmp_path, gpus=1).judge(layout)
        assert verdict.kind in ("equal", "tie"), told(verdict)
        planted.factor = 1.05
        verdict = Prover(planted, tmp_path, gpus=1).judge(layout)
        assert verdict.kind == "fault" and "one factor" in verdict.text, told(verdict)
    finally:
        children.close()


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_random_compositions_on_a_gpu_equal_the_definitions_of_its_kernels(tmp_path: Path) -> None:
    children = Children("cuda")
    try:
        prover = Prover(children, tmp_path, gpus=1)
        made = [prover.judge(draw(SEED, number, 1)) for number in range(0, 48, 8)]  # neighbours are of one model
        made.append(prover.judge(draw_graphs(SEED, 6, 1)))
        assert [told(one) for one in made if one.kind == "fault"] == []
        assert sum(one.kind != "refused" for one in made) > 3
    finally:
        children.close()


class RoundingRanks(FaultyRanks):
    """A layout that differs, and one process that differs as much when its norms or all its numbers round otherwise."""

    def __init__(self, jolted: float, exact: float) -> None:
        super().__init__("wrong", 0.5)
        self.jolted, self.exact = jolted, exact

    def play(self, ranks: int, part: Assignment) -> list[Played]:
        played = super().play(ranks, part)
        is_jolted = {"model.rms_norm_eps=1.5e-06", "model.rms_norm_eps=1.0001e-06"} & set(part.overrides)
        moved = self.jolted if is_jolted else 0.0
        if ranks == 1 and part.given and not moved:
            assert not {"training.precision=bf16"} & set(part.overrides)
            moved = self.exact
        if moved:
            assert part.given, "the process makes the same choices"
            return [self.moved(played[0], moved)]
        return played

    def moved(self, played: Played, by: float) -> Played:
        end = [(name, shape, [(at, value + by)]) for name, shape, [(at, value)] in played.end]
        return replace(played, trace=replace(played.trace, losses=[4.0 + by]), end=end)


def test_what_differs_no_more_than_rounding_moves_one_process_is_a_tie(tmp_path: Path) -> None:
    low = (*PLANTED, "training.precision=bf16")
    for words, epsilon, jolted, exact, kind in (
        (PLANTED, "1.0001e-06", 0.3, 0.0, "tie"),
        (PLANTED, "1.0001e-06", 0.1, 0.0, "fault"),
        (low, "1.5e-06", 0.3, 0.3, "tie"),
        (low, "1.5e-06", 0.1, 0.3, "fault"),
        (low, "1.5e-06", 0.3, 0.1, "fault"),  # it is farther from float32 than bfloat16 is
    ):
        found = Prover(RoundingRanks(jolted, exact), tmp_path).judge(composition_of(2, words))
        why = f"and one process with model.rms_norm_eps={epsilon} differs as much"
        why += "; from float32 the two are loss 4.7e-02 and 7.0e-02, parameters" if words is low else ""
        assert (found.kind, why in found.text) == (kind, kind == "tie"), found.text


@pytest.mark.parametrize(("exact", "kind"), [(0.3, "tie"), (0.1, "fault")])
def test_on_gpus_the_distance_from_float32_decides_what_moves_more_than_norms_do(
    exact: float, kind: str, tmp_path: Path
) -> None:
    low = (*PLANTED, "training.precision=bf16")
    verdict = Prover(RoundingRanks(0.1, exact), tmp_path, gpus=2).judge(composition_of(2, low, "cuda"))
    assert verdict.kind == kind, verdict.text


@pytest.mark.parametrize(("device", "kind"), [("cuda", "tie"), ("cpu", "fault")])
def test_on_gpus_a_fault_in_fewer_bits_is_one_whichever_way_norms_round(
    device: Device, kind: str, tmp_path: Path
) -> None:
    composition = composition_of(2, (*PLANTED, "training.precision=bf16"), device)
    verdict = Prover(FaultyRanks("chance", 0.5), tmp_path, gpus=2).judge(composition)
    told_why = "norms that round otherwise: model.rms_norm_eps=5e-07 agrees" in verdict.text
    assert (verdict.kind, told_why) == (kind, kind == "tie"), verdict.text


def test_a_line_is_no_fault(tmp_path: Path) -> None:
    prover = Prover(FaultyRanks("line"), tmp_path)
    assert prover.judge(composition_of(2, PLANTED)).kind == "refused"
    assert prover.judge(composition_of(3, ("parallel.expert=2",))).text.startswith("parallel does not divide the ranks")
    both = ("model.moe.balance.aux_loss=global-batch", "model.moe.balance.aux_loss_coef=0.01")
    assert "by definition" in prover.judge(composition_of(2, both)).text


def turned_one(choices: Choices) -> Choices:
    """Every token takes the neighbours of its experts."""
    return replace(choices, experts_TK=(choices.experts_TK + 1) % choices.logits_TE.shape[1])


ROUTERS = (
    ("model.moe.router.scoring_func=softmax", "model.moe.router.softmax_after_top_k=true"),
    ("model.moe.router.n_group=4", "model.moe.router.topk_group=2", "model.moe.router.group_score=top2"),
    ("model.moe.balance.capacity_factor=1.0",),
)


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_choose_what_is_given_on_any_layout(router: tuple[str, ...], ranks: Pool, tmp_path: Path) -> None:
    pool, words = PoolRanks(ranks), ("model.layers=2", "training.micro_batch=1", "training.global_batch=4", *router)
    prover = Prover(pool, tmp_path)
    (alone,) = pool.play(1, prover.part(composition_of(1, words)))
    turned = {place: turned_one(one) for place, one in alone.choices.items()}
    file = prover.give(turned)
    for count, layout in ((1, ()), (2, ("parallel.tensor=2", "parallel.expert=2", "recompute.modules=layer"))):
        played = pool.play(count, prover.part(composition_of(count, words + layout), file))
        assert first_flip([one.choices for one in played], alone.choices) is not None
        of_first = {place: one for place, one in turned.items() if place == (0, 1)}  # later logits are others
        seen = [{place: one for place, one in part.choices.items() if place in of_first} for part in played]
        assert first_flip(seen, of_first) is None


def test_the_margin_of_a_flip_is_that_of_the_choice_which_moved_the_others() -> None:
    # Token 0 nearly chose expert 1; if it does, expert 1 is full, and drops the slot of token 1.
    logits_TE = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.9, 0.1]])
    experts_TK, weights_TK = torch.tensor([[0], [1]]), torch.tensor([[0.5], [0.4]])
    margins_T, drop_margins_T = torch.tensor([1e-7, 0.8]), torch.tensor([0.3, 0.1])
    alone = Choices(logits_TE, experts_TK, weights_TK, experts_TK >= 0, margins_T, drop_margins_T)
    moved = replace(alone, experts_TK=torch.tensor([[1], [1]]), kept_TK=torch.tensor([[True], [False]]))
    found = first_flip([{(0, 1): moved}], {(0, 1): alone})
    assert found is not None and (found.tokens, found.margin, found.drops_only) == (1, pytest.approx(1e-7), False)
    dropped = replace(alone, kept_TK=torch.tensor([[True], [False]]))
    found = first_flip([{(0, 1): dropped}], {(0, 1): alone})
    assert found is not None and (found.tokens, found.margin, found.drops_only) == (1, pytest.approx(0.1), True)


def test_equal_tokens_that_are_dropped_for_each_other_are_at_the_cut() -> None:
    logits_TE = torch.tensor([[0.0, 0.9], [0.0, 0.9], [0.8, 0.0]])
    far_T, kept_TK = torch.tensor([0.9, 0.9, 0.8]), torch.tensor([[True], [False], [True]])
    alone = Choices(logits_TE, torch.tensor([[1], [1], [0]]), torch.ones(3, 1), kept_TK, far_T, far_T)
    # All equal tokens take the first one's place, because nothing tells them apart.
    other = replace(alone, kept_TK=torch.tensor([[False], [True], [True]]))
    found = first_flip([{(0, 1): other}], {(0, 1): alone})
    assert found is not None and (found.tokens, found.margin, found.of_equal_tokens) == (1, 0.0, True)
    lost = replace(alone, kept_TK=torch.tensor([[True], [True], [False]]))
    found = first_flip([{(0, 1): lost}], {(0, 1): alone})
    assert found is not None and found.margin == pytest.approx(0.8) and not found.of_equal_tokens


def test_slots_over_capacity_have_the_margin_of_their_weights(ranks: Pool, tmp_path: Path) -> None:
    words = ("model.layers=2", "model.moe.balance.capacity_factor=1.0")
    (alone,) = PoolRanks(ranks).play(1, Prover(PoolRanks(ranks), tmp_path).part(composition_of(1, words)))
    for one in alone.choices.values():
        assert not one.kept_TK.all() and one.drop_margins_T.min() >= 0
        # A token that lost a slot to another one has a margin.
        assert one.drop_margins_T[(~one.kept_TK).any(1)].isfinite().all()


def test_what_a_rank_gave_travels_whole(ranks: Pool, tmp_path: Path) -> None:
    prover = Prover(PoolRanks(ranks), tmp_path)
    (played,) = PoolRanks(ranks).play(1, prover.part(composition_of(1, ("model.layers=2",))))
    again = decode(encode(played), Played)
    assert again.trace == played.trace
    for saved, wanted in ((again.start, played.start), (again.end, played.end)):
        rectangles, expected = (
            [(name, shape, at, x) for name, shape, pieces in parts for at, x in pieces] for parts in (saved, wanted)
        )
        assert [part[:3] for part in rectangles] == [part[:3] for part in expected]
        assert_equal([part[3] for part in rectangles], [part[3] for part in expected])
    assert again.choices.keys() == played.choices.keys()
    for router, choices in played.choices.items():
        assert_equal([*vars(again.choices[router]).values()], [*vars(choices).values()])


@pytest.mark.slow
def test_children_answer_refuse_and_are_replaced(tmp_path: Path) -> None:
    children = Children()
    try:
        prover = Prover(children, tmp_path)
        layout = composition_of(2, ("parallel.expert=2", "model.layers=2"))
        assert prover.judge(layout).kind == "equal"
        broken = replace(prover.part(layout), rate="fast")
        with pytest.raises(PlayError, match="rank 0:\nTraceback"):
            children.play(2, broken)
        assert prover.judge(layout).kind == "equal"
    finally:
        children.close()


def test_the_verb_plays_one_composition_or_draws(
    ranks: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "Children", lambda device: PoolRanks(ranks))
    assert main(["prove", "--processes", "2", "parallel.expert=2", "model.layers=2"]) == 0
    assert capsys.readouterr().out.startswith("equal\nloss           differs by ")
    monkeypatch.setattr(verb, "Children", lambda device: FaultyRanks("wrong"))
    monkeypatch.setattr(verb, "outcomes", lambda prover, seed: enumerate([prover.judge(composition_of(2, PLANTED))]))
    assert main(["prove", "--seconds", "0"]) == 1
    out = capsys.readouterr().out
    assert "draw 0: fault: loss 2.5e-03" in out
    assert "  penstock prove --processes 2 parallel.tensor=2 model.tie_word_embeddings=true" in out
    assert main(["prove", "--seconds", "0", "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert (fault["kind"], fault["number"]) == ("fault", 0)


def test_what_cannot_be_proved_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, fix in (
        (["parallel.expert=2"], "fix: --processes 4"),
        (["--graphs"], "a CPU has no graphs; fix: --device cuda"),
        (["--device", "cuda"], "there is no GPU to use"),
    ):
        assert main(["prove", *words]) == 2
        error = capsys.readouterr().err
        assert fix in error and error.count("\n") == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["prove", "--device", "cuda", "--processes", "4"]) == 2
    assert "more processes than GPUs on this machine; got 4; allowed: 2" in capsys.readouterr().err
