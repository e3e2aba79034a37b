"""What a run's own config or its start would refuse, over plain numbers: the most frequent of it in a search.

`penstock.config` is what decides; a rule here has the name of the function there, and tests hold the two together: what
one refuses, the other refuses. What does not depend on sizes that a search varies is not repeated here;
`penstock.plan.rules.book.config_refusal` asks the config itself about a run.
"""

from collections.abc import Callable

from penstock.config.dispatch_rules import COUNTS_STAY, padded_rows_are_sent, sent_rows_are_counted_by_the_host
from penstock.config.fit import SPLITTING_SCHEDULES, grid_of
from penstock.config.graph_rules import captured_passes_are_not_cut_into_stages
from penstock.config.layout_rules import (
    expert_ranks_divide_experts,
    expert_tensor_ranks_divide_an_expert,
    experts_have_ranks_only_if_there_are_any,
    gathered_weights_meet_whole_backwards,
    pipeline_has_enough_layers,
    ranks_divide_the_sequence,
    recomputed_modules_exist,
    schedule_has_its_stages,
    tensor_ranks_divide_heads,
    tensor_ranks_divide_the_vocabulary,
    tensor_ranks_divide_widths,
    ulysses_divides_heads,
)
from penstock.config.overlap_rules import (
    OVERLAPPING_SCHEDULES,
    halves_are_whole_rows,
    passes_stand_beside_each_other,
    pieces_have_their_weights,
    tokens_travel_to_experts,
    travels_happen_once,
)
from penstock.config.parallel import RECOMPUTABLE
from penstock.config.rules import rule_text
from penstock.layout.schedules import SCHEDULES
from penstock.layout.sequence import multiple_of
from penstock.plan.rules.rule import Check, Rule
from penstock.plan.rules.sizes import Sizes

_IN_PIECES = ("halves", "passes")


def _sizes_divide_the_ranks(sizes: Sizes) -> str | None:
    dense, expert = sizes.pp * sizes.tp * sizes.cp, sizes.pp * sizes.expert_ranks
    if sizes.world % dense:
        return f"PP {sizes.pp} x CP {sizes.cp} x TP {sizes.tp} = {dense} does not divide {sizes.world} ranks"
    if sizes.world % expert:
        return f"PP {sizes.pp} x EP {sizes.ep} x ETP {sizes.etp} = {expert} does not divide {sizes.world} ranks"
    return None


def _micro_batches_are_whole(sizes: Sizes) -> str | None:
    rows = sizes.micro_batch * sizes.dp
    if rows and sizes.global_batch % rows == 0:
        return None
    return f"micro-batch {sizes.micro_batch} x DP {sizes.dp} = {rows} does not divide {sizes.global_batch} rows"


def _schedule_has_its_micro_batches(sizes: Sizes) -> str | None:
    if sizes.pp == 1 or sizes.schedule not in SCHEDULES:
        return None
    least = SCHEDULES[sizes.schedule].micro_batches_per_rank * sizes.pp
    if sizes.micro_batches >= least:
        return None
    return f"{sizes.schedule} on {sizes.pp} ranks needs {least} micro-batches, and there are {sizes.micro_batches}"


def _experts_have_ranks_only_if_there_are_any(sizes: Sizes) -> str | None:
    if sizes.model.experts or sizes.expert_ranks == 1:
        return None
    return f"EP {sizes.ep} x ETP {sizes.etp}, and the model has no experts"


def _expert_ranks_divide_experts(sizes: Sizes) -> str | None:
    experts = sizes.model.experts
    return f"EP {sizes.ep} does not divide {experts} experts" if experts % sizes.ep else None


def _expert_tensor_ranks_divide_an_expert(sizes: Sizes) -> str | None:
    width = sizes.model.expert_width
    return f"ETP {sizes.etp} does not divide an expert's {width} features" if width % sizes.etp else None


def _tensor_ranks_divide_heads(sizes: Sizes) -> str | None:
    for heads in sizes.model.head_counts:
        if heads % sizes.tp:
            return f"TP {sizes.tp} does not divide {heads} heads"
    return None


def _tensor_ranks_divide_widths(sizes: Sizes) -> str | None:
    for width in (sizes.model.dense_width, sizes.model.shared_width):
        if width % sizes.tp:
            return f"TP {sizes.tp} does not divide a network of {width} features"
    return None


def _tensor_ranks_divide_the_vocabulary(sizes: Sizes) -> str | None:
    ids = sizes.model.vocab_size
    return f"TP {sizes.tp} does not divide a vocabulary of {ids}" if ids % sizes.tp else None


