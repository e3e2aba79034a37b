"""Rules that a planner and a doctor apply before a projection, each with a name, a reason and a source.

A search looks at tens of thousands of layouts within seconds, so a rule reads a frozen `Sizes` (a layout, its cluster
and its model as plain numbers) and needs neither a `Run` nor PyTorch. All layouts of a search share their `ModelFacts`;
`sizes_of` makes those of one run. Kinds of rules:

    legal    the run would be refused when it is loaded or started; `by` names the function that refuses it
    advice   what guides of the field say against a layout; the times of the projection decide

A reason is one line with the numbers of the case. None means that the rule does not apply to these sizes.

A search leaves out what `illegal` refuses, and nothing else; `advice` is told about its best layout. For a single run,
`penstock plan --layout` asks `config_refusal` and `advice`. Legal rules are functions of `penstock.config` itself, by
their names: those that a search breaks most often. docs/rules.md is written from this file.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import ceil
from typing import Any, Literal

from penstock.base.errors import ConfigError
from penstock.config import dispatcher, fit, graph_rules, layout_rules
from penstock.config.dispatcher import STAGES, choose_dispatcher, dispatch_facts, ranks_on_a_node
from penstock.config.fit import LayoutSizes, ModelSizes, grid_of, layout_sizes, model_sizes
from penstock.config.rules import RULES as CONFIG_RULES
from penstock.config.rules import rule_text
from penstock.config.run import Run
from penstock.config.schema import Problem
from penstock.config.size import size_of
from penstock.layout.grid import Grid
from penstock.plan.hardware import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts(ModelSizes):
    """Sizes of a model and further facts that rules read."""

    top_k: int  # experts of a token
    forces_balance: bool  # tokens are spread evenly and the router's choice is ignored
    total_parameters: int
    active_parameters: int  # parameters that one token meets
    most_sync_free: int = STAGES - 1  # highest `dispatch.sync_free` at which the kernels never wait


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes(LayoutSizes):
    """Sizes of a layout on a cluster."""

    model: ModelFacts
    world: int
    node_devices: int  # devices of a node
    vendor: str  # nvidia, amd or cpu
    reduce: str = "fp32"  # type in which gradients are summed over ranks
    offloads_optimizer: bool = False  # moments are in host memory

    @property
    def dp(self) -> int:
        """Ranks that train on different rows; rounded down if sizes do not divide."""
        return self.world // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts; rounded down if sizes do not divide."""
        return self.world // (self.pp * self.expert_ranks)

    @property
    def grid(self) -> Grid:
        """Ranks of each axis."""
        return Grid(
            world=self.world, tensor=self.tp, context=self.cp, pipeline=self.pp, expert=self.ep, expert_tensor=self.etp
        )

    @property
    def micro_batches(self) -> int:
        """Passes of a rank in a step; rounded down, 0 if the batch is too small."""
        return self.global_batch // max(1, self.micro_batch * self.dp)

    def is_inside_node(self, ranks: int) -> bool:
        """Whether all groups of so many neighbours lie inside nodes."""
        return self.node_devices % ranks == 0


def sizes_of(run: Run, cluster: Cluster, most_sync_free: int = STAGES - 1) -> Sizes:
    """Sizes of a run on a cluster, which it need not fit; `most_sync_free` as of `ModelFacts`."""
    model, counted = run.model, size_of(run.model, run.training.sequence_length)
    facts = ModelFacts(
        **_values(model_sizes(model)),
        top_k=0 if model.moe is None else model.moe.top_k,
        forces_balance=model.moe is not None and model.moe.balance.force_load_balance,
        total_parameters=counted.parameters,
        active_parameters=counted.active_parameters,
        most_sync_free=most_sync_free,
    )
    values = _values(layout_sizes(run)) | {"model": facts, "dispatcher": settled_dispatcher(run, cluster)}
    return Sizes(
        **values,
        world=cluster.devices,
        node_devices=cluster.node_devices,
        vendor=cluster.hardware.vendor,
        reduce=run.parallel.reduce,
        offloads_optimizer=run.offload.optimizer,
    )


def _values(sizes: ModelSizes | LayoutSizes) -> dict[str, Any]:
    return {field.name: getattr(sizes, field.name) for field in fields(sizes)}


