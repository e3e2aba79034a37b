"""Initial weights. Every tensor is drawn from a generator of its own, seeded by the run's seed and the tensor's name.

So a weight does not depend on how many layers, stages or ranks stand before it: any layout starts from the same model.
Experts are drawn one by one for the same reason: a rank that holds some of them draws only those.
"""

import hashlib

import torch
from torch import Tensor, nn

from penstock.models.norm import RMSNorm
from penstock.moe.experts import Experts


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


def _draw(parameter: Tensor, name: str, seed: int, std: float) -> None:
    """Normal in float32, then rounded, so that bf16 and float32 models start from the same numbers."""
    generator = _generator(seed, name, parameter.device)
    values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    parameter.copy_(values.normal_(0.0, std, generator=generator))


@torch.no_grad()
def initialize(model: nn.Module, seed: int, std: float) -> None:
    """Fill all parameters: norms with one, everything else with normal values. Buffers become zero.

    Args:
        model: on a real device, contents undefined.
        seed: of the run.
        std: standard deviation.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{path}.{name}"
            if isinstance(module, RMSNorm):
                parameter.fill_(1.0)
            elif isinstance(module, Experts):
                for expert, matrix in enumerate(parameter):
                    _draw(matrix, f"{full_name}.{expert}", seed, std)
            else:
                _draw(parameter, full_name, seed, std)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()
