"""Rules between fields of layout: what ranks may share, and how. Each docstring is the rule as users read it.

What depends on the number of ranks is not here but in `penstock.config.fit`.
"""

from collections.abc import Iterable, Sequence

from penstock.base.errors import ConfigError
from penstock.base.meant import did_you_mean
from penstock.config.fit import SPLITTING_SCHEDULES, context_method, heads_of, shard, stage_count
from penstock.config.model import LatentAttention
from penstock.config.parallel import OFFLOADABLE, RECOMPUTABLE
from penstock.config.problem import Problem, divisors
from penstock.config.run import Run
from penstock.layout.schedules import SCHEDULES
from penstock.layout.sequence import multiple_of
from penstock.layout.stages import parse_stages


def experts_have_ranks_only_if_there_are_any(run: Run) -> Problem | None:
    """`parallel.expert` and `parallel.expert_tensor` above 1 need `model.moe`."""
    for name, size in (("expert", run.parallel.expert), ("expert_tensor", run.parallel.expert_tensor)):
        if size > 1 and run.model.moe is None:
            return Problem(
                f"parallel.{name}",
                "shares experts, but the model has none (model.moe)",
                got=f"{size}",
                allowed="1",
                fix=f"set parallel.{name}=1",
            )
    return None


def expert_ranks_divide_experts(run: Run) -> Problem | None:
    """`parallel.expert` divides `model.moe.experts`."""
    moe = run.model.moe
    return None if moe is None else _must_divide(run, "expert", "model.moe.experts", moe.experts)


def expert_tensor_ranks_divide_an_expert(run: Run) -> Problem | None:
    """`parallel.expert_tensor` divides `model.moe.moe_intermediate_size`."""
    moe = run.model.moe
    return (
        None
        if moe is None
        else _must_divide(run, "expert_tensor", "model.moe.moe_intermediate_size", moe.moe_intermediate_size)
    )


def tensor_ranks_divide_heads(run: Run) -> Problem | None:
    """`parallel.tensor` divides `model.attention.heads`, and `model.attention.kv_heads` where there are such."""
    heads = {f"model.attention.{name}": count for name, count in heads_of(run.model.attention).items()}
    return _first(_must_divide(run, "tensor", name, count) for name, count in heads.items())


def tensor_ranks_divide_widths(run: Run) -> Problem | None:
    """`parallel.tensor` divides `model.intermediate_size` and `model.moe.shared_expert_intermediate_size`."""
    model = run.model
    widths = {"model.intermediate_size": model.intermediate_size} if model.moe_layers < model.layers else {}
    if model.moe is not None:
        widths["model.moe.shared_expert_intermediate_size"] = model.moe.shared_expert_intermediate_size
    return _first(_must_divide(run, "tensor", name, width) for name, width in widths.items())


def tensor_ranks_divide_the_vocabulary(run: Run) -> Problem | None:
    """`parallel.tensor` divides `model.vocab_size`; ids that no token has may fill it up."""
    ranks, vocabulary = run.parallel.tensor, run.model.vocab_size
    if vocabulary % ranks == 0:
        return None
    return Problem(
        "model.vocab_size",
        f"must be a multiple of parallel.tensor ({ranks})",
        got=f"{vocabulary}",
        fix=f"set model.vocab_size={vocabulary + -vocabulary % ranks}; ids that no token has do no harm",
    )


def ranks_divide_the_sequence(run: Run) -> Problem | None:
    """`parallel.context` x `parallel.tensor` divide `training.sequence_length`.

    Twice that many do with `parallel.context_method` all-gather, which gives a rank two chunks of each row.
    """
    parallel, length = run.parallel, run.training.sequence_length
    method = context_method(run)
    least = multiple_of(parallel.context, parallel.tensor, method)
    if length % least == 0:
        return None
    twice = least > parallel.context * parallel.tensor
    below = length - length % least
    near = " or ".join(f"{one}" for one in (below, below + least) if one)
    return Problem(
        "training.sequence_length",
        f"must be a multiple of {'2 x ' if twice else ''}parallel.context x parallel.tensor ({least})",
        got=f"{length}",
        fix=f"set training.sequence_length to {near}",
    )


def ulysses_divides_heads(run: Run) -> Problem | None:
    """With `parallel.context_method` ulysses, `parallel.context` x `parallel.tensor` divide the heads.

    That is `model.attention.heads`, and `model.attention.kv_heads` where there are such.
    """
    ranks = run.parallel.context * run.parallel.tensor
    if run.parallel.context_method != "ulysses" or run.parallel.context == 1:
        return None
    for name, heads in heads_of(run.model.attention).items():
        if heads % ranks:
            return Problem(
                "parallel.context_method",
                f"ulysses needs model.attention.{name} divided by parallel.context x parallel.tensor ({ranks})",
                got=f"{heads}",
                fix="set parallel.context_method=all-gather",
            )
    return None


