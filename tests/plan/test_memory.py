"""The parts of a rank's memory add up, and each setting changes its part."""

import pytest

from penstock.config.load import load_run, with_overrides
from penstock.config.size import size_of
from penstock.kernels.tuning import named_device
from penstock.plan.memory import Overheads, RankMemory, fullest_rank, memory_of
from penstock.plan.meta_rank import Target

TARGET = Target(device=named_device("H200", "bf16"), imbalance=1.0)
FOUR_LAYERS = ("deepseek-v2-lite-4l", ["training.global_batch=8", "training.micro_batch=2"])


def planned(*overrides: str, world: int = 1, rank: int = 0, target: Target = TARGET) -> RankMemory:
    preset, base = FOUR_LAYERS
    return memory_of(load_run(preset, [*base, *overrides]), world=world, rank=rank, target=target)


def test_the_parts_are_the_whole() -> None:
    memory = planned()
    assert sum(memory.terms.values()) == memory.activations + memory.logits
    state = memory.parameters + memory.gradients + memory.master + memory.moments
    assert memory.total == memory.allocated == state + memory.activations + memory.logits + memory.buffers
    # bfloat16 weights; everything else of a value is float32, but the routers' own masters.
    assert memory.moments == pytest.approx(4 * memory.parameters, rel=1e-3)
    assert memory.gradients == pytest.approx(memory.master, rel=1e-3)


def test_overheads_of_the_hardware_are_added() -> None:
    run = load_run(FOUR_LAYERS[0], FOUR_LAYERS[1])
    overheads = Overheads(libraries=100, context=1000, unused=0.5, process=7)
    memory = memory_of(run, world=1, rank=0, target=TARGET, overheads=overheads)
    assert memory.allocated == planned().allocated + 100 and memory.host == 0
    assert memory.total == memory.allocated + 1000 + round(0.5 * memory.allocated)
    there = with_overrides(run, ["offload.optimizer=true"])
    memory = memory_of(there, world=1, rank=0, target=TARGET, overheads=overheads)
    assert memory.host == planned("offload.optimizer=true").host + 7, "the process counts where it keeps tensors"


def test_recomputed_and_offloaded_memory_is_not_on_the_device() -> None:
    plain = planned()
    assert planned('recompute.modules=["layer"]').activations < 0.6 * plain.activations
    offloaded = planned('offload.activations=["layer"]')
    assert offloaded.activations + offloaded.logits < 0.8 * (plain.activations + plain.logits)
    streamed = planned("offload.optimizer=true")
    assert streamed.host == plain.moments + plain.master and streamed.moments < 1 << 30


def test_gradients_in_host_memory_leave_slots_of_the_largest_layer() -> None:
    plain = planned("offload.optimizer=true")
    there = planned("offload.optimizer=true", "offload.gradients=true")
    # Sums of the embedding and the output projection stay: 102,400 rows of 2,048 each. Three slots have a layer each.
    ends = 2 * 102_400 * 2048 * 4
    layers = plain.gradients - ends
    assert there.host - plain.host == pytest.approx(layers, rel=1e-3)
    # Three of the four layers have experts, and are most of the model.
    assert there.gradients == pytest.approx(ends + layers, rel=0.04)
    assert there.parameters == plain.parameters


@pytest.mark.parametrize(("moments", "bytes_"), [("bf16", 4), ("int8", 2 + 8 / 128)])
def test_state_in_fewer_bits_is_smaller_on_the_device_and_on_the_host(moments: str, bytes_: float) -> None:
    plain = planned()
    chosen = [f"optimizer.moment_dtype={moments}", "optimizer.store_param_remainders=true"]
    smaller = planned(*chosen)
    assert smaller.master == plain.master // 2
    # Vectors keep float32 moments, and rows of 1,408 or 2,048 values are whole blocks.
    assert smaller.moments == pytest.approx(plain.moments * bytes_ / 8, rel=2e-3)
    assert planned(*chosen, "offload.optimizer=true").host == smaller.moments + smaller.master


def test_an_imbalance_counts_where_rows_are_as_many_as_they_are() -> None:
    skewed = Target(device=TARGET.device, imbalance=2.0)
    sent = ["parallel.expert=2", "dispatch.method=all-to-all"]
    assert planned(*sent, world=2, target=skewed).activations > planned(*sent, world=2).activations
    bounded = ["parallel.expert=2", "dispatch.method=all-gather", "dispatch.sync_free=2"]
    assert planned(*bounded, world=2, target=skewed) == planned(*bounded, world=2)