def _ranks_divide_the_sequence(sizes: Sizes) -> str | None:
    least = multiple_of(sizes.cp, sizes.tp, sizes.settled_context_method)
    if sizes.sequence_length % least == 0:
        return None
    return f"CP {sizes.cp} x TP {sizes.tp} want rows of a multiple of {least}, and they have {sizes.sequence_length}"


def _ulysses_divides_heads(sizes: Sizes) -> str | None:
    ranks = sizes.cp * sizes.tp
    if sizes.context_method != "ulysses" or sizes.cp == 1:
        return None
    for heads in sizes.model.head_counts:
        if heads % ranks:
            return f"CP {sizes.cp} x TP {sizes.tp} = {ranks} does not divide {heads} heads"
    return None


def _schedule_has_its_stages(sizes: Sizes) -> str | None:
    if sizes.pp == 1 or sizes.schedule not in SCHEDULES:
        return None
    shape = SCHEDULES[sizes.schedule]
    if shape.fewest <= sizes.vpp and (shape.most is None or sizes.vpp <= shape.most):
        return None
    wanted = f"{shape.fewest}" if shape.most else f"{shape.fewest} or more"
    return f"{sizes.schedule} has {wanted} stages a rank, not {sizes.vpp}"


def _pipeline_has_enough_layers(sizes: Sizes) -> str | None:
    most = sizes.model.layers + 2
    if sizes.pp == 1 or sizes.stages <= most:
        return None
    return f"PP {sizes.pp} x {sizes.vpp} stages = {sizes.stages}, and the model fills {most}"


def _gathered_weights_meet_whole_backwards(sizes: Sizes) -> str | None:
    if sizes.pp == 1 or sizes.shard != "full" or sizes.schedule not in SPLITTING_SCHEDULES:
        return None
    return f"{sizes.schedule} splits backward, and full shards are gone by its second half"


def _recomputed_modules_exist(sizes: Sizes) -> str | None:
    model = sizes.model
    has = {
        "latent-up": model.is_latent,
        "expert-activation": bool(model.experts),
        "moe": bool(model.experts),
        "shared-expert": bool(model.shared_width),
        "dense": bool(model.dense_layers),
    }
    for name in sizes.recompute:
        if name not in RECOMPUTABLE or not has.get(name, True):
            return f"the model has no {name} to compute again"
    return None


def _sent_rows_are_counted_by_the_host(sizes: Sizes) -> str | None:
    if sizes.dispatcher != "all-to-all" or sizes.model.pads or sizes.sync_free < COUNTS_STAY:
        return None
    return f"the host reads row counts of {sizes.dispatcher}, and stage {sizes.sync_free} lets it read none"


def _padded_rows_are_sent(sizes: Sizes) -> str | None:
    if not sizes.model.pads or sizes.dispatcher in ("local", "all-to-all"):
        return None
    return f"{sizes.dispatcher} sends no padding, and the model pads every expert to its capacity"


def _kernels_never_wait(sizes: Sizes) -> str | None:
    most = sizes.model.most_sync_free
    if sizes.sync_free <= most:
        return None
    return f"the kernels for this device and precision read counts on the host, and stage {sizes.sync_free} allows none"


def _tokens_travel_to_experts(sizes: Sizes) -> str | None:
    model = sizes.model
    if sizes.overlap == "none" or (model.experts and (sizes.overlap != "shared" or model.shared_width)):
        return None
    return f"overlap {sizes.overlap}, and the model has no {'shared expert' if model.experts else 'experts'}"


def _travels_happen_once(sizes: Sizes) -> str | None:
    if sizes.overlap == "none":
        return None
    for name in ("moe", "layer"):
        if name in sizes.recompute:
            return f"overlap {sizes.overlap} with {name} computed again, and the way of the tokens with it"
    return None


def _halves_are_whole_rows(sizes: Sizes) -> str | None:
    if sizes.overlap != "halves" or sizes.micro_batch % 2 == 0:
        return None
    return f"a micro-batch of {sizes.micro_batch} rows has no halves"


def _pieces_have_their_weights(sizes: Sizes) -> str | None:
    if sizes.overlap not in _IN_PIECES or sizes.shard != "full":
        return None
    return f"overlap {sizes.overlap} would hold gathered weights of two passes"


