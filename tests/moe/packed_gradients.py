"""A layer whose ranks push gradients of the experts' outputs, in 8 bits or as they are; simulated ranks or GPUs."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock.config.model import Balance, Moe
from penstock.config.model import Router as RouterRule
from penstock.config.parallel import Dispatch
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.recipes import BLOCKWISE
from penstock.layout.grid import Grid
from penstock.moe.dispatch.build import make_dispatcher
from penstock.moe.dispatch.contract import Dispatcher, DispatchMetadata, ExpertRows
from penstock.moe.experts import GroupedExperts
from penstock.moe.layer import MoE
from penstock.moe.router import TopKRouter
from penstock.moe.routing import Routing, Scope
from penstock.parallel.async_transfer import TransferStream
from penstock.parallel.axes import ALONE, Axes, Axis
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import RecomputeRule
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers

D, F, EXPERTS, RANKS = 256, 128, 4, 2

MOE = Moe(
    experts=EXPERTS,
    top_k=2,
    moe_intermediate_size=F,
    shared_expert_intermediate_size=0,
    router=RouterRule(scoring_func="softmax", norm_topk_prob=True, expert_bias=False),
    balance=Balance(aux_loss="none", aux_loss_coef=0.0),
)
READ = Float8Rule(dispatch=BLOCKWISE, experts=BLOCKWISE)


@dataclass(frozen=True)
class InSixteen:
    """A dispatcher whose gradients travel as they are."""

    inner: Dispatcher

    def dispatch(self, x_TD: Tensor, routing: Routing) -> tuple[ExpertRows, DispatchMetadata]:
        rows, metadata = self.inner.dispatch(x_TD, routing)
        return replace(rows, gradients=None), metadata

    def combine(self, y_RD: Tensor, metadata: DispatchMetadata) -> Tensor:
        return self.inner.combine(y_RD, metadata)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a layer runs.

    Attributes:
        rule: what is in 8 bits.
        in_sixteen: gradients travel as they are.
        recompute: parts that are computed again.
        leaves: transfers leave beside other work.
        bound: of the room; 0 has the host read how many rows there are.
        passes: backward passes over the one graph.
    """

    rule: Float8Rule = READ
    tokens: int = 12
    dtype: torch.dtype = torch.float32
    bias: bool = False
    in_sixteen: bool = False
    recompute: tuple[str, ...] = ()
    leaves: bool = False
    bound: float = 0
    passes: int = 1

    @property
    def sizes(self) -> BufferSizes:
        width = D * self.dtype.itemsize
        return BufferSizes(tokens=self.tokens // RANKS, top_k=MOE.top_k, row_bytes=width, ranks=RANKS)


def axes_of(rank: int) -> Axes:
    """Of ranks that share nothing but experts, and those through memory."""
    expert = Axis(name="expert", ranks=tuple(range(RANKS)), rank=rank)
    grid = Grid(world=RANKS, expert=RANKS)
    return Axes(grid=grid, rank=rank, expert=expert, expert_node=replace(expert, name="expert_node"))


def layer_of(case: Case, buffers: SymmetricBuffers | None, device: torch.device) -> MoE:
    """A rank's, with the numbers that the experts of one rank alone have."""
    layer_context = LayerContext(
        axes=ALONE if buffers is None else axes_of(buffers.peers.rank),
        float8=case.rule,
        dispatch=Dispatch(sync_free=2, row_capacity_factor=case.bound) if case.bound else Dispatch(),
        buffers=buffers,
        recompute=RecomputeRule(kinds=frozenset(case.recompute)),
        transfers=TransferStream(device) if case.leaves else None,
    )
    dispatcher, row_capacity = make_dispatcher(MOE, layer_context)
    experts = GroupedExperts(EXPERTS, D, F, layer_context, bias=case.bias)
    layer = MoE(TopKRouter(MOE, D, 0, layer_context.operators), dispatcher, experts, None, layer_context, row_capacity)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in layer.named_parameters():
        is_experts = name.startswith("experts")
        whole = torch.empty(EXPERTS, *parameter.shape[1:]) if is_experts else torch.empty(parameter.shape)
        nn.init.normal_(whole, std=whole.shape[-1] ** -0.5, generator=generator)
        parameter.data = (
            whole.chunk(layer_context.axes.expert.size)[layer_context.axes.expert.rank] if is_experts else whole
        )
    if case.in_sixteen:
        layer.dispatcher = InSixteen(layer.dispatcher)
    layer.experts.to(case.dtype)
    return layer.to(device)


def drawn(case: Case, seed: int) -> Tensor:
    """Tokens, or the gradients of their outputs, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes_T1 = torch.randn(case.tokens, 1, generator=generator).exp()
    return (torch.randn(case.tokens, D, generator=generator) * sizes_T1).to(case.dtype)


def results_of(buffers: SymmetricBuffers | None, case: Case, device: torch.device) -> dict[str, Tensor]:
    """Output of a rank, and the gradients of all passes together."""
    place, ranks = (0, 1) if buffers is None else (buffers.peers.rank, RANKS)
    layer = layer_of(case, buffers, device)
    x_TD, dy_TD = (drawn(case, seed).chunk(ranks)[place].to(device) for seed in range(2))
    (y_TD,) = layer.layer_context.run("moe", layer, x_TD.requires_grad_(), Scope(), None)
    for left in reversed(range(case.passes)):
        y_TD.backward(dy_TD, retain_graph=left > 0)
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y_TD.detach(), "x": x_TD.grad, **gradients}