def settled_dispatcher(run: Run, cluster: Cluster) -> str:
    """The dispatcher of a run on a cluster, whose GPUs reach each other's memory inside a node.

    A method that was asked for and is not available is returned as it is, for a rule to refuse it.
    """
    ranks = run.parallel.expert * run.parallel.expert_tensor
    if run.model.moe is None or ranks == 1:
        return "local"
    obstacle = "no GPUs" if cluster.hardware.vendor == "cpu" else ""
    choice = choose_dispatcher(dispatch_facts(run, ranks_on_a_node(ranks, cluster.node_devices), obstacle))
    if choice.name == "padded":
        return "all-to-all" if run.dispatch.method == "auto" else run.dispatch.method
    return run.dispatch.method if choice.refusal is not None else choice.name


Kind = Literal["legal", "advice"]

Check = Callable[[Sizes], str | None]  # the reason against sizes, or None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule."""

    name: str  # name in plans and reports; never changes
    kind: Kind  # legal or advice
    doc: str  # the rule in words, with the measurement behind it
    source: str  # origin of the rule; ids such as L10 are of the list in docs/rules.md
    check: Check  # the reason against sizes, or None
    by: str = ""  # of a legal rule: the function that refuses such a run
    fix: tuple[str, ...] = ()  # overrides of a run that try the opposite; empty if they depend on the case


def advises(source: str, *fix: str) -> Callable[[Check], Rule]:
    """Make a rule of a function: its name is the rule's name, its docstring the rule's text.

    `fix` are overrides that try the opposite.
    """

    def made(function: Check) -> Rule:
        assert function.__doc__ is not None, f"{function} is documented"
        name = function.__name__.replace("_", "-")
        doc = " ".join(function.__doc__.split())
        return Rule(name=name, kind="advice", doc=doc, source=source, check=function, fix=fix)

    return made


# Rules of thumb of the field: what guides say against a layout, with the change that tries the opposite.
#
# The projection has times for all of it, and times decide: a search tells this about its best layout, beside the speed
# of the best that it found without it. `fix` is a change of the run's config, if one change is right in every case.


SMALL_MODEL = 20_000_000_000  # parameters below which experts are all that is shared
SHARD = 4096  # positions of a row that context parallelism leaves a rank without objection
LONG_ROW = 16_384  # positions of a row from which context parallelism is advised
MANY_COPIES = 128  # ranks over which sums of bfloat16 gradients in a ring lose too much
FEW_PEERS = 4  # ranks inside a node between which dispatch is too short to overlap
WAITING = 0.2  # bubble of a pipeline above which there is advice
UNEVEN = 1.1  # layers of the fullest stage over the mean above which there is advice


def bubble_of(sizes: Sizes) -> float:
    """Share of a pipeline's time that ranks wait, if F = I = W and links take no time; 0 where no formula is known.

    With m micro-batches on p ranks of v stages: (p - 1) / (p - 1 + m v) for 1F1B, interleaved and GPipe, 3 m for
    zb-1f1b and 6 m for zb-v and dualpipe-v in the place of m v (docs/schedules.md). v-half and v-min have none.
    """
    ramp = sizes.pp - 1
    times = {"gpipe": sizes.vpp, "1f1b": 1, "interleaved": sizes.vpp, "zb-1f1b": 3, "zb-v": 6, "dualpipe-v": 6}
    if ramp == 0 or sizes.schedule not in times:
        return 0.0
    return ramp / (ramp + sizes.micro_batches * times[sizes.schedule])


@advises("3.0, M5, M9 (Megatron Bridge, activation recompute)", 'recompute.modules=["expert-activation"]')
def selective_before_full(sizes: Sizes) -> str | None:
    """Parts of a layer are recomputed before all of its experts, and those before the whole layer.

    The whole layer costs about 30 % of the computing. Recomputed experts send their tokens twice.
    """
    if "layer" in sizes.recompute:
        return "every forward pass is computed twice"
    return "experts are computed twice, and their tokens are sent twice" if "moe" in sizes.recompute else None


@advises("L8, L11 (Megatron Bridge, memory tuning); AMD's plans for 768 GPUs", "parallel.tensor=1")
def tensor_only_to_fit(sizes: Sizes) -> str | None:
    """TP is the last kind of model parallelism: 1 while anything fits so.

    Doubling it to save memory cost 28 % of the speed of a dense model of 70B; AMD plans 93B active parameters
    without it.
    """
    active = sizes.model.active_parameters / 1e9
    return None if sizes.tp == 1 else f"TP {sizes.tp} cuts matrices of a model of {active:.3g}B active parameters"


