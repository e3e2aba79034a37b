"""Rules between fields of the layout. Each docstring is the rule as users read it.

Rules that depend on the number of ranks are in `penstock.config.fit`.
"""

from collections.abc import Sequence

from penstock.base.errors import ConfigError, did_you_mean
from penstock.config.fit import SPLITTING_SCHEDULES, LayoutSizes, ModelSizes, rule_of_sizes, stage_count
from penstock.config.parallel import OFFLOADABLE, RECOMPUTABLE
from penstock.config.run import Run
from penstock.config.schema import Problem, multiples_near, must_divide
from penstock.layout.grid import multiple_of
from penstock.layout.schedules import SCHEDULES
from penstock.layout.stages import parse_stages

_HEAD_FIELDS = ("heads", "kv_heads")  # fields of `ModelSizes.head_counts`


@rule_of_sizes
def experts_have_ranks_only_if_there_are_any(sizes: LayoutSizes) -> Problem | None:
    """`parallel.expert` and `parallel.expert_tensor` above 1 need `model.moe`."""
    for name, size in (("expert", sizes.ep), ("expert_tensor", sizes.etp)):
        if size > 1 and not sizes.model.experts:
            return Problem.from_line(
                f"parallel.{name} shares experts, but the model has none (model.moe); got {size}; allowed: 1; "
                f"fix: set parallel.{name}=1"
            )
    return None


@rule_of_sizes
def expert_ranks_divide_experts(sizes: LayoutSizes) -> Problem | None:
    """`parallel.expert` divides `model.moe.experts`."""
    return must_divide("parallel.expert", sizes.ep, "model.moe.experts", sizes.model.experts)


@rule_of_sizes
def expert_tensor_ranks_divide_an_expert(sizes: LayoutSizes) -> Problem | None:
    """`parallel.expert_tensor` divides `model.moe.moe_intermediate_size`."""
    whole = "model.moe.moe_intermediate_size"
    return must_divide("parallel.expert_tensor", sizes.etp, whole, sizes.model.expert_width)


@rule_of_sizes
def tensor_ranks_divide_heads(sizes: LayoutSizes) -> Problem | None:
    """`parallel.tensor` divides `model.attention.heads`, and `model.attention.kv_heads` if there are any."""
    for name, count in zip(_HEAD_FIELDS, sizes.model.head_counts, strict=False):
        if problem := must_divide("parallel.tensor", sizes.tp, f"model.attention.{name}", count):
            return problem
    return None


@rule_of_sizes
def indexer_has_rows_and_heads_of_its_own(sizes: LayoutSizes) -> Problem | None:
    """`model.attention.indexer` needs `parallel.tensor` and `parallel.context` 1: its loss compares whole attention."""
    for name, ranks in (("tensor", sizes.tp), ("context", sizes.cp)):
        if sizes.model.has_indexer and ranks > 1:
            return Problem.from_line(
                f"parallel.{name} does not go with model.attention.indexer, whose loss reads all heads and positions; "
                f"got {ranks}; allowed: 1; fix: use expert and pipeline parallelism, or shard=full"
            )
    return None


@rule_of_sizes
def ranks_divide_linear_heads(sizes: LayoutSizes) -> Problem | None:
    """`parallel.context` x `parallel.tensor` divide `model.linear_attention.key_heads`: each has states of whole heads.

    That holds for either `parallel.context_method`, because ranks exchange positions for heads.
    """
    ranks = sizes.cp * sizes.tp
    if sizes.model.key_heads % ranks == 0:
        return None
    return Problem.from_line(
        f"parallel.context x parallel.tensor must divide model.linear_attention.key_heads ({sizes.model.key_heads}); "
        f"got {ranks}; fix: use fewer of these ranks"
    )


@rule_of_sizes
def tensor_ranks_divide_widths(sizes: LayoutSizes) -> Problem | None:
    """`parallel.tensor` divides `model.intermediate_size` and `model.moe.shared_expert_intermediate_size`."""
    model = sizes.model
    return must_divide("parallel.tensor", sizes.tp, "model.intermediate_size", model.dense_width) or must_divide(
        "parallel.tensor", sizes.tp, "model.moe.shared_expert_intermediate_size", model.shared_width
    )


@rule_of_sizes
def tensor_ranks_divide_the_vocabulary(sizes: LayoutSizes) -> Problem | None:
    """`parallel.tensor` divides `model.vocab_size`; unused token ids may fill it up."""
    ranks, ids = sizes.tp, sizes.model.vocab_size
    if ids % ranks == 0:
        return None
    return Problem.from_line(
        f"model.vocab_size must be a multiple of parallel.tensor ({ranks}); got {ids}; "
        f"fix: set model.vocab_size={ids + -ids % ranks}; unused token ids do no harm"
    )


