"""Rules between fields of the model. Each docstring is the rule as users read it; `rules` says how they are used."""

from penstock.config.model import (
    LAYER_KINDS,
    CompressedAttention,
    GroupedQueryAttention,
    LatentAttention,
    warms_indexer_up,
)
from penstock.config.run import Run
from penstock.config.schema import Problem, at_most, must_divide

USUAL_GLOBAL_EVERY = 4  # of Llama 4


def dense_model_has_only_dense_layers(run: Run) -> Problem | None:
    """A model without `model.moe` is dense: `model.dense_layers` equals `model.layers`."""
    model = run.model
    if model.moe is not None or model.dense_layers == model.layers:
        return None
    return Problem.from_line(
        f"model.dense_layers must equal model.layers ({model.layers}) in a model without model.moe; "
        f"got {model.dense_layers}; fix: set model.dense_layers to {model.layers}, or give model.moe"
    )


def experts_have_a_layer(run: Run) -> Problem | None:
    """With `model.moe`, `model.dense_layers` is less than `model.layers`.

    `model.moe.moe_layer_freq` is at most the number of layers behind `model.dense_layers`.
    """
    model = run.model
    if model.moe is None or model.moe_layers > 0:
        return None
    behind = model.layers - model.dense_layers  # layers that may have experts
    if behind > 0:
        return Problem.from_line(
            "model.moe.moe_layer_freq leaves no layer for the experts of model.moe; "
            f"got every {model.moe.moe_layer_freq} of {behind} layers; allowed: 1 to {behind}"
        )
    return Problem.from_line(
        f"model.dense_layers leaves no layer for the experts of model.moe; got {model.dense_layers} of {model.layers} "
        f'layers; allowed: 0 to {model.layers - 1}; fix: lower it, or set model.moe to "none" for a dense model'
    )


def dense_layers_have_a_width(run: Run) -> Problem | None:
    """Dense layers (`model.dense_layers` > 0 or `model.moe.moe_layer_freq` > 1) need `model.intermediate_size`."""
    model = run.model
    dense = model.layers - model.moe_layers  # first ones, and those between layers with experts
    if dense == 0 or model.intermediate_size > 0:
        return None
    return Problem.from_line(
        f"model.intermediate_size is the width of {dense} dense layers (model.dense_layers, model.moe.moe_layer_freq); "
        "got 0; allowed: >= 1; fix: set it; 4 times model.hidden_size is a common choice"
    )


def streams_are_added_to_plainly(run: Run) -> Problem | None:
    """`model.hyper_connections` needs `model.norm_position` pre, `model.residual_scale` 1 and `model.mtp_layers` 0."""
    model, name = run.model, "model.hyper_connections"
    if model.hyper_connections is None:
        return None
    others = {"norm_position": (model.norm_position, "pre"), "residual_scale": (model.residual_scale, 1.0)}
    for field, (value, only) in {**others, "mtp_layers": (model.mtp_layers, 0)}.items():
        if value != only:
            fix = f'set {name}="none"'
            return Problem(f"model.{field}", f"does not go with {name}", f"{value}", f"{only}", fix)
    return None


def kv_heads_divide_heads(run: Run) -> Problem | None:
    """`model.attention.kv_heads` divides `model.attention.heads`."""
    attention = run.model.attention
    if not isinstance(attention, GroupedQueryAttention):
        return None
    return must_divide("model.attention.kv_heads", attention.kv_heads, "model.attention.heads", attention.heads)


def key_heads_divide_value_heads(run: Run) -> Problem | None:
    """`model.linear_attention.key_heads` divides `model.linear_attention.value_heads`.

    With `model.linear_attention.kind` kda they are equal.
    """
    linear, name = run.model.linear_attention, "model.linear_attention"
    if linear is None:
        return None
    if linear.kind == "kda" and linear.key_heads != linear.value_heads:
        return Problem.from_line(
            f"{name}.kind kda needs as many value heads as key heads ({linear.key_heads}); got {linear.value_heads}; "
            f"fix: set {name}.value_heads={linear.key_heads}"
        )
    return must_divide(f"{name}.key_heads", linear.key_heads, f"{name}.value_heads", linear.value_heads)