@advises("L8 (Megatron Bridge, memory tuning)", "parallel.tensor=1")
def tensor_inside_node(sizes: Sizes) -> str | None:
    """TP stays inside a node: its sums stand in the way of every layer, and nothing hides them."""
    if sizes.is_inside_node(sizes.tp):
        return None
    return f"TP {sizes.tp} crosses nodes of {sizes.node_devices} devices, several times in every layer"


@advises(
    "L9 (Megatron-Core, MoE guide: EP 8 x TP 1 before EP 4 x TP 2 on Mixtral); docs/dispatch.md (copies)",
    "parallel.expert_tensor=1",
)
def expert_before_tensor(sizes: Sizes) -> str | None:
    """Experts are shared whole before they are cut: ETP only where EP of the same ranks does not divide them.

    With ETP P a row goes to P ranks, which all-to-all sends P times.
    """
    experts, ranks = sizes.model.experts, sizes.expert_ranks
    if sizes.etp == 1 or experts == 0 or experts % ranks:
        return None
    return f"EP {ranks} divides {experts} experts, and ETP {sizes.etp} sends every row to {sizes.etp} ranks instead"


@advises("D6 (Megatron-Core, MoE guide); docs/dispatch.md (computed)", "dispatch.method=auto")
def gathers_if_fewer_copies(sizes: Sizes) -> str | None:
    """All-gather is for as many ranks as a token has copies.

    It sends a token to each of W ranks, all-to-all P K (W - 1) / W times for K choices and ETP P: gathering is for W
    up to P K.
    """
    ranks, copies = sizes.expert_ranks, sizes.etp * sizes.model.top_k
    if sizes.dispatcher != "all-gather" or ranks <= copies:
        return None
    sent = copies * (ranks - 1) / ranks
    return (
        f"all-gather sends {ranks - 1} copies of a token over {ranks} ranks, and rows to their experts are {sent:.3g}"
    )


@advises("L10 (Megatron-Core, MoE guide); docs/hardware.md (links over network)")
def expert_product_inside_node(sizes: Sizes) -> str | None:
    """EP x ETP stays inside the fast link, where tokens have 4 to 18 times the bandwidth."""
    if sizes.is_inside_node(sizes.expert_ranks):
        return None
    return f"EP {sizes.ep} x ETP {sizes.etp} = {sizes.expert_ranks} crosses nodes of {sizes.node_devices} devices"


@advises("3.0 (Megatron-Core, MoE guide)")
def context_inside_node(sizes: Sizes) -> str | None:
    """CP x TP stays inside the fast link: ranks that share a row exchange it in every layer."""
    if sizes.cp == 1 or sizes.is_inside_node(sizes.tp * sizes.cp):
        return None
    return f"CP {sizes.cp} x TP {sizes.tp} = {sizes.cp * sizes.tp} crosses nodes of {sizes.node_devices} devices"


@advises("L7 (Megatron Bridge, parallelisms and long context)", "parallel.context=1")
def context_from_8k(sizes: Sizes) -> str | None:
    """CP begins with rows of 8,192 and leaves a rank 4,096 positions.

    Megatron keeps 4,096 to 8,192; half of that is AMD's CP 2 of rows of 4,096, which halves activations where nothing
    else does.
    """
    if sizes.cp == 1 or sizes.sequence_length >= SHARD * sizes.cp:
        return None
    left = sizes.sequence_length // sizes.cp
    return f"CP {sizes.cp} cuts rows of {sizes.sequence_length} positions into {left}, fewer than {SHARD}"


@advises("docs/decisions/0013-sharing-the-optimizer.md", "parallel.shard=optimizer")
def whole_weights_in_pipeline(sizes: Sizes) -> str | None:
    """In a pipeline, ranks divide the optimizer and keep their weights whole.

    FSDP2 gathers weights and sums gradients in each micro-batch.
    """
    if sizes.shard != "full" or sizes.pp == 1:
        return None
    return f"full shards gather weights for each of {sizes.micro_batches} micro-batches of a pipeline"