def test_memory_that_gpus_share_is_planned_where_a_node_has_several() -> None:
    pushed = ["parallel.expert=2", "dispatch.method=symmetric"]
    assert planned(*pushed, world=2).buffers > planned(world=1).buffers + (64 << 20)
    apart = Target(device=TARGET.device, ranks_per_node=1)
    assert planned("parallel.expert=2", world=2, target=apart).buffers < 64 << 20


def test_the_update_cannot_use_the_pool_of_a_captured_pass() -> None:
    assert planned("graphs.capture=full", "parallel.shard=optimizer", world=2).graph_pool > 0


@pytest.mark.parametrize("shard", ["optimizer", "full"])
def test_ranks_that_share_one_expert_hold_equal_parts_of_its_state(shard: str) -> None:
    layout = ["parallel.tensor=2", "parallel.expert=8", "training.global_batch=64", f"parallel.shard={shard}"]
    run = load_run("mixtral-8x7b-2l", layout)
    first, other = (memory_of(run, world=16, rank=rank, target=TARGET) for rank in (0, 8))
    assert (first.moments, first.master) == (other.moments, other.master)
    assert first.moments == pytest.approx(8 * size_of(run.model, 1).parameters / 16, rel=1e-3)


PIPELINE = ["parallel.pipeline=2", "pipeline.layout=Ett|ttL"]


def test_the_first_rank_of_a_pipeline_holds_a_micro_batch_while_it_works_on_another() -> None:
    first, last = (planned(*PIPELINE, "pipeline.schedule=1f1b", world=2, rank=rank) for rank in range(2))
    assert first.terms["attention"] == last.terms["attention"]
    assert first.terms["held"] > first.terms["attention"] and last.terms["held"] == 0, "two micro-batches, and one"
    assert sum(first.terms.values()) == first.activations + first.logits
    assert fullest_rank((first, last)) == max((first, last), key=lambda memory: memory.total)


def test_weight_gradients_that_are_put_off_hold_what_they_need() -> None:
    plain, split = (planned(*PIPELINE, f"pipeline.schedule={name}", world=2, rank=1) for name in ("1f1b", "zb-1f1b"))
    assert plain.activations + plain.logits < split.activations + split.logits < 3 * (plain.activations + plain.logits)


def test_weights_in_8_bits_are_held_twice_beside_those_in_16_and_activations_once() -> None:
    plain, eight = planned(), planned("float8.dense=blockwise", "float8.experts=blockwise")
    # Embedding, head and norms have no copies; scales are 4 bytes for each 128 x 128.
    assert 0.7 < (eight.parameters - plain.parameters) / plain.parameters < 1.0
    assert eight.activations < plain.activations
    assert (eight.gradients, eight.moments) == (plain.gradients, plain.moments)

    def copies(*overrides: str) -> int:
        return planned("float8.experts=blockwise", *overrides).parameters - planned().parameters

    # Of four layers the first has no experts.
    assert copies("float8.last_layers=1") == pytest.approx(copies() * 2 / 3, rel=1e-6)
    assert copies("float8.first_layers=1") == copies()


def test_experts_in_8_bits_keep_rows_of_all_layers_in_an_arena() -> None:
    base = ["parallel.expert=2", "dispatch.method=all-gather", "dispatch.sync_free=2"]
    base += ["dispatch.row_capacity_factor=1.5", "float8.experts=blockwise"]

    def held(layer_capacity_factor: float, *overrides: str) -> tuple[int, int]:
        factor = f"dispatch.layer_capacity_factor={layer_capacity_factor}"
        memory = planned(*base, factor, *overrides, world=2)
        return memory.terms["ffn.experts"], memory.terms["ffn.dispatch"]

    (kept, places), (kept_of_more, more_places) = held(1.5), held(2.0)
    # Only tables of places grow with the room of a layer.
    assert kept_of_more == pytest.approx(kept, rel=1e-3) and more_places > places
    with_biases = "model.moe.bias=true"
    assert held(1.5, with_biases) == held(2.0, with_biases), "they have no arena"