def shared_expert_has_what_is_gated(run: Run) -> Problem | None:
    """`model.moe.shared_expert_gate` needs `model.moe.shared_expert_intermediate_size` above 0."""
    moe = run.model.moe
    if moe is None or not moe.shared_expert_gate or moe.shared_expert_intermediate_size > 0:
        return None
    return Problem.from_line(
        "model.moe.shared_expert_gate is for a shared expert, and model.moe.shared_expert_intermediate_size is 0; "
        "fix: set one of the two"
    )


def rotary_width_is_even(run: Run) -> Problem | None:
    """Rotary embedding turns pairs: the rotated part of a head is even and not 0.

    It is `model.attention.qk_rope_head_dim`, or `model.attention.head_dim` x `model.attention.partial_rotary_factor`.
    """
    attention, width = run.model.attention, run.model.attention.rotary_dim
    if width % 2 == 0 and width > 0:
        return None
    if isinstance(attention, GroupedQueryAttention) and attention.partial_rotary_factor < 1:
        return Problem.from_line(
            "model.attention.partial_rotary_factor must leave an even number of rotated features; "
            f"got {width} of {attention.head_dim}; fix: 0.5 and 0.25 are common"
        )
    name = "head_dim" if isinstance(attention, GroupedQueryAttention) else "qk_rope_head_dim"
    return Problem.from_line(
        f"model.attention.{name} must be even, since rotary embedding turns pairs; got {width}; "
        f"fix: use {width - 1} or {width + 1}"
    )


def indexer_fits_its_attention(run: Run) -> Problem | None:
    """`model.attention.indexer` needs `model.attention.q_lora_rank` above 0, and heads as wide as the rotary part.

    That part is `model.attention.qk_rope_head_dim`, the heads' width `model.attention.indexer.index_head_dim`. It does
    not go with `model.attention.sinks`: its loss compares weights of keys only.
    """
    attention, name = run.model.attention, "model.attention.indexer"
    if isinstance(attention, GroupedQueryAttention) or attention.indexer is None:
        return None
    if attention.q_lora_rank == 0:
        return Problem.from_line(
            f"{name} reads the latent of queries, and model.attention.q_lora_rank is 0; fix: set q_lora_rank"
        )
    if attention.indexer.index_head_dim < attention.qk_rope_head_dim:
        return Problem.from_line(
            f"{name}.index_head_dim must be at least model.attention.qk_rope_head_dim ({attention.qk_rope_head_dim}); "
            f"got {attention.indexer.index_head_dim}"
        )
    if isinstance(attention, CompressedAttention) or not attention.sinks:
        return None
    return Problem.from_line(
        f"model.attention.sinks does not go with {name}, whose loss compares weights of keys only; "
        'fix: set sinks to false, or indexer to "none"'
    )


def compressed_attention_is_whole(run: Run) -> Problem | None:
    """Compressed attention has layers of known kinds (`model.attention.first_layers`, `model.attention.other_layers`).

    `model.attention.o_groups` divides `model.attention.heads`, `model.attention.qk_rope_head_dim` is at most
    `model.attention.head_dim`, `model.attention.indexer.stage` is sparse, and `model.linear_attention` and
    `model.mtp_layers` are left out.
    """
    model, name = run.model, "model.attention"
    attention = model.attention
    if not isinstance(attention, CompressedAttention):
        return None
    for field, kinds in (("first_layers", attention.first_layers), ("other_layers", attention.other_layers)):
        if unknown := [kind for kind in kinds if kind not in LAYER_KINDS]:
            return Problem(f"{name}.{field}", "has no such kind", unknown[0], ", ".join(LAYER_KINDS))
    if not attention.other_layers:
        return Problem(f"{name}.other_layers", "is empty", allowed="one kind or more")
    if attention.indexer.stage == "dense":
        return Problem(f"{name}.indexer.stage", "is of latent attention", "dense", "sparse")
    others = {"linear_attention": model.linear_attention is not None, "mtp_layers": model.mtp_layers > 0}
    if beside := [field for field, there in others.items() if there]:
        return Problem(f"model.{beside[0]}", f"does not go with {name}.kind compressed", fix="leave it out")
    rotated = at_most(f"{name}.qk_rope_head_dim", attention.qk_rope_head_dim, f"{name}.head_dim", attention.head_dim)
    return rotated or must_divide(f"{name}.o_groups", attention.o_groups, f"{name}.heads", attention.heads)