@rule_of_sizes
def ranks_divide_the_sequence(sizes: LayoutSizes) -> Problem | None:
    """`parallel.context` x `parallel.tensor` divide `training.sequence_length`.

    With `parallel.context_method` all-gather, twice that many do, because a rank has two chunks of each row.
    """
    length, ranks = sizes.sequence_length, sizes.cp * sizes.tp
    least = multiple_of(sizes.cp, sizes.tp, sizes.settled_context_method)  # all-gather: two chunks of each row a rank
    if length % least == 0:
        return None
    return Problem.from_line(
        f"training.sequence_length must be a multiple of {'2 x ' if least > ranks else ''}parallel.context x "
        f"parallel.tensor ({least}); got {length}; "
        f"fix: set training.sequence_length to {multiples_near(length, least)}"
    )


@rule_of_sizes
def ulysses_divides_heads(sizes: LayoutSizes) -> Problem | None:
    """With `parallel.context_method` ulysses, `parallel.context` x `parallel.tensor` divide the heads.

    These are `model.attention.heads`, and `model.attention.kv_heads` if there are any.
    """
    ranks = sizes.cp * sizes.tp
    if sizes.context_method != "ulysses" or sizes.cp == 1:  # auto takes another method where heads do not divide
        return None
    for name, heads in zip(_HEAD_FIELDS, sizes.model.head_counts, strict=False):
        if heads % ranks:
            return Problem.from_line(
                f"parallel.context_method ulysses needs model.attention.{name} divided by parallel.context x "
                f"parallel.tensor ({ranks}); got {heads}; fix: set parallel.context_method=all-gather"
            )
    return None


@rule_of_sizes
def schedule_has_its_stages(sizes: LayoutSizes) -> Problem | None:
    """`pipeline.stages_per_rank` is what `pipeline.schedule` needs.

    1 for 1f1b and zb-1f1b, 2 for zb-v, v-half, v-min and dualpipe-v, at least 2 for interleaved, any number for gpipe.
    It is read only if `parallel.pipeline` is above 1.
    """
    if sizes.pp == 1 or sizes.schedule not in SCHEDULES:
        return None
    shape, stages = SCHEDULES[sizes.schedule], sizes.vpp  # `shape.most` is None without a limit
    if shape.fewest <= stages and (shape.most is None or stages <= shape.most):
        return None
    other = "interleaved" if stages > 1 else "1f1b"
    return Problem.from_line(
        f"pipeline.stages_per_rank does not go with pipeline.schedule {sizes.schedule}; got {stages}; "
        f"allowed: {'' if shape.most else '>= '}{shape.fewest}; "
        f"fix: set pipeline.stages_per_rank={shape.fewest}, or pipeline.schedule={other}"
    )


@rule_of_sizes
def pipeline_has_enough_layers(sizes: LayoutSizes) -> Problem | None:
    """`parallel.pipeline` x `pipeline.stages_per_rank` is at most `model.layers` + 2.

    No stage is empty; the embedding and the head may have stages of their own.
    """
    layers = sizes.model.layers
    if sizes.pp == 1 or sizes.stages <= layers + 2:  # with stages for the embedding and for the head
        return None
    return Problem.from_line(
        f"parallel.pipeline makes more stages than model.layers ({layers}), the embedding and the head can fill; "
        f"got {sizes.pp} ranks x {sizes.vpp} stages = {sizes.stages}; allowed: up to {layers + 2}; "
        "fix: lower parallel.pipeline or pipeline.stages_per_rank"
    )


def layout_can_be_read(run: Run) -> Problem | None:
    """`pipeline.layout` needs `parallel.pipeline` above 1, and follows the grammar of docs/layouts.md.

    It holds all of `model.layers` and `model.mtp_layers` and makes `parallel.pipeline` x `pipeline.stages_per_rank`
    stages.
    """
    if not (text := run.pipeline.layout):
        return None
    if run.parallel.pipeline == 1:
        return Problem.from_line(
            f"pipeline.layout divides a pipeline, but parallel.pipeline is 1; got '{text[:60]}'; "
            "fix: set parallel.pipeline, or leave pipeline.layout out"
        )
    try:
        parse_stages(text, layers=run.model.layers, mtp_layers=run.model.mtp_layers, stages=stage_count(run))
    except ConfigError as error:
        what = error.what.removeprefix("pipeline.layout ")  # the field is printed before it
        return Problem("pipeline.layout", what, got=f"{error.got}", allowed=f"{error.allowed}", fix=error.fix)
    return None