@advises("L11 (Megatron Bridge, parallelisms); layouts-h200x4.json", "parallel.pipeline=1")
def small_model_without_pipeline(sizes: Sizes) -> str | None:
    """Below 20B parameters experts are all that is shared.

    DeepSeek-V2-Lite on four H200s: PP 2 x EP 2 trains 11 % fewer tokens/s than EP 4, and TP 2 folded with EP 4
    trains 8 % fewer.
    """
    total = sizes.model.total_parameters
    return (
        None if sizes.pp == 1 or total >= SMALL_MODEL else f"PP {sizes.pp} for a model of {total / 1e9:.3g}B parameters"
    )


@advises("docs/schedules.md (by the clock)")
def backward_soon(sizes: Sizes) -> str | None:
    """With more micro-batches than ranks, 1F1B replaces GPipe.

    GPipe has the same bubble (17.95 % on 8 ranks with 32 micro-batches) and holds all 32 micro-batches instead of 8.
    """
    other, held = ("1f1b", sizes.pp) if sizes.vpp == 1 else ("interleaved", 2 * sizes.pp)
    if sizes.schedule != "gpipe" or sizes.micro_batches <= held:
        return None
    return f"gpipe holds all {sizes.micro_batches} micro-batches; {other} has its bubble and holds at most {held}"


@advises(
    "L12 (Megatron-Core, MoE guide; AMD's MoE guide)", "pipeline.schedule=interleaved", "pipeline.stages_per_rank=2"
)
def stages_when_pipeline(sizes: Sizes) -> str | None:
    """A pipeline has several stages on each rank where layers allow: v stages make ramps v times as short.

    AMD measured 54.4 % with one stage on 16 ranks and 24.4 % with three; the formula says 48.4 % and 23.8 %.
    """
    waits = bubble_of(sizes)
    if sizes.pp == 1 or sizes.vpp > 1 or sizes.schedule == "zb-1f1b" or waits <= WAITING / 4:
        return None
    if sizes.model.layers < 2 * sizes.pp:
        return None
    ramp = sizes.pp - 1
    halved = ramp / (ramp + 2 * sizes.micro_batches)
    return f"{sizes.micro_batches} micro-batches on PP {sizes.pp}: one stage a rank waits {waits:.0%}, two {halved:.0%}"


@advises("L12; docs/layouts.md")
def micro_batches_fill_the_pipeline(sizes: Sizes) -> str | None:
    """Ranks of a pipeline wait at most a fifth of their time, as PP 2 with four micro-batches on H200s."""
    waits = bubble_of(sizes)
    if waits <= WAITING:
        return None
    return (
        f"{sizes.micro_batches} micro-batches on PP {sizes.pp} x {sizes.vpp} {sizes.schedule}: ranks wait {waits:.0%}"
    )


@advises("L13, L14 (Megatron-Core, pipeline layout)")
def stages_are_even(sizes: Sizes) -> str | None:
    """The fullest stage has at most a tenth more layers than the mean: all others wait for it."""
    fullest, mean = ceil(sizes.model.layers / sizes.stages), sizes.model.layers / sizes.stages
    if sizes.pp == 1 or fullest <= UNEVEN * mean:
        return None
    return f"{sizes.model.layers} layers in {sizes.stages} stages: the fullest has {fullest}, the mean is {mean:.3g}"


@advises("L7 (Megatron Bridge, long context)", "parallel.context=2")
def context_for_long_rows(sizes: Sizes) -> str | None:
    """Rows of 16,384 positions and more are shared by context-parallel ranks: CP 2 to 32,768, then 4 to 8."""
    if sizes.cp > 1 or sizes.sequence_length < LONG_ROW:
        return None
    return f"one context rank holds rows of {sizes.sequence_length} positions"


@advises("M4, M10 (Megatron Bridge, long context)", 'recompute.modules=["norm","expert-activation"]')
def long_rows_attend_once(sizes: Sizes) -> str | None:
    """Attention of rows of 16,384 positions and more is not recomputed.

    Its time grows with the square of the row, and the memory that it saves does not.
    """
    again = [name for name in ("attention", "layer") if name in sizes.recompute]
    if not again or sizes.sequence_length < LONG_ROW:
        return None
    return f"{again[0]} computes scores of {sizes.sequence_length} x {sizes.sequence_length} positions again"


@advises("L18 (Megatron Bridge, recommender, H100)", "parallel.shard=optimizer")
def full_shards_with_tensor(sizes: Sizes) -> str | None:
    """FSDP2 beside TP above 2 has two kinds of traffic in each layer."""
    if sizes.shard != "full" or sizes.tp <= 2:
        return None
    return f"full shards gather beside the sums of TP {sizes.tp}"


