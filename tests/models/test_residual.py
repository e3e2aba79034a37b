"""Hyper-connections beside `transformers`' module, and what they keep for backward."""

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from penstock.config.model import HyperConnections
from penstock.models.residual import Connection, StreamMixer
from tests.closeness import assert_close
from tests.float64 import EXACT, in_float64
from tests.parallel.alive import Alive

HIDDEN, ROWS, POSITIONS = 12, 2, 5
CONFIG = HyperConnections(streams=3, sinkhorn_iters=4, epsilon=1e-3)


def the_streams(*, only_reads: bool = False) -> StreamMixer:
    streams = StreamMixer(CONFIG, HIDDEN, rms_epsilon=1e-5, only_reads=only_reads)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in streams.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return streams


def hyper_connection(streams: StreamMixer) -> DeepseekV4HyperConnection | DeepseekV4HyperHead:
    """The module of `transformers` with the same parameters."""
    config = DeepseekV4Config(
        hc_mult=streams.streams,
        hidden_size=streams.weight.shape[1] // streams.streams,
        hc_sinkhorn_iters=streams.sinkhorn_iters,
        hc_eps=streams.epsilon,
        rms_norm_eps=streams.rms_epsilon,
    )
    is_head = len(streams.widths) == 1
    theirs = (DeepseekV4HyperHead if is_head else DeepseekV4HyperConnection)(config)
    for ours, name in (("weight", "fn"), ("bias", "base"), ("scale", "scale")):
        setattr(theirs, f"hc_{name}" if is_head else name, streams.get_parameter(ours))
    return theirs


def an_input(width: int) -> Tensor:
    return torch.randn(ROWS, POSITIONS, width, generator=torch.Generator().manual_seed(2)).requires_grad_()


def assert_equal_gradients(module: nn.Module, inputs: list[Tensor], outputs: tuple[Tensor, Tensor]) -> None:
    wanted = [*inputs, *module.parameters()]
    weights = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(3))
    found, expected = (
        [output, *torch.autograd.grad((output * weights).sum(), wanted, retain_graph=True)] for output in outputs
    )
    assert_close(found, expected, tolerance=EXACT)


def test_streams_around_a_network_are_those_of_transformers() -> None:
    with in_float64():
        streams, x_BSD, outer_BSD = the_streams(), an_input(3 * HIDDEN), an_input(HIDDEN)
        one_BSD, weights = streams(x_BSD)
        ours = Connection(x_BSD, *weights).joined(one_BSD.sin() * outer_BSD)
        x_BSAD = x_BSD.unflatten(-1, (3, -1))
        post, comb, one_BSD = hyper_connection(streams)(x_BSAD)
        theirs = post[..., None] * (one_BSD.sin() * outer_BSD)[..., None, :] + comb.mT @ x_BSAD
        assert_equal_gradients(streams, [x_BSD, outer_BSD], (ours, theirs.flatten(-2)))


def test_streams_become_one_as_in_transformers() -> None:
    with in_float64():
        streams, x_BSD = the_streams(only_reads=True), an_input(3 * HIDDEN)
        theirs = hyper_connection(streams)(x_BSD.unflatten(-1, (3, -1)))
        assert_equal_gradients(streams, [x_BSD], (streams(x_BSD)[0], theirs))


def test_steps_that_balance_are_not_kept() -> None:
    def kept(iterations: int) -> int:
        streams = StreamMixer(CONFIG.model_copy(update={"sinkhorn_iters": iterations}), HIDDEN, rms_epsilon=1e-5)
        with Alive() as alive:
            _, weights = streams(an_input(3 * HIDDEN))
            size = alive.bytes()
        assert weights[-1].requires_grad
        return size

    assert kept(30) == kept(1)