@rule_of_sizes
def gathered_weights_meet_whole_backwards(sizes: LayoutSizes) -> Problem | None:
    """`parallel.shard` full does not go with a `pipeline.schedule` that splits backward.

    These are zb-1f1b, zb-v, v-half, v-min and dualpipe-v: weights that were gathered for one half are freed before the
    other half runs.
    """
    if sizes.pp == 1 or sizes.shard != "full" or sizes.schedule not in SPLITTING_SCHEDULES:
        return None
    return Problem.from_line(
        f"parallel.shard full does not go with pipeline.schedule {sizes.schedule}, which splits backward; got full; "
        "allowed: auto, none, optimizer; fix: set parallel.shard=optimizer"
    )


def shards_have_something_to_divide(run: Run) -> Problem | None:
    """`parallel.shard_size` has no meaning with `parallel.shard` none."""
    if run.parallel.shard_size == 0 or run.parallel.shard != "none":
        return None
    return Problem.from_line(
        "parallel.shard_size says how many ranks divide a copy, but parallel.shard none divides nothing; "
        f"got {run.parallel.shard_size}; fix: set parallel.shard_size=0, or parallel.shard=optimizer"
    )


@rule_of_sizes
def recomputed_modules_exist(sizes: LayoutSizes) -> Problem | None:
    """`recompute.modules` names parts that the model has.

    They are norm, latent-up, attention, expert-activation, shared-expert, dense, moe, layer. latent-up needs
    latent or compressed attention (`model.attention.q_lora_rank`), expert-activation and moe need `model.moe`,
    shared-expert needs `model.moe.shared_expert_intermediate_size`, and dense needs `model.dense_layers` or
    `model.moe.moe_layer_freq` > 1.
    """
    return _unknown_part(sizes.model, "recompute.modules", sizes.recompute, RECOMPUTABLE)


@rule_of_sizes
def offloaded_modules_exist(sizes: LayoutSizes) -> Problem | None:
    """`offload.activations` names parts that the model has: attention, dense, moe, layer."""
    return _unknown_part(sizes.model, "offload.activations", sizes.offloaded, OFFLOADABLE)


def recomputed_parts_exist(run: Run) -> Problem | None:
    """`recompute.layers` are from 0 to `model.layers` - 1; those of `model.mtp_layers` count on from there.

    `recompute.stages` are from 0 to `parallel.pipeline` x `pipeline.stages_per_rank` - 1.
    """
    counts = {"layers": run.model.layers + run.model.mtp_layers, "stages": stage_count(run)}
    for name, count in counts.items():
        if strange := [number for number in dict(run.recompute)[name] if not 0 <= number < count]:
            got = ", ".join(map(str, strange[:5]))
            return Problem(f"recompute.{name}", "has numbers that do not exist", got=got, allowed=f"0 to {count - 1}")
    return None


def recompute_says_what(run: Run) -> Problem | None:
    """`recompute.layers` and `recompute.stages` select places, so they need `recompute.modules`."""
    for name, where in (("layers", run.recompute.layers), ("stages", run.recompute.stages)):
        if where and not run.recompute.modules:
            return Problem.from_line(
                f"recompute.{name} says where, but recompute.modules does not say what; "
                f"got {', '.join(f'{index}' for index in where[:5])}; "
                "fix: set recompute.modules=layer to compute whole layers again"
            )
    return None


def _unknown_part(model: ModelSizes, field: str, names: Sequence[str], known: Sequence[str]) -> Problem | None:
    missing = _missing_parts(model)
    for name in names:
        if name not in known:
            fix = did_you_mean(name, known)
            return Problem(field, "has an unknown name", got=name, allowed=", ".join(known), fix=fix)
        if name in missing:
            allowed = ", ".join(name for name in known if name not in missing)
            return Problem(field, f"names {name}, but {missing[name]}", allowed=allowed, fix=f"leave {name} out")
    return None


def _missing_parts(model: ModelSizes) -> dict[str, str]:
    """Parts of layers that this model lacks, each with the reason."""
    missing = {} if model.is_latent else {"latent-up": "model.attention.kind is gqa"}  # part: reason
    if not model.experts:
        missing |= dict.fromkeys(("moe", "expert-activation", "shared-expert"), "the model has no model.moe")
    elif model.shared_width == 0:
        missing["shared-expert"] = "model.moe.shared_expert_intermediate_size is 0"
    if model.dense_layers == 0:
        missing["dense"] = "model.dense_layers is 0"
    return missing
