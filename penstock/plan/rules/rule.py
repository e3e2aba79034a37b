"""A rule, and the sizes that it reads: a layout, its cluster and its model as plain numbers.

A search looks at tens of thousands of layouts within seconds, so a rule reads a frozen `Sizes` and needs neither a
`Run` nor PyTorch. All layouts of a search share their `ModelFacts`; `sizes_of` makes those of one run. Kinds of rules:

    legal    the run would be refused when it is loaded or started; `by` names the function that refuses it
    advice   what guides of the field say against a layout; the times of the projection decide

A reason is one line with the numbers of the case. None means that the rule does not apply to these sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from penstock.config.dispatcher import STAGES, choose_dispatcher, dispatch_facts, ranks_on_a_node
from penstock.config.fit import LayoutSizes, ModelSizes, layout_sizes, model_sizes
from penstock.config.run import Run
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