def schedule_has_its_stages(run: Run) -> Problem | None:
    """`pipeline.stages_per_rank` is what `pipeline.schedule` needs.

    1 for 1f1b and zb-1f1b, 2 for zb-v, v-half, v-min and dualpipe-v, at least 2 for interleaved, any number for gpipe.
    It is read only if `parallel.pipeline` is above 1.
    """
    name, stages = run.pipeline.schedule, run.pipeline.stages_per_rank
    shape = SCHEDULES[name]
    if run.parallel.pipeline == 1 or (shape.fewest <= stages and (shape.most is None or stages <= shape.most)):
        return None
    other = "interleaved" if stages > 1 else "1f1b"
    return Problem(
        "pipeline.stages_per_rank",
        f"does not go with pipeline.schedule {name}",
        got=f"{stages}",
        allowed=f"{shape.fewest}" if shape.most else f">= {shape.fewest}",
        fix=f"set pipeline.stages_per_rank={shape.fewest}, or pipeline.schedule={other}",
    )


def pipeline_has_enough_layers(run: Run) -> Problem | None:
    """`parallel.pipeline` x `pipeline.stages_per_rank` is at most `model.layers` + 2.

    No stage is empty; the embedding and the head may have stages of their own.
    """
    stages, most = stage_count(run), run.model.layers + 2
    if stages <= most:
        return None
    ranks, of_rank = run.parallel.pipeline, run.pipeline.stages_per_rank
    return Problem(
        "parallel.pipeline",
        f"makes more stages than model.layers ({run.model.layers}), the embedding and the head can fill",
        got=f"{ranks} ranks x {of_rank} stages = {stages}",
        allowed=f"up to {most}",
        fix="lower parallel.pipeline or pipeline.stages_per_rank",
    )


def layout_has_a_pipeline(run: Run) -> Problem | None:
    """`pipeline.layout` needs `parallel.pipeline` above 1."""
    if not run.pipeline.layout or run.parallel.pipeline > 1:
        return None
    return Problem(
        "pipeline.layout",
        "divides a pipeline, but parallel.pipeline is 1",
        got=f"'{run.pipeline.layout[:60]}'",
        fix="set parallel.pipeline, or leave pipeline.layout out",
    )


def layout_can_be_read(run: Run) -> Problem | None:
    """`pipeline.layout` follows the grammar of docs/layouts.md.

    It holds all of `model.layers` and `model.mtp_layers` and makes `parallel.pipeline` x `pipeline.stages_per_rank`
    stages.
    """
    if not run.pipeline.layout or run.parallel.pipeline == 1:
        return None
    layers, mtp_layers = run.model.layers, run.model.mtp_layers
    try:
        parse_stages(run.pipeline.layout, layers=layers, mtp_layers=mtp_layers, stages=stage_count(run))
    except ConfigError as error:
        what = error.what.removeprefix("pipeline.layout ")
        return Problem("pipeline.layout", what, got=f"{error.got}", allowed=f"{error.allowed}", fix=error.fix)
    return None


def gathered_weights_meet_whole_backwards(run: Run) -> Problem | None:
    """`parallel.shard` full does not go with a `pipeline.schedule` that splits backward.

    These are zb-1f1b, zb-v, v-half, v-min and dualpipe-v: weights that were gathered for one half would be gone when
    the other comes.
    """
    if run.parallel.pipeline == 1 or shard(run) != "full" or run.pipeline.schedule not in SPLITTING_SCHEDULES:
        return None
    return Problem(
        "parallel.shard",
        f"full does not go with pipeline.schedule {run.pipeline.schedule}, which splits backward",
        got="full",
        allowed="auto, none, optimizer",
        fix="set parallel.shard=optimizer",
    )


def shards_have_something_to_divide(run: Run) -> Problem | None:
    """`parallel.shard_size` has no meaning with `parallel.shard` none."""
    if run.parallel.shard_size == 0 or run.parallel.shard != "none":
        return None
    return Problem(
        "parallel.shard_size",
        "says how many ranks divide a copy, but parallel.shard none divides nothing",
        got=f"{run.parallel.shard_size}",
        fix="set parallel.shard_size=0, or parallel.shard=optimizer",
    )


