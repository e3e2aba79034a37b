"""A model with everything that an optimizer and a checkpoint must get right, in a few hundred parameters."""

import torch
from torch import Tensor, nn

from penstock.config.run import Optimizer
from penstock.parallel.axes import Axis
from penstock.parallel.shard import ParamShard

SETTINGS = Optimizer(learning_rate=1e-2, weight_decay=0.1)

V, D, F = 11, 8, 16  # vocabulary, width, hidden width


class SmallModel(nn.Module):
    """Embedding, norm, biases, a float32 router among bfloat16, dropout, buffers, and a parameter that nothing uses."""

    counts_F: Tensor

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(V, D)
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, F)
        self.unused = nn.Linear(D, F)
        self.down = nn.Linear(F, V, bias=False)
        self.to(dtype)
        self.router = nn.Linear(D, F, bias=False, dtype=torch.float32)
        self.register_buffer("counts_F", torch.zeros(F, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)  # not saved

    def forward(self, tokens_T: Tensor) -> Tensor:
        x_TD = self.norm(self.embed(tokens_T))
        gate_TF = self.router(x_TD.float()).sigmoid()
        self.counts_F += (gate_TF > 0.5).sum(0)  # a buffer that changes, as the expert bias does
        hidden_TF = nn.functional.dropout(nn.functional.gelu(self.up(x_TD)), 0.2, self.training)
        logits_TV = self.down(hidden_TF * gate_TF.to(x_TD.dtype))
        return nn.functional.cross_entropy(logits_TV.float(), tokens_T)


def tokens(seed: int, count: int = 24) -> Tensor:
    return torch.randint(V, (count,), generator=torch.Generator().manual_seed(seed))


def holdings_of(module: nn.Module) -> list[ParamShard]:
    """The trained parameters of a module that one rank holds whole; a tied parameter comes once."""
    data = Axis(name="data")
    return [
        ParamShard(name=name, parameter=parameter, shape=tuple(parameter.shape), cuts=(), data=data)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
