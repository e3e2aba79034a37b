"""Every rule of the model, by the line that the user reads."""

from penstock.config import model_rules as rules
from penstock.config.rules import Rule
from tests.config.small import unchecked_run

GQA = ("model.attention.kind=gqa", "model.attention.kv_heads=2", "model.attention.head_dim=32")
YARN = ("model.attention.rope.yarn.factor=2", "model.attention.rope.yarn.original_max_position_embeddings=64")
ROUTER = "model.moe.router."
GROUPED = (f"{ROUTER}n_group=4", f"{ROUTER}topk_group=2", f"{ROUTER}group_score=top2")
SOFTMAX = (f"{ROUTER}scoring_func=softmax", f"{ROUTER}expert_bias=false", f"{ROUTER}norm_topk_prob=false")

BROKEN: list[tuple[Rule, tuple[str, ...], str]] = [
    (
        rules.dense_model_has_only_dense_layers,
        ("model.moe=none",),
        "model.dense_layers must equal model.layers (4) in a model without model.moe; got 1; "
        "fix: set model.dense_layers to 4, or give model.moe",
    ),
    (
        rules.experts_have_a_layer,
        ("model.dense_layers=4",),
        "model.dense_layers leaves no layer for the experts of model.moe; got 4 of 4 layers; allowed: 0 to 3; "
        'fix: lower it, or set model.moe to "none" for a dense model',
    ),
    (
        rules.every_nth_layer_exists,
        ("model.layers=3", "model.moe.moe_layer_freq=3"),
        "model.moe.moe_layer_freq leaves no layer for the experts of model.moe; got every 3 of 2 layers; "
        "allowed: 1 to 2",
    ),
    (
        rules.dense_layers_have_a_width,
        ("model.intermediate_size=0",),
        "model.intermediate_size is the width of 1 dense layers (model.dense_layers, model.moe.moe_layer_freq); got 0; "
        "allowed: >= 1; fix: set it; 4 times model.hidden_size is a common choice",
    ),
    (
        rules.kv_heads_divide_heads,
        (*GQA, "model.attention.kv_heads=3"),
        "model.attention.kv_heads must divide model.attention.heads (4); got 3; allowed: 1, 2, 4",
    ),
    (
        rules.rotary_width_is_even,
        (*GQA, "model.attention.head_dim=33"),
        "model.attention.head_dim must be even, since rotary embedding turns pairs; got 33; fix: use 32 or 34",
    ),
    (
        rules.rotary_width_is_even,
        ("model.attention.qk_rope_head_dim=15",),
        "model.attention.qk_rope_head_dim must be even, since rotary embedding turns pairs; got 15; fix: use 14 or 16",
    ),
    (
        rules.yarn_bounds_are_ordered,
        (*YARN, "model.attention.rope.yarn.beta_slow=40"),
        "model.attention.rope.yarn.beta_slow must be above 0 and below beta_fast; got beta_slow 40, beta_fast 32; "
        "fix: the usual values are 1 and 32",
    ),
    (
        rules.yarn_bounds_are_ordered,
        (*YARN, "model.attention.rope.yarn.beta_slow=0"),
        "model.attention.rope.yarn.beta_slow must be above 0 and below beta_fast; got beta_slow 0, beta_fast 32; "
        "fix: the usual values are 1 and 32",
    ),
    (
        rules.context_is_extended_one_way,
        (*YARN, "model.attention.rope.llama3.factor=8"),
        'model.attention.rope.llama3 is given beside model.attention.rope.yarn; fix: set one of the two to "none"',
    ),
    (
        rules.llama3_bounds_are_ordered,
        ("model.attention.rope.llama3.low_freq_factor=5",),
        "model.attention.rope.llama3.low_freq_factor must be above 0 and at most high_freq_factor; "
        "got low_freq_factor 5, high_freq_factor 4; "
        "fix: the usual values are 1 and 4",
    ),
    (
        rules.global_layers_exist_that_differ,
        (*GQA, "model.attention.local={size=64, global_rope=false}"),
        "model.attention.local.global_rope is for global layers, and "
        "model.attention.local.global_every 0 has none; got false; fix: leave it out, or set "
        "model.attention.local.global_every to 4",
    ),
    (
        rules.global_layers_exist_that_differ,
        (*GQA, "model.attention.local={size=64, global_temperature=0.1}"),
        "model.attention.local.global_temperature is for global layers, and "
        "model.attention.local.global_every 0 has none; got 0.1; fix: leave it out, or set "
        "model.attention.local.global_every to 4",
    ),
    (
        rules.sequence_is_within_yarn,
        (*YARN, "training.sequence_length=129"),
        "training.sequence_length is beyond what YaRN stretches to (64 x 2); got 129; allowed: at most 128; "
        "fix: shorten it, or raise model.attention.rope.yarn.factor",
    ),
    (
        rules.top_k_is_within_experts,
        ("model.moe.top_k=9",),
        "model.moe.top_k is more than model.moe.experts; got 9; allowed: 1 to 8",
    ),
    (
        rules.groups_divide_experts,
        (f"{ROUTER}n_group=3",),
        "model.moe.router.n_group must divide model.moe.experts (8); got 3; allowed: 1, 2, 4, 8",
    ),
    (
        rules.kept_groups_exist,
        (*GROUPED, f"{ROUTER}topk_group=5"),
        "model.moe.router.topk_group is more than model.moe.router.n_group; got 5; allowed: 1 to 4",
    ),
    (
        rules.kept_groups_hold_top_k,
        (*GROUPED, f"{ROUTER}topk_group=1", "model.moe.top_k=3"),
        "model.moe.top_k is more than the 2 experts in the groups that a token may choose from; got 3; "
        "allowed: 1 to 2; fix: raise model.moe.router.topk_group (1 of 4)",
    ),
    (
        rules.groups_judged_by_two_have_two,
        (*GROUPED, f"{ROUTER}n_group=8"),
        "model.moe.router.group_score top2 needs groups of at least 2 experts; got 8 experts in 8 groups; "
        "fix: use group_score max, or fewer groups",
    ),
    (
        rules.softmax_after_top_k_is_a_softmax,
        (f"{ROUTER}softmax_after_top_k=true",),
        "model.moe.router.softmax_after_top_k needs model.moe.router.scoring_func softmax; got score sigmoid; "
        "fix: set one of the two",
    ),
    (
        rules.router_has_a_gradient,
        (*SOFTMAX, "model.moe.top_k=1", f"{ROUTER}softmax_after_top_k=true"),
        "model.moe.router.softmax_after_top_k makes the only weight of model.moe.top_k = 1 always 1: "
        "the router would not learn; "
        "fix: set model.moe.router.softmax_after_top_k to false, or model.moe.top_k to 2 or more",
    ),
    (
        rules.router_has_a_gradient,
        ("model.moe.top_k=1",),
        "model.moe.router.norm_topk_prob makes the only weight of model.moe.top_k = 1 always 1: "
        "the router would not learn; "
        "fix: set model.moe.router.norm_topk_prob to false, or model.moe.top_k to 2 or more",
    ),
    (
        rules.expert_bias_goes_with_sigmoid,
        (f"{ROUTER}scoring_func=softmax",),
        "model.moe.router.expert_bias needs model.moe.router.scoring_func sigmoid; got score softmax; "
        "fix: use sigmoid, or balance by model.moe.balance.aux_loss",
    ),
    (
        rules.biases_stand_behind_unweighted_inputs,
        ("model.moe.bias=true", f"{ROUTER}apply_probs_on_input=true"),
        "model.moe.bias does not go with model.moe.router.apply_probs_on_input; fix: set one of the two to false",
    ),
    (
        rules.padding_needs_a_capacity,
        ("model.moe.balance.pad_to_capacity=true",),
        "model.moe.balance.pad_to_capacity needs model.moe.balance.capacity_factor above 0; got 0 (dropless); "
        "fix: set a capacity_factor such as 1.25, or leave the padding out",
    ),
    (
        rules.auxiliary_weight_has_a_loss,
        ("model.moe.balance.aux_loss=none",),
        "model.moe.balance.aux_loss_coef is given, but model.moe.balance.aux_loss is none; got 0.0001; "
        "allowed: 0, or aux_loss micro-batch, sequence, global-batch",
    ),
]