def nothing_learns_beside_the_warm_up(run: Run) -> Problem | None:
    """With `model.attention.indexer.stage` dense, `model.attention.indexer.loss_coef` is above 0.

    And `model.moe.router.expert_bias_rate` is 0: only the indexer learns.
    """
    attention, moe = run.model.attention, run.model.moe
    if not warms_indexer_up(run.model) or not isinstance(attention, LatentAttention) or attention.indexer is None:
        return None
    if attention.indexer.loss_coef == 0:
        return Problem.from_line(
            "model.attention.indexer.stage dense trains by model.attention.indexer.loss_coef, which is 0; "
            "fix: set it to 1"
        )
    if moe is None or not moe.router.expert_bias or moe.router.expert_bias_rate == 0:
        return None
    return Problem.from_line(
        "model.moe.router.expert_bias_rate must be 0 while only the indexer learns (model.attention.indexer.stage "
        f"dense); got {moe.router.expert_bias_rate:g}; fix: set it to 0"
    )


def rope_bounds_are_ordered(run: Run) -> Problem | None:
    """Bounds of the ramp over frequencies are above 0 and ordered.

    `model.attention.rope.yarn.beta_slow` is at most `model.attention.rope.yarn.beta_fast`, and
    `model.attention.rope.llama3.low_freq_factor` at most `model.attention.rope.llama3.high_freq_factor`.
    """
    rope, bounds = run.model.attention.rope, list[tuple[str, str, float, str, float, int]]()
    if rope.yarn is not None:
        bounds.append(("yarn", "beta_slow", rope.yarn.beta_slow, "beta_fast", rope.yarn.beta_fast, 32))
    if (scaling := rope.llama3) is not None:
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        bounds.append(("llama3", "low_freq_factor", low, "high_freq_factor", high, 4))
    for section, low_name, low, high_name, high, usual in bounds:
        if not 0 < low <= high:
            return Problem.from_line(
                f"model.attention.rope.{section}.{low_name} must be above 0 and at most {high_name}; "
                f"got {low_name} {low:g}, {high_name} {high:g}; fix: the usual values are 1 and {usual}"
            )
    return None


def context_is_extended_one_way(run: Run) -> Problem | None:
    """At most one of `model.attention.rope.yarn` and `model.attention.rope.llama3` is given."""
    rope = run.model.attention.rope
    if rope.yarn is None or rope.llama3 is None:
        return None
    return Problem(
        "model.attention.rope.llama3", "is given beside model.attention.rope.yarn", fix='set one of the two to "none"'
    )


def global_layers_exist_that_differ(run: Run) -> Problem | None:
    """Options of global layers need `model.attention.local.global_every` above 0, or a list of such layers.

    The list is `model.attention.local.global_layers`. The options are
    `model.attention.local.global_rope` false, or `model.attention.local.global_temperature` above 0.
    """
    attention = run.model.attention
    local = attention.local if isinstance(attention, GroupedQueryAttention) else None
    if local is None or local.global_every > 0 or local.global_layers:
        return None
    if local.global_rope and local.global_temperature == 0:
        return None
    name = "global_temperature" if local.global_rope else "global_rope"  # the option that was set
    return Problem.from_line(
        f"model.attention.local.{name} is for global layers, and model.attention.local.global_every 0 has none; got "
        f"{f'{local.global_temperature:g}' if local.global_rope else 'false'}; "
        f"fix: leave it out, or set model.attention.local.global_every to {USUAL_GLOBAL_EVERY}"
    )