@advises("docs/decisions/0013-sharing-the-optimizer.md; layouts-h200x4.json", "parallel.shard=optimizer")
def gathers_once_a_step(sizes: Sizes) -> str | None:
    """With several micro-batches a step, the optimizer is divided and weights stay whole.

    With one, both are equally fast (V2-Lite, EP 4, four H200s), and full shards need 5 GiB less.
    """
    if sizes.shard != "full" or sizes.pp > 1 or sizes.micro_batches < 2:
        return None
    return f"weights are gathered for each of {sizes.micro_batches} micro-batches, and once a step with shard optimizer"


@advises("L10, O3 (Megatron Bridge, communication overlap)")
def experts_over_nodes_want_overlap(sizes: Sizes) -> str | None:
    """Experts on several nodes want work while tokens travel; Megatron gained 17 to 32 % at EP 16."""
    if sizes.overlap != "none" or sizes.is_inside_node(sizes.expert_ranks):
        return None
    return f"EP x ETP {sizes.expert_ranks} crosses nodes of {sizes.node_devices}, and nothing is computed meanwhile"


@advises(
    "O3, O4 (Megatron Bridge, communication overlap); docs/decisions/0018-graphs-and-overlap.md",
    "dispatch.overlap=none",
)
def overlap_if_exposed(sizes: Sizes) -> str | None:
    """Among 4 ranks of a node or fewer, dispatch is too short to pay for cutting work in pieces."""
    near = 1 < sizes.expert_ranks <= FEW_PEERS and sizes.is_inside_node(sizes.expert_ranks)
    if sizes.overlap != "passes" or not near:
        return None
    return f"overlap passes for tokens that stay among {sizes.expert_ranks} ranks of a node"


