"""Whole models with float8 products: they train nearly as in 16 bits, on any number of ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.base.errors import KernelError
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.kernels.float8.operators import NO_FLOAT8, REFERENCE
from penstock.kernels.float8.quantized import BLOCKWISE, BLOCKWISE_SQUARE, E4M3_FNUZ, E5M2, E5M2_FNUZ, MXFP8
from penstock.kernels.tuning import named_device
from penstock.models.build import build_model
from penstock.models.kernels import choose_float8, float8_rule
from penstock.models.linear import Linear
from penstock.models.norm import PreNorm
from penstock.models.parameters import refresh_float8
from penstock.parallel.launch.environment import Environment
from penstock.train import step as step_module
from penstock.train.capture import CapturedParts
from penstock.train.checkpoint import CheckpointStore
from penstock.train.setup import Session, prepare
from penstock.train.state import restore_state, save_state
from tests.closeness import assert_close, is_close
from tests.distributed.case import GQA, layout, pipeline
from tests.distributed.one_loss import BASE, StepFigures, follow, trace
from tests.distributed.pool import Pool
from tests.parallel.recorded_graph import Graphs

ON_RANKS = ("model.layers=2", "training.micro_batch=4", "evaluation.rows=4", "float8.dense=blockwise")

CASES = {
    "EP 2": layout("expert=2"),
    "FSDP": layout("shard=full"),
    "FSDP, weights gathered in 8 bits": layout("shard=full", "float8.gather=true"),
    "TP 2": layout("tensor=2"),
    "TP 2, grouped queries": layout("tensor=2"),
    "FSDP, squares of grouped queries": layout("shard=full", "float8.gather=true"),
    "PP 2, weight gradients put off": (*pipeline("zb-1f1b", 2), "training.micro_batch=2"),
    "TP 2, output projection": layout("tensor=2"),
    "FSDP, output projection": layout("shard=full"),
    "PP 2, output projection": (*pipeline("zb-1f1b", 2), "training.micro_batch=2"),
}
HEAD = ("float8.dense=none", "float8.head=blockwise-square", "model.vocab_size=512")  # whole blocks on two ranks


@cache
def alone(ranks: Pool, model: tuple[str, ...]) -> StepFigures:
    return trace(ranks, 1, model, 2)


@pytest.mark.often("TP 2, output projection", "FSDP, weights gathered in 8 bits", "PP 2, weight gradients put off")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_see_the_losses_of_one(case: str, ranks: Pool) -> None:
    model = (*ON_RANKS, *((*GQA, "float8.dense=blockwise-square") if "grouped" in case else ()))
    model = (*model, *(HEAD if "output" in case else ()))
    expected, found = alone(ranks, model), trace(ranks, 2, (*model, *CASES[case]), 2)
    # A number next to a tie may go to its other side.
    assert_close(found.losses, expected.losses, what="losses")
    assert_close(found.norms, expected.norms, tolerance=1e-4, what="norms")


CPU = torch.device("cpu")
SMALL = (*BASE, "model.layers=2", "training.micro_batch=4", "evaluation.rows=4")
DENSE = "float8.dense=blockwise"


def run_of(*overrides: str) -> Run:
    return load_run("debug", SMALL + overrides)


def matrices(decoder: nn.Module) -> dict[str, Linear]:
    return {name: module for name, module in decoder.named_modules() if isinstance(module, Linear)}


def test_all_matrices_of_layers_are_in_8_bits_and_the_output_projection_only_on_request() -> None:
    decoder = build_model(run_of(DENSE), CPU)
    assert decoder.head_float8 is None
    asked = build_model(run_of(*HEAD), CPU).head_float8
    assert asked is not None and (asked.head, asked.dense) == (BLOCKWISE_SQUARE, None)
    found = matrices(decoder)
    assert [name for name, one in found.items() if one.float8 is None] == ["head"]
    assert "mtp.0.join" in found and "blocks.1.ffn.shared.gate_up" in found


def test_first_and_last_layers_stay_on_request() -> None:
    decoder = build_model(run_of(DENSE, "model.layers=5", "float8.first_layers=1", "float8.last_layers=2"), CPU)
    layers = {".".join(name.split(".")[:2]) for name, one in matrices(decoder).items() if one.float8 is not None}
    assert layers == {"blocks.1", "blocks.2"}
    in_8_bits = {name for name, one in decoder.named_modules() if isinstance(one, PreNorm) and one.float8 is not None}
    assert {name.rpartition(".")[0] for name in in_8_bits} == layers


def test_a_norm_quantizes_its_rows_and_writes_16_bits_only_for_their_readers() -> None:
    def readers(*overrides: str) -> tuple[set[str], set[str]]:
        decoder = build_model(run_of(DENSE, *overrides), CPU)
        norms = {name: one for name, one in decoder.blocks.named_modules() if isinstance(one, PreNorm)}
        return {name for name in norms if norms[name].float8}, {name for name in norms if norms[name].keep_plain}

    attention, ffn = ({f"{layer}.{part}_norm" for layer in range(2)} for part in ("attention", "ffn"))
    assert readers() == (attention | ffn, {"1.ffn_norm"}), "the router reads 16 bits"
    assert readers("model.moe.shared_expert_intermediate_size=0")[0] == attention | {"0.ffn_norm"}
    assert readers("recompute.modules=shared-expert")[0] == attention
    assert readers(*GQA)[0] == attention | ffn
    keys_of_8 = ("model.attention.kv_heads=1", "model.attention.head_dim=8")
    assert readers(*GQA, *keys_of_8)[1] == attention | {"1.ffn_norm"}


def test_the_rule_of_a_run_follows_the_chip() -> None:
    run = run_of("float8.dense=auto", "float8.experts=auto", "float8.gradients=e5m2")
    assert choose_float8(run_of(), CPU) == NO_FLOAT8
    on_cpu = choose_float8(run, CPU)
    assert on_cpu.dense == on_cpu.experts == BLOCKWISE and on_cpu.dispatch is None
    assert on_cpu.gradient == E5M2 and on_cpu.operators is REFERENCE
    run = run.model_copy(update={"kernels": run.kernels.model_copy(update={"all": "reference"})})
    blackwell, amd = (float8_rule(run, named_device(name, "bf16")) for name in ("B200", "MI300X"))
    assert blackwell.dense == MXFP8
    assert (amd.dense, amd.forward, amd.gradient) == (BLOCKWISE, E4M3_FNUZ, E5M2_FNUZ)


def test_a_chip_that_lacks_a_recipe_refuses_it() -> None:
    with pytest.raises(KernelError, match="do not apply scales of 32"):
        float8_rule(run_of("float8.dense=mxfp8"), named_device("H200", "bf16"))
    with pytest.raises(KernelError, match="sm_80 has no products"):
        float8_rule(run_of("float8.dense=auto"), named_device("A100", "bf16"))
    with pytest.raises(KernelError, match="Triton is not installed"):
        float8_rule(run_of("float8.dense=auto"), replace(named_device("H200", "bf16"), packages=frozenset()))


def test_dense_products_of_torch_are_taken_where_they_are_and_refused_elsewhere() -> None:
    run = run_of("float8.dense=auto", "kernels.float8=torch")
    ours = float8_rule(run_of("float8.dense=auto"), named_device("MI300X", "bf16")).operators
    theirs = float8_rule(run, named_device("H200", "bf16")).operators
    assert theirs.multiply is not ours.multiply and theirs == replace(ours, multiply=theirs.multiply)
    for recipe in ("auto", "blockwise-square"):
        chosen = float8_rule(run_of(f"float8.dense={recipe}"), named_device("H200", "bf16")).operators
        assert chosen == theirs, "they are faster"
    with pytest.raises(KernelError, match="sm_90 only, this is sm_100"):
        float8_rule(run_of("float8.dense=blockwise", "kernels.float8=torch"), named_device("B200", "bf16"))
    with pytest.raises(KernelError, match="no GPU"):
        choose_float8(run, CPU)


def test_experts_by_their_definition_wait_for_the_device_and_are_refused_where_it_must_not_wait() -> None:
    experts = "float8.experts=auto", "kernels.float8=reference"
    assert float8_rule(run_of(*experts, "dispatch.sync_free=1"), named_device("B200", "bf16")).operators is REFERENCE
    with pytest.raises(KernelError, match="sync_free=2 cannot be had"):
        float8_rule(run_of(*experts, "dispatch.sync_free=2"), named_device("B200", "bf16"))


@contextmanager
def session_of(*overrides: str) -> Iterator[Session]:
    session = prepare(run_of(*overrides), Environment(color=False, threads=1, world_size=1))
    yield session
    session.state.batches.close()


def followed(*overrides: str, steps: int = 10) -> list[float]:
    with session_of("model.mtp_layers=0", *overrides) as session:
        return follow(session, steps).losses


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [(), GQA], ids=["latent", "grouped queries"])
def test_a_small_model_learns_nearly_as_in_16_bits(model: tuple[str, ...], precision: str) -> None:
    overrides = (*model, f"training.precision={precision}")
    expected, found = followed(*overrides), followed(*overrides, DENSE, "float8.experts=blockwise")
    assert found != expected
    assert expected[-1] < 0.9 * expected[0], "the model learns"
    assert_close(found, expected, tolerance=0.01)


@pytest.mark.parametrize("is_tied", ["false", "true"])
def test_the_output_projection_in_8_bits_changes_the_loss_of_training_and_no_other(is_tied: str) -> None:
    plain = ("model.vocab_size=512", f"model.tie_word_embeddings={is_tied}")
    with session_of(*plain) as session, session_of(*HEAD, *plain) as in_8_bits:
        assert follow(session, 0).held_out == follow(in_8_bits, 0).held_out > 0
    expected, found = followed(*plain, steps=3), followed(*HEAD, *plain, steps=3)
    assert found[0] != expected[0], "before any step"
    assert_close(found, expected, tolerance=0.01)


@cache
def followed_in_16_bits() -> list[float]:
    return followed(steps=3)


@pytest.mark.often("mxfp8", "tensorwise")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise-square", "mxfp8"])
def test_every_recipe_trains(recipe: str) -> None:
    found = followed(f"float8.dense={recipe}", steps=3)
    assert found != followed_in_16_bits()
    assert_close(found, followed_in_16_bits(), tolerance=0.01)


@pytest.mark.often(
    "recompute.modules=layer",
    "recompute.modules=shared-expert dispatch.overlap=shared",
    "recompute.modules=?*norm*latent-up*",
)
@pytest.mark.parametrize(
    "overrides",
    [
        ('recompute.modules=["norm", "latent-up"]',),
        ("recompute.modules=layer",),
        ('recompute.modules=["moe", "dense"]',),
        ("recompute.modules=shared-expert", "dispatch.overlap=shared"),
        ("dispatch.overlap=shared",),
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_what_is_computed_again_or_beside_a_transfer_changes_nothing(overrides: tuple[str, ...]) -> None:
    assert_close(followed(DENSE, *overrides, steps=2), followed(DENSE, steps=2))


@pytest.mark.slow
def test_replayed_parts_read_the_copies_of_their_step() -> None:
    overrides = (DENSE, "float8.experts=blockwise", "model.mtp_layers=0")
    expected = followed(*overrides, steps=4)
    graphs = Graphs(2)
    with session_of(*overrides) as session:
        parts = CapturedParts(is_asked_for=True, begin_pool=graphs.begin)
        found = follow(replace(session, rule=replace(session.rule, passes=parts)), 4).losses
    assert graphs.captures == 4, "two layers forward and backward"
    assert_close(found, expected)


def test_weights_are_quantized_anew_behind_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = followed(DENSE, steps=3)
    with monkeypatch.context() as patch:
        patch.setattr(Linear, "refresh_float8", lambda matrix: None)
        assert_close(followed(DENSE, steps=3), expected, what="losses where each pass quantizes")
    monkeypatch.setattr(step_module, "refresh_float8", lambda modules: None)
    stale = followed(DENSE, steps=3)
    assert stale[0] == expected[0]
    assert not is_close(stale[1:], expected[1:], tolerance=1e-4), "a copy that stays old is seen"


def test_a_resumed_run_reads_copies_of_what_was_saved(tmp_path: Path) -> None:
    overrides = (DENSE, "float8.experts=blockwise", "model.mtp_layers=0")
    expected = followed(*overrides, steps=4)
    store = CheckpointStore(tmp_path, keep=1, asynchronous=False)
    with session_of(*overrides) as session:
        follow(session, 2)
        save_state(store, 2, session.state, notes={})
    with session_of(*overrides) as session:
        restore_state(store, 2, session.state)
        assert follow(session, 2).losses == expected[2:]
    store.close()


@pytest.mark.parametrize("recipe", ["blockwise", "blockwise-square"])
def test_planted_outliers_give_no_nan(recipe: str) -> None:
    with session_of(f"float8.dense={recipe}", f"float8.experts={recipe}") as session:
        with torch.no_grad():
            for name, parameter in session.model.named_parameters():
                if name.endswith("norm.weight_D"):
                    parameter[3] = 3e3
                elif name.endswith("weight") and "blocks" in name:
                    parameter.view(-1)[::997] = 50.0
        refresh_float8(session.model.modules)
        seen = follow(session, 2)
    assert torch.tensor(seen.losses + seen.norms).isfinite().all()