def sequence_is_within_yarn(run: Run) -> Problem | None:
    """`training.sequence_length` is at most YaRN's context.

    That is `model.attention.rope.yarn.original_max_position_embeddings` x `model.attention.rope.yarn.factor`.
    """
    yarn = run.model.attention.rope.yarn
    if yarn is None or run.training.sequence_length <= yarn.original_max_position_embeddings * yarn.factor:
        return None
    return Problem.from_line(
        f"training.sequence_length is beyond what YaRN stretches to ({yarn.original_max_position_embeddings} x "
        f"{yarn.factor:g}); got {run.training.sequence_length}; allowed: at most "
        f"{int(yarn.original_max_position_embeddings * yarn.factor)}; fix: shorten it, or raise "
        "model.attention.rope.yarn.factor"
    )


def top_k_is_within_experts(run: Run) -> Problem | None:
    """`model.moe.top_k` is at most `model.moe.experts`."""
    moe = run.model.moe
    return None if moe is None else at_most("model.moe.top_k", moe.top_k, "model.moe.experts", moe.experts)


def groups_divide_experts(run: Run) -> Problem | None:
    """`model.moe.router.n_group` divides `model.moe.experts`.

    `model.moe.router.topk_group` is at most `model.moe.router.n_group`.
    """
    moe, section = run.model.moe, "model.moe.router"
    if moe is None:
        return None
    groups, kept = moe.router.n_group, moe.router.topk_group
    unequal = must_divide(f"{section}.n_group", groups, "model.moe.experts", moe.experts)
    return unequal or at_most(f"{section}.topk_group", kept, f"{section}.n_group", groups)