FINE = {
    "experts of gpt-oss": ("model.moe.bias=true", "model.moe.clamped.limit=7", f"{ROUTER}logit_bias=true"),
    "experts of Llama 4": (f"{ROUTER}apply_probs_on_input=true", "model.moe.moe_layer_freq=3"),
    "a dense model": ("model.moe=none", "model.dense_layers=4"),
    "no dense layer": ("model.dense_layers=0", "model.intermediate_size=0"),
    "grouped-query attention": GQA,
    "windows in all layers": (*GQA, "model.attention.local.size=64"),
    "attention of Llama 4": (
        *GQA,
        "model.attention.qk_norm=rotated-head",
        "model.attention.local={kind='chunk', size=64, global_every=4, global_rope=false, global_temperature=0.1}",
    ),
    "attention of gpt-oss": (
        *GQA,
        "model.attention.bias=true",
        "model.attention.sinks=true",
        "model.attention.local={size=64, global_every=2}",
    ),
    "multi-query attention": (*GQA, "model.attention.kv_heads=1"),
    "a row as long as YaRN allows": (*YARN, "training.sequence_length=128"),
    "all experts chosen": ("model.moe.top_k=8",),
    "groups that just hold top-k": (*GROUPED, "model.moe.top_k=4"),
    "softmax after top-k": (*SOFTMAX, f"{ROUTER}softmax_after_top_k=true"),
    "softmax before top-1": (*SOFTMAX, "model.moe.top_k=1"),
    "sigmoid top-1, raw weights": ("model.moe.top_k=1", f"{ROUTER}norm_topk_prob=false"),
    "capacity and no auxiliary loss": (
        "model.moe.balance.capacity_factor=1.0",
        "model.moe.balance.pad_to_capacity=true",
        "model.moe.balance.aux_loss=none",
        "model.moe.balance.aux_loss_coef=0.0",
    ),
    "an auxiliary loss that is switched off": ("model.moe.balance.aux_loss_coef=0.0",),
    "tied embeddings": ("model.tie_word_embeddings=true",),
}


def test_many_divisors_are_cut_short() -> None:
    problem = rules.groups_divide_experts(unchecked_run(["model.moe.experts=360", f"{ROUTER}n_group=7"]))
    assert problem is not None
    assert problem.allowed == "1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, ..."


def test_one_mistake_is_told_once_where_two_rules_look_at_it() -> None:
    run = unchecked_run([*GROUPED, "model.moe.top_k=9"])
    assert [rule for rule in rules.MODEL_RULES if rule(run)] == [rules.top_k_is_within_experts]
