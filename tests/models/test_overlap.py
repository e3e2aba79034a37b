"""A model whose tokens travel beside what it computes gives what it gives without, and does both where it should."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from penstock.config.model import Balance, Moe
from penstock.config.parallel import Dispatch, Overlap
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.models.build import meta_model
from penstock.models.decoder import Decoder
from penstock.models.init import initialize
from penstock.moe.dispatch.contract import ExpertRows
from penstock.moe.layer import MoE
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import RecomputeRule
from tests.closeness import assert_close
from tests.models.families import reading_of, tiny_model
from tests.parallel.alive import Alive
from tests.parallel.recorded import Recorded, mirrored

ROWS, POSITIONS = 4, 12
LAYERS = 2
"""With experts; a dense one stands before them."""

FINE = ("norm", "latent-up", "attention", "expert-activation", "shared-expert", "dense")


def _model(layer_context: LayerContext) -> Decoder:
    plain = tiny_model(mtp_layers=1)
    assert isinstance(plain.moe, Moe)
    balance = Balance(aux_loss="sequence", aux_loss_coef=0.1, z_loss_coef=0.01)
    config = plain.model_copy(update={"moe": plain.moe.model_copy(update={"balance": balance})})
    decoder = meta_model(config, layer_context)
    decoder.to_empty(device="cpu")
    initialize(decoder, 3, 0.2)
    return decoder.train()


def _layer_context(overlap: Overlap, kinds: tuple[str, ...] = ()) -> tuple[LayerContext, Recorded]:
    transfers = Recorded()
    rule = RecomputeRule(kinds=frozenset(kinds))
    travelling = None if overlap == "none" else transfers
    return LayerContext(dispatch=Dispatch(overlap=overlap), transfers=travelling, recompute=rule), transfers


def _loss(decoder: Decoder) -> Tensor:
    tokens_BS = torch.randint(61, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(0))
    reading = reading_of(tokens_BS, torch.arange(POSITIONS).expand(ROWS, -1), depths=1)
    hidden = decoder(reading)
    return hidden.main_BSD.sin().sum() + sum(one_BSD.cos().sum() for one_BSD in hidden.mtp)


def _trained(decoder: Decoder) -> dict[str, Tensor]:
    """Loss, gradients, and what was counted on the way."""
    loss = _loss(decoder)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in decoder.named_parameters() if not name.startswith("head")}
    counted = {name: buffer for name, buffer in decoder.named_buffers() if ".meter." in name}
    assert all(gradient is not None for gradient in gradients.values()), "every parameter takes part"
    return {"loss": loss.detach(), **gradients, **counted}


@pytest.mark.parametrize("kinds", [(), FINE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("overlap", ["shared", "halves", "passes"])
def test_every_overlap_gives_the_loss_the_gradients_and_the_counts_of_none(
    overlap: Overlap, kinds: tuple[str, ...]
) -> None:
    expected = _trained(_model(_layer_context("none")[0]))
    found = _trained(_model(_layer_context(overlap, kinds)[0]))
    for name, value in expected.items():
        assert_close(found[name], value, tolerance=1e-4, what=name)


class _Marked(nn.Module):
    """The shared expert, whose halves are written down."""

    def __init__(self, inner: nn.Module, transfers: Recorded) -> None:
        super().__init__()
        self.inner, self.transfers = inner, transfers

    def widen(self, x_TD: Tensor, ready: RowColQuantized | None = None) -> Tensor:
        return self.transfers.mark("widen", self.inner.widen(x_TD, ready))

    def narrow(self, h_TF: Tensor) -> Tensor:
        return self.transfers.mark("narrow", self.inner.narrow(h_TF))


class _MarkedExperts(nn.Module):
    is_one_function = False

    def __init__(self, inner: nn.Module, transfers: Recorded) -> None:
        super().__init__()
        self.inner, self.transfers = inner, transfers

    def forward(self, rows: ExpertRows) -> Tensor:
        return self.transfers.mark("experts", self.inner(rows))


def _mark(decoder: Decoder, transfers: Recorded) -> None:
    for layer in decoder.modules():
        if isinstance(layer, MoE):
            assert isinstance(layer.shared, nn.Module)
            layer.shared = _Marked(layer.shared, transfers)
            layer.experts = _MarkedExperts(layer.experts, transfers)  # type: ignore[assignment]


def test_the_shared_expert_runs_beside_both_transfers_in_both_directions() -> None:
    layer_context, transfers = _layer_context("shared")
    decoder = _model(layer_context)
    _mark(decoder, transfers)
    loss = _loss(decoder)
    travelled = list(transfers.events)
    transfers.events.clear()
    dispatch, combine = (["dispatch 0 leaves", "widen", "dispatch 0 arrives"], ["combine 1 leaves", "narrow"])
    assert travelled[:7] == [*dispatch, "experts", *combine, "combine 1 arrives"]
    loss.backward()
    combine_back = ["combine 1 back leaves", "narrow back", "combine 1 back arrives"]
    dispatch_back = ["dispatch 0 back leaves", "widen back", "dispatch 0 back arrives"]
    assert transfers.events[-7:] == [*combine_back, "experts back", *dispatch_back]


def test_each_half_computes_while_the_other_travels_in_both_directions() -> None:
    layer_context, transfers = _layer_context("halves")
    decoder = _model(layer_context)
    loss = _loss(decoder)
    # Transfers of one half are even, of the other odd; a layer has four.
    forward = []
    for first in range(0, 4 * LAYERS, 4):
        forward += [f"combine {first - 2} arrives"] if first else []
        forward += [f"dispatch {first} leaves"]
        forward += [f"combine {first - 1} arrives"] if first else []
        forward += [f"dispatch {first + 1} leaves", f"dispatch {first} arrives", f"combine {first + 2} leaves"]
        forward += [f"dispatch {first + 1} arrives", f"combine {first + 3} leaves"]
    assert transfers.events[: len(forward)] == forward
    travelled, transfers.events = transfers.events, []
    loss.backward()
    assert transfers.events == mirrored(travelled)


def test_an_evaluation_is_not_divided() -> None:
    layer_context, transfers = _layer_context("halves")
    with torch.no_grad():
        _loss(_model(layer_context).eval())
    assert transfers.launched == 2 * (LAYERS + 1), "a dispatch and a combine for each layer and for the prediction"


def test_halves_free_what_is_recomputed_as_a_whole_micro_batch_does() -> None:
    def kept(overlap: Overlap, kinds: tuple[str, ...]) -> int:
        decoder = _model(_layer_context(overlap, kinds)[0])
        with Alive() as alive:
            loss = _loss(decoder)
            size = alive.bytes()
        loss.backward()
        return size

    for kind in ("norm", "shared-expert", "expert-activation"):
        freed = [kept(overlap, ()) - kept(overlap, (kind,)) for overlap in ("none", "halves")]
        assert freed[1] >= 0.95 * freed[0] > 0, kind


def test_halves_of_a_reading_are_its_rows_in_order_with_half_the_share() -> None:
    tokens_BS = torch.arange(ROWS * POSITIONS).view(ROWS, POSITIONS)
    documents_BS = torch.zeros_like(tokens_BS)
    reading = replace(reading_of(tokens_BS, tokens_BS, documents_BS, depths=2), share=0.5)
    one, other = reading.halves()
    assert one.share == other.share == 0.25
    for name in ("tokens_BS", "positions_BS", "documents_BS"):
        assert torch.equal(torch.cat((vars(one)[name], vars(other)[name])), vars(reading)[name])
    for depth, ahead_BS in enumerate(reading.ahead):
        assert torch.equal(torch.cat((one.ahead[depth], other.ahead[depth])), ahead_BS)
    with pytest.raises(AssertionError, match="no halves"):
        one.halves()[0].halves()
