"""Every rule of layout, by the line that the user reads."""

import pytest

from penstock.config import layout_rules as rules
from penstock.config.fit import SPLITTING_SCHEDULES
from penstock.config.rules import Rule
from penstock.layout.schedules import SCHEDULES, schedule

DENSE = ("model.moe=none", "model.dense_layers=4")
GROUPED = ("model.attention.kind=gqa", "model.attention.heads=8", "model.attention.kv_heads=4")
GROUPED += ("model.attention.head_dim=32",)
PIPELINE = ("parallel.pipeline=2",)
TWO_STAGES = (*PIPELINE, "pipeline.stages_per_rank=2")
FIX_LAYOUT = "fix: write it like Et*3|(t*4|)*14t*2,mL, or leave pipeline.layout empty"
RECOMPUTED = "norm, latent-up, attention, expert-activation, shared-expert, dense, moe, layer"

BROKEN: list[tuple[Rule, tuple[str, ...], str]] = [
    (
        rules.experts_have_ranks_only_if_there_are_any,
        (*DENSE, "parallel.expert=2"),
        "parallel.expert shares experts, but the model has none (model.moe); got 2; allowed: 1; "
        "fix: set parallel.expert=1",
    ),
    (
        rules.experts_have_ranks_only_if_there_are_any,
        (*DENSE, "parallel.expert_tensor=2"),
        "parallel.expert_tensor shares experts, but the model has none (model.moe); got 2; allowed: 1; "
        "fix: set parallel.expert_tensor=1",
    ),
    (
        rules.expert_ranks_divide_experts,
        ("parallel.expert=3",),
        "parallel.expert must divide model.moe.experts (8); got 3; allowed: 1, 2, 4, 8",
    ),
    (
        rules.expert_tensor_ranks_divide_an_expert,
        ("parallel.expert_tensor=3",),
        "parallel.expert_tensor must divide model.moe.moe_intermediate_size (128); got 3; "
        "allowed: 1, 2, 4, 8, 16, 32, 64, 128",
    ),
    (
        rules.tensor_ranks_divide_heads,
        ("parallel.tensor=3",),
        "parallel.tensor must divide model.attention.heads (4); got 3; allowed: 1, 2, 4",
    ),
    (
        rules.tensor_ranks_divide_heads,
        (*GROUPED, "parallel.tensor=8"),
        "parallel.tensor must divide model.attention.kv_heads (4); got 8; allowed: 1, 2, 4",
    ),
    (
        rules.tensor_ranks_divide_the_vocabulary,
        ("parallel.tensor=4",),
        "model.vocab_size must be a multiple of parallel.tensor (4); got 257; "
        "fix: set model.vocab_size=260; unused token ids do no harm",
    ),
    (
        rules.tensor_ranks_divide_widths,
        ("model.intermediate_size=385", "parallel.tensor=2"),
        "parallel.tensor must divide model.intermediate_size (385); got 2; allowed: 1, 5, 7, 11, 35, 55, 77, 385",
    ),
    (
        rules.tensor_ranks_divide_widths,
        ("model.moe.shared_expert_intermediate_size=9", "parallel.tensor=2"),
        "parallel.tensor must divide model.moe.shared_expert_intermediate_size (9); got 2; allowed: 1, 3, 9",
    ),
    (
        rules.ranks_divide_the_sequence,
        ("parallel.context=3", "training.sequence_length=127"),
        "training.sequence_length must be a multiple of 2 x parallel.context x parallel.tensor (6); got 127; "
        "fix: set training.sequence_length to 126 or 132",
    ),
    (
        rules.ranks_divide_the_sequence,
        ("parallel.context=2", "parallel.tensor=2", "training.sequence_length=126"),
        "training.sequence_length must be a multiple of parallel.context x parallel.tensor (4); got 126; "
        "fix: set training.sequence_length to 124 or 128",
    ),
    (
        rules.ranks_divide_the_sequence,
        ("parallel.tensor=8", "training.sequence_length=6"),
        "training.sequence_length must be a multiple of parallel.context x parallel.tensor (8); got 6; "
        "fix: set training.sequence_length to 8",
    ),
    (
        rules.ulysses_divides_heads,
        ("parallel.context=4", "parallel.tensor=2", "parallel.context_method=ulysses"),
        "parallel.context_method ulysses needs model.attention.heads divided by parallel.context x parallel.tensor "
        "(8); got 4; fix: set parallel.context_method=all-gather",
    ),
    (
        rules.ulysses_divides_heads,
        (*GROUPED, "parallel.context=8", "parallel.context_method=ulysses"),
        "parallel.context_method ulysses needs model.attention.kv_heads divided by parallel.context x parallel.tensor "
        "(8); got 4; fix: set parallel.context_method=all-gather",
    ),
    (
        rules.schedule_has_its_stages,
        TWO_STAGES,
        "pipeline.stages_per_rank does not go with pipeline.schedule 1f1b; got 2; allowed: 1; "
        "fix: set pipeline.stages_per_rank=1, or pipeline.schedule=interleaved",
    ),
    (
        rules.schedule_has_its_stages,
        (*PIPELINE, "pipeline.schedule=interleaved"),
        "pipeline.stages_per_rank does not go with pipeline.schedule interleaved; got 1; allowed: >= 2; "
        "fix: set pipeline.stages_per_rank=2, or pipeline.schedule=1f1b",
    ),
    (
        rules.schedule_has_its_stages,
        (*PIPELINE, "pipeline.schedule=v-half", "pipeline.stages_per_rank=3"),
        "pipeline.stages_per_rank does not go with pipeline.schedule v-half; got 3; allowed: 2; "
        "fix: set pipeline.stages_per_rank=2, or pipeline.schedule=interleaved",
    ),
    (
        rules.pipeline_has_enough_layers,
        ("parallel.pipeline=4", "pipeline.stages_per_rank=2", "pipeline.schedule=interleaved"),
        "parallel.pipeline makes more stages than model.layers (4), the embedding and the head can fill; "
        "got 4 ranks x 2 stages = 8; allowed: up to 6; fix: lower parallel.pipeline or pipeline.stages_per_rank",
    ),
    (
        rules.layout_has_a_pipeline,
        ("pipeline.layout=Et*2|t*2L",),
        "pipeline.layout divides a pipeline, but parallel.pipeline is 1; got 'Et*2|t*2L'; "
        "fix: set parallel.pipeline, or leave pipeline.layout out",
    ),
    (
        rules.layout_can_be_read,
        (*PIPELINE, "pipeline.layout=Et*2|x*2L"),
        "pipeline.layout at character 6: 'x' means nothing; got 'x*2L' after 'Et*2|'; allowed: E, t, m, L, ( or |; "
        f"{FIX_LAYOUT}",
    ),
    (
        rules.layout_can_be_read,
        (*PIPELINE, "pipeline.layout=Et*2|tL"),
        "pipeline.layout has the wrong number of decoder layers (t); got 3 in 'Et*2|tL'; allowed: 4 (model.layers); "
        "fix: add 1, or leave it empty",
    ),
    (
        rules.layout_can_be_read,
        (*TWO_STAGES, "pipeline.layout=Et*2|tL"),
        "pipeline.layout has the wrong number of decoder layers (t); got 3 in 'Et*2|tL'; allowed: 4 (model.layers); "
        "fix: add 1, or leave it empty",
    ),
    (
        rules.gathered_weights_meet_whole_backwards,
        (*TWO_STAGES, "pipeline.schedule=zb-v", "parallel.shard=full"),
        "parallel.shard full does not go with pipeline.schedule zb-v, which splits backward; got full; "
        "allowed: auto, none, optimizer; fix: set parallel.shard=optimizer",
    ),
    (
        rules.shards_have_something_to_divide,
        ("parallel.shard=none", "parallel.shard_size=2"),
        "parallel.shard_size says how many ranks divide a copy, but parallel.shard none divides nothing; got 2; "
        "fix: set parallel.shard_size=0, or parallel.shard=optimizer",
    ),
    (
        rules.recomputed_modules_exist,
        ('recompute.modules=["norm", "atention"]',),
        f"recompute.modules has an unknown name; got atention; allowed: {RECOMPUTED}; fix: did you mean attention?",
    ),
    (
        rules.recomputed_modules_exist,
        ("recompute.modules=xyzzy",),
        f"recompute.modules has an unknown name; got xyzzy; allowed: {RECOMPUTED}",
    ),
    (
        rules.recomputed_modules_exist,
        (*GROUPED, "recompute.modules=latent-up"),
        "recompute.modules names latent-up, but model.attention.kind is not mla; "
        "allowed: norm, attention, expert-activation, shared-expert, dense, moe, layer; fix: leave latent-up out",
    ),
    (
        rules.recomputed_modules_exist,
        (*DENSE, "recompute.modules=expert-activation"),
        "recompute.modules names expert-activation, but the model has no model.moe; "
        "allowed: norm, latent-up, attention, dense, layer; fix: leave expert-activation out",
    ),
    (
        rules.recomputed_modules_exist,
        ("model.moe.shared_expert_intermediate_size=0", "recompute.modules=shared-expert"),
        "recompute.modules names shared-expert, but model.moe.shared_expert_intermediate_size is 0; "
        "allowed: norm, latent-up, attention, expert-activation, dense, moe, layer; fix: leave shared-expert out",
    ),
    (
        rules.offloaded_modules_exist,
        ("offload.activations=norm",),
        "offload.activations has an unknown name; got norm; allowed: attention, dense, moe, layer",
    ),
    (
        rules.offloaded_modules_exist,
        ("model.dense_layers=0", "offload.activations=dense"),
        "offload.activations names dense, but model.dense_layers is 0; allowed: attention, moe, layer; "
        "fix: leave dense out",
    ),
    (
        rules.tensor_ranks_divide_widths,
        ("model.dense_layers=0", "model.moe.moe_layer_freq=2", "model.intermediate_size=383", "parallel.tensor=2"),
        "parallel.tensor must divide model.intermediate_size (383); got 2; allowed: 1, 383",
    ),
    (
        rules.recomputed_layers_exist,
        ("recompute.modules=layer", "recompute.layers=[0, 4, -1]"),
        "recompute.layers has numbers that do not exist; got 4, -1; allowed: 0 to 3",
    ),
    (
        rules.recomputed_stages_exist,
        (*PIPELINE, "recompute.modules=layer", "recompute.stages=2"),
        "recompute.stages has numbers that do not exist; got 2; allowed: 0 to 1",
    ),
    (
        rules.recompute_says_what,
        ("recompute.layers=[0, 1]",),
        "recompute.layers says where, but recompute.modules does not say what; got 0, 1; "
        "fix: set recompute.modules=layer to compute whole layers again",
    ),
]