def kept_groups_hold_top_k(run: Run) -> Problem | None:
    """The groups that are kept (`model.moe.router.topk_group`) hold at least `model.moe.top_k` experts."""
    moe = run.model.moe
    if moe is None or moe.experts % moe.router.n_group:  # `groups_divide_experts` reports that
        return None
    reachable = moe.router.topk_group * (moe.experts // moe.router.n_group)  # experts in the kept groups
    if moe.top_k <= reachable or moe.top_k > moe.experts:  # `top_k_is_within_experts` reports the latter
        return None
    return Problem.from_line(
        f"model.moe.top_k is more than the {reachable} experts in the groups that a token may choose from; "
        f"got {moe.top_k}; allowed: 1 to {reachable}; "
        f"fix: raise model.moe.router.topk_group ({moe.router.topk_group} of {moe.router.n_group})"
    )


def groups_judged_by_two_have_two(run: Run) -> Problem | None:
    """With `model.moe.router.group_score` top2, a group has at least 2 experts."""
    moe = run.model.moe
    if moe is None or moe.router.group_score != "top2" or moe.experts >= 2 * moe.router.n_group:
        return None
    return Problem.from_line(
        "model.moe.router.group_score top2 needs groups of at least 2 experts; "
        f"got {moe.experts} experts in {moe.router.n_group} groups; fix: use group_score max, or fewer groups"
    )


def softmax_after_top_k_is_a_softmax(run: Run) -> Problem | None:
    """`model.moe.router.softmax_after_top_k` needs `model.moe.router.scoring_func` softmax."""
    moe = run.model.moe
    if moe is None or not moe.router.softmax_after_top_k or moe.router.scoring_func == "softmax":
        return None
    return Problem.from_line(
        "model.moe.router.softmax_after_top_k needs model.moe.router.scoring_func softmax; "
        f"got score {moe.router.scoring_func}; fix: set one of the two"
    )


def router_has_a_gradient(run: Run) -> Problem | None:
    """`model.moe.router.softmax_after_top_k` and `model.moe.router.norm_topk_prob` need `model.moe.top_k` above 1."""
    moe = run.model.moe
    if moe is None or moe.top_k > 1 or not (moe.router.softmax_after_top_k or moe.router.norm_topk_prob):
        return None
    # Either divides by the sum of one weight.
    cause = "softmax_after_top_k" if moe.router.softmax_after_top_k else "norm_topk_prob"
    return Problem.from_line(
        f"model.moe.router.{cause} makes the only weight of model.moe.top_k = 1 always 1: the router would not learn; "
        f"fix: set model.moe.router.{cause} to false, or model.moe.top_k to 2 or more"
    )


def biases_stand_behind_unweighted_inputs(run: Run) -> Problem | None:
    """`model.moe.bias` does not go with `model.moe.router.apply_probs_on_input`: the weights would miss the biases."""
    moe = run.model.moe
    if moe is None or not moe.bias or not moe.router.apply_probs_on_input:
        return None
    return Problem.from_line(
        "model.moe.bias does not go with model.moe.router.apply_probs_on_input; fix: set one of the two to false"
    )


def quantiles_move_a_bias(run: Run) -> Problem | None:
    """`model.moe.balance.bias_rule` quantile needs `model.moe.router.expert_bias`.

    It needs `model.moe.top_k` below `model.moe.experts`, and no groups of them (`model.moe.router.n_group`), because it
    compares an expert with the best one that a token did not take.
    """
    moe, field = run.model.moe, "model.moe.balance.bias_rule"
    if moe is None or moe.balance.bias_rule != "quantile":
        return None
    if not moe.router.expert_bias:
        fix = "set model.moe.router.expert_bias=true"
        return Problem(field, "moves a bias that the router lacks", got="quantile", fix=fix)
    what, fix = "compares each expert with the best one that a token did not take, of all experts", f"set {field}=sign"
    if moe.top_k >= moe.experts:
        return Problem(field, what, got="quantile, every expert taken", allowed="sign", fix=fix)
    if moe.router.n_group == 1:
        return None
    got = f"quantile, model.moe.router.n_group {moe.router.n_group}"
    return Problem(field, what, got=got, allowed="sign", fix=f"{fix}, or model.moe.router.n_group=1")


def hashed_layers_have_experts(run: Run) -> Problem | None:
    """`model.moe.router.num_hash_layers` is at most the number of layers with experts."""
    moe, layers = run.model.moe, run.model.moe_layers
    if moe is None or moe.router.num_hash_layers <= layers:
        return None
    return Problem(
        "model.moe.router.num_hash_layers",
        "is more than there are layers with experts",
        got=str(moe.router.num_hash_layers),
        allowed=f"0 to {layers}",
    )


def limits_are_of_a_gate(run: Run) -> Problem | None:
    """`model.moe.clamped` needs `model.hidden_act` silu."""
    moe = run.model.moe
    if moe is None or moe.clamped is None or run.model.hidden_act == "silu":
        return None
    return Problem.from_line(
        f"model.moe.clamped is of SwiGLU, and model.hidden_act is {run.model.hidden_act}; "
        'fix: set model.hidden_act=silu, or model.moe.clamped="none"'
    )


def shared_limits_are_those_of_experts(run: Run) -> Problem | None:
    """`model.moe.clamp_shared` needs `model.moe.clamped`, and `model.moe.shared_expert_intermediate_size` above 0."""
    moe = run.model.moe
    if moe is None or not moe.clamp_shared or (moe.clamped is not None and moe.shared_expert_intermediate_size > 0):
        return None
    missing = "limits of model.moe.clamped" if moe.clamped is None else "a shared expert"
    return Problem.from_line(f"model.moe.clamp_shared needs {missing}; fix: set it to false, or give both")


def padding_needs_a_capacity(run: Run) -> Problem | None:
    """`model.moe.balance.pad_to_capacity` needs `model.moe.balance.capacity_factor`."""
    moe = run.model.moe
    if moe is None or not moe.balance.pad_to_capacity or moe.balance.capacity_factor > 0:
        return None
    return Problem.from_line(
        "model.moe.balance.pad_to_capacity needs model.moe.balance.capacity_factor above 0; got 0 (dropless); "
        "fix: set a capacity_factor such as 1.25, or leave the padding out"
    )


def auxiliary_weight_has_a_loss(run: Run) -> Problem | None:
    """`model.moe.balance.aux_loss_coef` above 0 needs `model.moe.balance.aux_loss` to say over which tokens."""
    moe = run.model.moe
    if moe is None or moe.balance.aux_loss_coef == 0 or moe.balance.aux_loss != "none":
        return None
    return Problem.from_line(
        "model.moe.balance.aux_loss_coef is given, but model.moe.balance.aux_loss is none; "
        f"got {moe.balance.aux_loss_coef:g}; allowed: 0, or aux_loss micro-batch, sequence, global-batch"
    )
