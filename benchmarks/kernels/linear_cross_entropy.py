"""Output projection and loss, forward and backward: ours beside full logits (eager and compiled) and Liger.

    python -m benchmarks.kernels.linear_cross_entropy --output linear_cross_entropy.json

Every candidate takes bfloat16 hidden states and head and gives the mean loss and bfloat16 gradients. Peak memory is
what a step allocates beyond its inputs, gradients included. Liger is left out where it is not installed. Ours is also
timed with products in 8 bits (`float8.head`), by the recipe blockwise-square.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.measure import passes_in_turns
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import BLOCKWISE_SQUARE
from penstock.kernels.float8.triton_operators import WITH_TORCH
from penstock.kernels.linear_cross_entropy import linear_cross_entropy
from penstock.kernels.reference import IGNORED_LABEL

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

IN_8_BITS = Float8Rule(head=BLOCKWISE_SQUARE, operators=WITH_TORCH)
COMPILED = "torch.compile, full logits"


def main() -> None:
    rounds = (20, "timed steps of each candidate")
    options = record.parser(__doc__, tokens=8192, hidden=2048, vocabulary=102_400, rounds=rounds).parse_args()
    torch.manual_seed(0)
    x_TD = torch.randn(options.tokens, options.hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    head_VD = torch.randn(options.vocabulary, options.hidden, device="cuda", dtype=torch.bfloat16)
    head_VD = (head_VD / options.hidden**0.5).requires_grad_()
    labels_T = torch.randint(options.vocabulary, (options.tokens,), device="cuda")
    losses = candidates(torch.zeros_like(head_VD, dtype=torch.float32))
    ways = {name: partial(loss, x_TD, head_VD, labels_T) for name, loss in losses.items()}
    measured = passes_in_turns(ways, (x_TD, head_VD), torch.ones((), device="cuda"), options.rounds)
    for name, row in measured.items():
        row["loss"] = ways[name]().item()
        row["tflops"] = 6 * x_TD.shape[0] * head_VD.numel() / row["ms"] / 1e9
        row["time_of_compiled"] = row["ms"] / measured[COMPILED]["ms"]
        record.show({"candidate": name, **row})
    shape = {"tokens": options.tokens, "hidden": options.hidden, "vocabulary": options.vocabulary}
    record.write(options, {"shape": shape, "candidates": measured}, triton=triton.__version__)


def full_logits(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
    """What a model does without loss fusion; the cross entropy in float32."""
    return F.cross_entropy((x_TD @ head_VD.T).float(), labels_T, ignore_index=IGNORED_LABEL)


def full_bfloat16_logits(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
    """The same with the cross entropy's tensors in bfloat16."""
    return F.cross_entropy(x_TD @ head_VD.T, labels_T, ignore_index=IGNORED_LABEL).float()


def ours(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, **options: Any) -> Tensor:
    """The sum over the counted tokens, divided by a number that only the device knows, as in training."""
    return linear_cross_entropy(x_TD, head_VD, labels_T, **options) / (labels_T != IGNORED_LABEL).sum()


def liger(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, accumulate: torch.dtype | None, growth: int) -> Tensor:
    """Liger's own operator; its arguments are positional."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    # bias, weights of words, ignored label, z-loss, smoothing, reduction, soft cap, return z-loss
    leading = (None, None, IGNORED_LABEL, 0.0, 0.0, "mean", None, False)
    # scale by token, return accuracy, return predictions, implementation, mode
    trailing = (False, False, False, None, None)
    options = (*leading, accumulate, *trailing, growth)
    return LigerFusedLinearCrossEntropyFunction.apply(x_TD, head_VD, labels_T, *options)[0]


def candidates(main_gradient_VD: Tensor) -> dict[str, Loss]:
    """Everything that is compared, by name."""
    rivals: dict[str, Loss] = {
        "full logits, float32": full_logits,
        "full logits, bfloat16": full_bfloat16_logits,
        COMPILED: torch.compile(full_logits),
        "ours": ours,
        "ours, into a float32 main gradient": partial(ours, accumulate_into=main_gradient_VD),
        "ours, chunks of 2048": partial(ours, chunk_tokens=2048),
        "ours, chunks of 1024": partial(ours, chunk_tokens=1024),
    }
    for tokens in (2048, 4096, 8192):
        rivals[f"ours, 8 bits, chunks of {tokens}"] = partial(ours, chunk_tokens=tokens, float8=IN_8_BITS)
    if find_spec("liger_kernel"):
        # 256 tokens are its own choice at the default shape; it takes more in proportion to `growth`.
        for growth, tokens in ((1, 256), (16, 2048), (32, 4096), (64, 8192)):
            rivals[f"Liger, chunks of {tokens}"] = partial(liger, accumulate=None, growth=growth)
            rivals[f"Liger, chunks of {tokens}, float32 sum"] = partial(liger, accumulate=torch.float32, growth=growth)
    return rivals


if __name__ == "__main__":
    main()