def recomputed_modules_exist(run: Run) -> Problem | None:
    """`recompute.modules` names parts that the model has.

    They are norm, latent-up, attention, expert-activation, shared-expert, dense, moe, layer. latent-up needs
    latent attention (`model.attention.kv_lora_rank`), expert-activation and moe need `model.moe`, shared-expert needs
    `model.moe.shared_expert_intermediate_size`, and dense needs `model.dense_layers` or `model.moe.moe_layer_freq` > 1.
    """
    return _unknown_part(run, "recompute.modules", run.recompute.modules, RECOMPUTABLE)


def offloaded_modules_exist(run: Run) -> Problem | None:
    """`offload.activations` names parts that the model has: attention, dense, moe, layer."""
    return _unknown_part(run, "offload.activations", run.offload.activations, OFFLOADABLE)


def recomputed_layers_exist(run: Run) -> Problem | None:
    """`recompute.layers` are from 0 to `model.layers` - 1; those of `model.mtp_layers` count on from there."""
    return _out_of_range("recompute.layers", run.recompute.layers, run.model.layers + run.model.mtp_layers)


def recomputed_stages_exist(run: Run) -> Problem | None:
    """`recompute.stages` are from 0 to `parallel.pipeline` x `pipeline.stages_per_rank` - 1."""
    return _out_of_range("recompute.stages", run.recompute.stages, stage_count(run))


def recompute_says_what(run: Run) -> Problem | None:
    """`recompute.layers` and `recompute.stages` say where, so they need `recompute.modules`, which say what."""
    for name, where in (("layers", run.recompute.layers), ("stages", run.recompute.stages)):
        if where and not run.recompute.modules:
            return Problem(
                f"recompute.{name}",
                "says where, but recompute.modules does not say what",
                got=", ".join(f"{one}" for one in where[:5]),
                fix="set recompute.modules=layer to compute whole layers again",
            )
    return None


def _first(problems: Iterable[Problem | None]) -> Problem | None:
    return next((problem for problem in problems if problem is not None), None)


def _must_divide(run: Run, name: str, whole: str, count: int) -> Problem | None:
    """A size of `parallel` divides what its ranks share."""
    sizes = {"tensor": run.parallel.tensor, "expert": run.parallel.expert, "expert_tensor": run.parallel.expert_tensor}
    if count % sizes[name] == 0:
        return None
    return Problem(f"parallel.{name}", f"must divide {whole} ({count})", f"{sizes[name]}", divisors(count))


def _unknown_part(run: Run, field: str, names: Sequence[str], known: Sequence[str]) -> Problem | None:
    missing = _missing_parts(run)
    for name in names:
        if name not in known:
            fix = did_you_mean(name, known)
            return Problem(field, "has an unknown name", got=name, allowed=", ".join(known), fix=fix)
        if name in missing:
            allowed = ", ".join(one for one in known if one not in missing)
            return Problem(field, f"names {name}, but {missing[name]}", allowed=allowed, fix=f"leave {name} out")
    return None


def _missing_parts(run: Run) -> dict[str, str]:
    """Parts that could be named and that this model lacks, and why."""
    model = run.model
    missing = {}
    if not isinstance(model.attention, LatentAttention):
        missing["latent-up"] = f"model.attention.kind is {model.attention.kind}"
    if model.moe is None:
        missing |= dict.fromkeys(("moe", "expert-activation", "shared-expert"), "the model has no model.moe")
    elif model.moe.shared_expert_intermediate_size == 0:
        missing["shared-expert"] = "model.moe.shared_expert_intermediate_size is 0"
    if model.moe_layers == model.layers:
        missing["dense"] = "model.dense_layers is 0"
    return missing


def _out_of_range(field: str, numbers: Sequence[int], count: int) -> Problem | None:
    strange = [number for number in numbers if not 0 <= number < count]
    if not strange:
        return None
    shown = ", ".join(f"{number}" for number in strange[:5])
    return Problem(field, "has numbers that do not exist", got=shown, allowed=f"0 to {count - 1}")


LAYOUT_RULES = (
    experts_have_ranks_only_if_there_are_any,
    expert_ranks_divide_experts,
    expert_tensor_ranks_divide_an_expert,
    tensor_ranks_divide_heads,
    tensor_ranks_divide_widths,
    tensor_ranks_divide_the_vocabulary,
    ranks_divide_the_sequence,
    ulysses_divides_heads,
    schedule_has_its_stages,
    pipeline_has_enough_layers,
    layout_has_a_pipeline,
    layout_can_be_read,
    gathered_weights_meet_whole_backwards,
    shards_have_something_to_divide,
    recomputed_modules_exist,
    offloaded_modules_exist,
    recomputed_layers_exist,
    recomputed_stages_exist,
    recompute_says_what,
)