@advises("docs/dispatch.md (computed)", "dispatch.sync_free=2")
def room_for_the_worst_case(sizes: Sizes) -> str | None:
    """Sync-free stage 3 needs buffers for every token on one rank.

    Stage 2 has buffers for twice the even share and repeats a step that needs more.
    """
    model, ranks = sizes.model, sizes.expert_ranks
    if sizes.sync_free < 3 or ranks == 1 or not model.experts:
        return None
    times = ranks * min(model.top_k, max(1, model.experts // sizes.ep)) / (model.top_k * sizes.etp)
    return f"stage 3 has room for {times:.3g} times the even share of rows"


@advises("R10 (Megatron Bridge, performance guide)", "parallel.reduce=fp32")
def sums_over_many_in_fp32(sizes: Sizes) -> str | None:
    """Gradients of 128 ranks and more are summed in float32."""
    ranks = sizes.dp * sizes.cp
    if sizes.reduce != "bf16" or ranks < MANY_COPIES:
        return None
    return f"gradients of {ranks} ranks are summed in bfloat16"


@advises("R11 (Megatron-Core, MoE guide); docs/layouts.md", "model.moe.balance.force_load_balance=false")
def natural_routing(sizes: Sizes) -> str | None:
    """Forced balance is for benchmarks.

    Memory and speed of a real run depend on its own routing, where the fullest expert had ten times its share
    (V2-Lite, first steps).
    """
    return "tokens are spread evenly by force: nothing is learned about routing" if sizes.model.forces_balance else None


@advises("M13 (Megatron Bridge, CPU offloading)", "offload.optimizer=false")
def optimizer_on_the_device(sizes: Sizes) -> str | None:
    """The optimizer leaves the device only if nothing else makes the run fit.

    With a quarter of it on the host a step took 1.9 times as long over PCIe.
    """
    return "the optimizer's state passes through the host's link in each step" if sizes.offloads_optimizer else None


ADVICE = tuple(value for value in list(vars().values()) if isinstance(value, Rule))
"""In the order in which they are told."""


def _kernels_never_wait(sizes: Sizes) -> str | None:
    limit = sizes.model.most_sync_free
    if sizes.sync_free <= limit:
        return None
    return f"the kernels for this device and precision read counts on the host, and stage {sizes.sync_free} allows none"


def rule_name(function: Callable[..., object]) -> str:
    """The name of a rule of the config, as plans print it."""
    return function.__name__.strip("_").replace("_", "-")


def reason_of(problem: Problem | None) -> str | None:
    """A problem in one line."""
    if problem is None:
        return None
    return f"{problem.field} {problem.what}{'' if problem.got is None else f'; got {problem.got}'}"


def _rule(function: Callable[..., object], check: Check, source: str) -> Rule:
    doc, by = rule_text(function), f"{function.__module__}.{function.__name__}"
    return Rule(name=rule_name(function), kind="legal", doc=doc, source=source, check=check, by=by)


def _by_config(rule: Callable[[LayoutSizes], Problem | None], source: str) -> Rule:
    return _rule(rule, lambda sizes: reason_of(rule(sizes)), source)


def _by_ranks(rule: Callable[[LayoutSizes, int], Problem | None], source: str) -> Rule:
    return _rule(rule, lambda sizes: reason_of(rule(sizes, sizes.world)), source)


LEGAL: tuple[Rule, ...] = (
    _by_ranks(fit.sizes_divide_the_ranks, "L1, L2"),
    _by_ranks(fit.micro_batches_are_whole, "our step"),
    _by_ranks(fit.schedule_has_its_micro_batches, "our schedules"),
    _by_config(layout_rules.experts_have_ranks_only_if_there_are_any, "L3"),
    _by_config(layout_rules.expert_ranks_divide_experts, "L3"),
    _by_config(layout_rules.expert_tensor_ranks_divide_an_expert, "our layout"),
    _by_config(layout_rules.tensor_ranks_divide_heads, "L4"),
    _by_config(layout_rules.indexer_has_rows_and_heads_of_its_own, "our layout"),
    _by_config(layout_rules.ranks_divide_linear_heads, "our layout"),
    _by_config(layout_rules.tensor_ranks_divide_widths, "our layout"),
    _by_config(layout_rules.tensor_ranks_divide_the_vocabulary, "our layout"),
    _by_config(layout_rules.ranks_divide_the_sequence, "L6"),
    _by_config(layout_rules.ulysses_divides_heads, "L6"),
    _by_config(layout_rules.schedule_has_its_stages, "our schedules"),
    _by_config(layout_rules.pipeline_has_enough_layers, "L13"),
    _by_config(layout_rules.gathered_weights_meet_whole_backwards, "our FSDP2"),
    _by_config(layout_rules.recomputed_modules_exist, "M7"),
    _by_config(dispatcher.sent_rows_are_counted_by_the_host, "G3, our dispatchers"),
    Rule(
        name=rule_name(_kernels_never_wait),
        kind="legal",
        doc="From `dispatch.sync_free` 2 on (1 for the permutation) kernels never read counts on the host, as kernels "
        "of the reference do; on a GPU only these exist for experts in float32.",
        source="our kernels",
        check=_kernels_never_wait,
        by="penstock.models.kernels.kernel_choices",  # which imports PyTorch
    ),
    _by_config(dispatcher.padded_rows_are_sent, "R7"),
    _by_config(dispatcher.tokens_travel_to_experts, "O1"),
    _by_config(dispatcher.travels_happen_once, "O1, M7"),
    _by_config(dispatcher.pieces_have_their_weights, "our overlap"),
    _by_config(dispatcher.passes_stand_beside_each_other, "O1"),
    _by_config(graph_rules.captured_passes_are_not_cut_into_stages, "our graphs"),
)
"""In the order in which they are asked: the rules that refuse most come first."""


RULES: tuple[Rule, ...] = (*LEGAL, *ADVICE)  # every rule of a plan


def illegal(sizes: Sizes) -> tuple[Rule, str] | None:
    """The first legal rule that a layout breaks, with its reason, or None. Sizes need not divide."""
    for rule in LEGAL:
        if (reason := rule.check(sizes)) is not None:
            return rule, reason
    return None


def advice(sizes: Sizes) -> list[tuple[Rule, str]]:
    """Advice about a layout that can run."""
    return [(rule, reason) for rule in ADVICE if (reason := rule.check(sizes)) is not None]


def config_refusal(run: Run, world: int) -> tuple[str, str] | None:
    """Name and reason of the first rule of the config that a run breaks on `world` ranks, or None."""
    for rule in CONFIG_RULES:
        if (problem := rule(run)) is not None:
            error = ConfigError(
                f"{problem.field} {problem.what}", got=problem.got, allowed=problem.allowed, fix=problem.fix
            )
            return rule_name(rule), str(error)
    try:
        grid_of(run, world)
    except ConfigError as error:
        return "ranks-fit-the-run", str(error)
    return None