FINE = {
    "experts over all they are": ("parallel.expert=8", "parallel.expert_tensor=4"),
    "tensor with a vocabulary that divides": ("model.vocab_size=260", "parallel.tensor=4"),
    "grouped heads": (*GROUPED, "model.vocab_size=260", "parallel.tensor=4"),
    "no shared expert to divide": (
        "model.vocab_size=260",
        "model.moe.shared_expert_intermediate_size=0",
        "parallel.tensor=2",
    ),
    "a dense width that no layer has": (
        "model.vocab_size=260",
        "model.dense_layers=0",
        "model.intermediate_size=385",
        "parallel.tensor=2",
    ),
    "context over more ranks than heads": ("parallel.context=8",),
    "gathering where heads would divide": ("parallel.context=2", "parallel.context_method=all-gather"),
    "exchanging": ("parallel.context=4", "parallel.context_method=ulysses"),
    "a method that nobody uses": ("parallel.context_method=ulysses", "model.attention.heads=3"),
    "an odd length for one rank": ("training.sequence_length=127",),
    "stages and schedules without a pipeline": ("pipeline.schedule=zb-v", "pipeline.stages_per_rank=7"),
    "several stages with gpipe": (*TWO_STAGES, "pipeline.schedule=gpipe"),
    "embedding and head alone": ("parallel.pipeline=6",),
    "a layout": (*TWO_STAGES, "pipeline.schedule=interleaved", "pipeline.layout=E|(t*2|)*2L"),
    "a layout with prediction": (*PIPELINE, "model.mtp_layers=1", "pipeline.layout=Et*3|t,mL"),
    "tied embeddings over stages": (*PIPELINE, "model.tie_word_embeddings=true"),
    "full shards in a plain pipeline": (*PIPELINE, "parallel.shard=full"),
    "full shards with a schedule that is not read": ("pipeline.schedule=zb-v", "parallel.shard=full"),
    "hybrid sharding": ("parallel.shard_size=4",),
    "everything recomputed": (f"recompute.modules={RECOMPUTED.split(', ')}".replace("'", '"'),),
    "recompute in the prediction layer": ("model.mtp_layers=1", "recompute.modules=moe", "recompute.layers=[0, 4]"),
    "everything offloaded": ('offload.activations=["attention", "dense", "moe", "layer"]',),
    "padded experts over ranks": (
        "model.moe.balance.capacity_factor=1.5",
        "model.moe.balance.pad_to_capacity=true",
        "model.vocab_size=260",
        "parallel.expert=2",
        "parallel.tensor=2",
        "parallel.context=2",
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedules_that_are_said_to_split_backward_do(name: str) -> None:
    sizes = [(ranks, micro_batches) for ranks in (2, 3, 4) for micro_batches in (8, 12)]
    made = [
        schedule(name, ranks=ranks, stages_per_rank=SCHEDULES[name].fewest, micro_batches=micro_batches)
        for ranks, micro_batches in sizes
    ]
    assert {one.splits_backward for one in made} == {name in SPLITTING_SCHEDULES}