def _passes_stand_beside_each_other(sizes: Sizes) -> str | None:
    if sizes.overlap != "passes" or (sizes.pp > 1 and sizes.schedule in OVERLAPPING_SCHEDULES):
        return None
    return f"overlap passes needs {' or '.join(OVERLAPPING_SCHEDULES)}, not {sizes.schedule} on {sizes.pp} ranks"


def _captured_passes_are_not_cut_into_stages(sizes: Sizes) -> str | None:
    if sizes.capture not in ("full", "partial") or sizes.pp == 1:
        return None
    return f"graphs hold one pass, and PP {sizes.pp} has several under way"


def rule_name(function: Callable[..., object]) -> str:
    """The name of a rule of the config, as plans say it."""
    return function.__name__.strip("_").replace("_", "-")


def _by_config(function: Callable[..., object], check: Check, source: str) -> Rule:
    """The rule of a function of `penstock.config`, whose words are the rule's words."""
    assert rule_name(function) == rule_name(check), f"{check} stands for another function than {function}"
    doc = rule_text(function)  # type: ignore[arg-type]
    return Rule(name=rule_name(function), kind="legal", doc=doc, source=source, check=check, by=_place(function))


def _by_grid(check: Check, doc: str, source: str) -> Rule:
    """What depends on the number of ranks."""
    return Rule(name=rule_name(check), kind="legal", doc=doc, source=source, check=check, by=_place(grid_of))


def _place(function: Callable[..., object]) -> str:
    return f"{function.__module__}.{function.__name__}"


LEGAL: tuple[Rule, ...] = (
    _by_grid(
        _sizes_divide_the_ranks,
        "PP x CP x TP divides the ranks, and so does PP x EP x ETP: two views of the same ranks.",
        "L1, L2",
    ),
    _by_grid(_micro_batches_are_whole, "Micro-batch x DP divides the global batch.", "our step"),
    _by_grid(
        _schedule_has_its_micro_batches, "dualpipe-v wants two micro-batches for each pipeline rank.", "our schedules"
    ),
    _by_config(experts_have_ranks_only_if_there_are_any, _experts_have_ranks_only_if_there_are_any, "L3"),
    _by_config(expert_ranks_divide_experts, _expert_ranks_divide_experts, "L3"),
    _by_config(expert_tensor_ranks_divide_an_expert, _expert_tensor_ranks_divide_an_expert, "our layout"),
    _by_config(tensor_ranks_divide_heads, _tensor_ranks_divide_heads, "L4"),
    _by_config(tensor_ranks_divide_widths, _tensor_ranks_divide_widths, "our layout"),
    _by_config(tensor_ranks_divide_the_vocabulary, _tensor_ranks_divide_the_vocabulary, "our layout"),
    _by_config(ranks_divide_the_sequence, _ranks_divide_the_sequence, "L6"),
    _by_config(ulysses_divides_heads, _ulysses_divides_heads, "L6"),
    _by_config(schedule_has_its_stages, _schedule_has_its_stages, "our schedules"),
    _by_config(pipeline_has_enough_layers, _pipeline_has_enough_layers, "L13"),
    _by_config(gathered_weights_meet_whole_backwards, _gathered_weights_meet_whole_backwards, "our FSDP2"),
    _by_config(recomputed_modules_exist, _recomputed_modules_exist, "M7"),
    _by_config(sent_rows_are_counted_by_the_host, _sent_rows_are_counted_by_the_host, "G3, our dispatchers"),
    Rule(
        name=rule_name(_kernels_never_wait),
        kind="legal",
        doc="From `dispatch.sync_free` 2 on (1 for the permutation) kernels never read counts on the host, which those "
        "of the reference do; on a GPU they are all there is for the experts in float32.",
        source="our kernels",
        check=_kernels_never_wait,
        by="penstock.models.kernels.kernel_choices",  # which imports PyTorch
    ),
    _by_config(padded_rows_are_sent, _padded_rows_are_sent, "R7"),
    _by_config(tokens_travel_to_experts, _tokens_travel_to_experts, "O1"),
    _by_config(travels_happen_once, _travels_happen_once, "O1, M7"),
    _by_config(halves_are_whole_rows, _halves_are_whole_rows, "our overlap"),
    _by_config(pieces_have_their_weights, _pieces_have_their_weights, "our overlap"),
    _by_config(passes_stand_beside_each_other, _passes_stand_beside_each_other, "O1"),
    _by_config(captured_passes_are_not_cut_into_stages, _captured_passes_are_not_cut_into_stages, "our graphs"),
)
"""In the order in which they are asked: what refuses most comes first."""
