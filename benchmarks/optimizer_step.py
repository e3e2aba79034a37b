"""The optimizer's update and the embedding's backward on one GPU, against a large copy and against PyTorch's operators.

    python -m benchmarks.optimizer_step --output benchmarks/results/optimizer-step.json

The parameters are those of one MoE layer of DeepSeek-V2-Lite in bfloat16. `torch` is PyTorch's fused AdamW on float32
masters, with a copy into the weights and zeroing of the gradients behind it. Bytes are those that must move: gradients
and state are read and written once, weights too, or only written where a float32 master is read. First each format is
compared with PyTorch's update of float32 state.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.kernels import measure
from penstock.config.run import Optimizer
from penstock.kernels import reference
from penstock.kernels.adamw import APART, AdamWLaunch, scalars_of
from penstock.kernels.permute import add_runs
from penstock.kernels.tuning import KernelLaunch
from penstock.train.adamw import FusedAdamW

SHAPES = {
    "experts.gate_up": (64, 2 * 1408, 2048),
    "experts.down": (64, 2048, 1408),
    "shared.gate_up": (2 * 2816, 2048),
    "shared.down": (2048, 2816),
    "attention.query": (16 * 192, 2048),
    "attention.output": (2048, 2048),
    "norm.weight": (2048,),
}
FORMATS = [(moments, splits) for moments in ("fp32", "bf16", "int8") for splits in (False, True)]
LAUNCHES = ((4, 4), (8, 4), (16, 4), (32, 8))
"""Blocks of 128 values of a tile, and warps."""


def main() -> None:
    options = record.parser(__doc__).parse_args()
    torch.manual_seed(0)
    copy = measure.copy_bandwidth()
    rows = [_update_row(moments, splits, copy) for moments, splits in FORMATS]
    numbers = {"copy_bytes_per_s": copy, "updates": rows, "torch_us": _torch_us(), "embedding": _embedding_row()}
    record.show(numbers)
    record.write(options, numbers)


def timed(call: Callable[[], object], times: int = 10) -> float:
    """Median microseconds of a call."""
    for _ in range(3):
        call()
    return 1e3 * median(measure.timed(call, busy=False)[0] for _ in range(times))


def _drawn() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and gradients."""
    values = {name: (0.02 * torch.randn(shape, device="cuda")).bfloat16() for name, shape in SHAPES.items()}
    return values, {name: 1e-3 * torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}


def _settings(moments: str, splits: bool) -> Optimizer:
    return Optimizer.model_validate({"learning_rate": 1e-3, "moment_dtype": moments, "store_param_remainders": splits})


def _update_row(moments: str, splits: bool, copy: float) -> dict[str, Any]:
    values, gradients = _drawn()
    settings = _settings(moments, splits)
    optimizer = FusedAdamW(values, gradients, settings)
    error = _error(optimizer, values, gradients, settings)
    us = timed(lambda: optimizer.update(1e-3, 1.5))
    tensors = list(optimizer.tensors.values())
    changed = sum(part.nbytes for tensor in tensors for part in (tensor.gradient, *tensor.state))
    weights = sum(tensor.value.nbytes * (1 if tensor.masters == APART else 2) for tensor in tensors)
    row: dict[str, Any] = {"moments": moments, "remainders": splits, "us": us, "bytes": 2 * changed + weights}
    row |= {"share_of_copy": row["bytes"] / us * 1e6 / copy, "error": error, "launches": {}}
    matrices = [tensor for tensor in tensors if tensor.value.ndim > 1]
    scalars = scalars_of(9, learning_rate=1e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, divisor=1.5)
    for blocks, warps in LAUNCHES:
        launch = AdamWLaunch(matrices, launch=KernelLaunch(block_rows=blocks, block_columns=128, warps=warps))
        row["launches"][f"{blocks} blocks, {warps} warps"] = timed(lambda launch=launch: launch.run(scalars), 5)
    record.show(row)
    return row


def _error(
    optimizer: FusedAdamW, values: dict[str, Tensor], gradients: dict[str, Tensor], settings: Optimizer
) -> float:
    """Norm of the difference of three updates from PyTorch's in float32, over the norm of those."""
    name = "attention.query"
    start = values[name].float()
    weight = torch.nn.Parameter(start.clone())
    theirs = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for number in range(3):
        for gradient in gradients.values():
            gradient.normal_(generator=torch.Generator("cuda").manual_seed(number))
        weight.grad = gradients[name] / 1.5
        optimizer.update(settings.learning_rate, 1.5)
        theirs.step()
        assert not any(bool(gradient.any()) for gradient in gradients.values()), "gradients are not zero"
    moved = weight.detach() - start
    # The weight is rounded to bfloat16, whose half step bounds this error.
    return float((values[name].float() - weight.detach()).norm() / moved.norm())


def _torch_us() -> float:
    values, gradients = _drawn()
    masters = {name: torch.nn.Parameter(value.float()) for name, value in values.items()}
    for name, master in masters.items():
        master.grad = gradients[name]
    optimizer = torch.optim.AdamW(list(masters.values()), lr=1e-3, fused=True)

    @torch.no_grad()
    def update() -> None:
        optimizer.step()
        torch._foreach_copy_(list(values.values()), [masters[name] for name in values])
        torch._foreach_zero_(list(gradients.values()))

    return timed(update)


def _embedding_row() -> dict[str, Any]:
    """Tokens like those of a text: the most frequent id has a twentieth of them."""
    vocabulary, width, count = 102_400, 2048, 16_384
    ranks = torch.arange(1, vocabulary + 1, device="cuda").double()
    tokens = torch.multinomial(1 / (ranks + 1), count, replacement=True)
    drows = torch.randn(count, width, device="cuda").bfloat16()
    ours, theirs = (torch.zeros(vocabulary, width, device="cuda") for _ in range(2))
    add_runs(ours, tokens, drows)
    reference.add_token_rows(theirs, tokens, drows)
    error = float((ours - theirs).norm() / theirs.norm())
    again = torch.zeros_like(ours)
    add_runs(again, tokens, drows)
    assert torch.equal(again, ours), "sums differ from call to call"
    return {
        "tokens": count,
        "ids": int(tokens.unique().numel()),
        "most_frequent": int(tokens.bincount().max()),
        "error": error,
        "us": timed(lambda: add_runs(ours, tokens, drows)),
        "index_put_us": timed(lambda: reference.add_token_rows(theirs, tokens, drows)),
    }


if __name__ == "__main__":
    main()
