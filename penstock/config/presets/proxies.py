"""MoE-515B, MoE-1T and MoE-2T: AMD's proxy models for plans and measurements, with grouped-query attention.

Source: AMD's blog "MoE Training Best Practices on AMD GPUs" (December 2025). The three differ in their experts only.
The active sizes that are advertised (44 B, 44 B, 80 B) leave out the query and output projections; the docstrings
count all parameters that a token meets, embedding and output projection included. No learning rate or batch was
published: they are similar to DeepSeek-V3's.
"""

from penstock.config.model import Balance, GroupedQueryAttention, Model, Moe, Rope, Router
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


def _proxy(name: str, *, experts: int, top_k: int) -> Run:
    model = Model(
        family="plain",
        vocab_size=102400,
        hidden_size=8192,
        layers=96,
        attention=GroupedQueryAttention(heads=64, kv_heads=8, head_dim=128, rope=Rope(theta=10000.0)),
        moe=Moe(
            experts=experts,
            top_k=top_k,
            moe_intermediate_size=1920,
            shared_expert_intermediate_size=1920,
            router=Router(scoring_func="softmax"),
            balance=Balance(aux_loss="sequence", aux_loss_coef=1e-3),
        ),
        initializer_range=0.006,
    )
    return pretrain(name, model, learning_rate=2.2e-4, rows=6144)


def moe_515b() -> Run:
    """AMD's MoE-515B proxy: 528 B parameters, 57.0 B active."""
    return _proxy("moe-515b", experts=112, top_k=8)


def moe_1t() -> Run:
    """AMD's MoE-1T proxy: 1,036 B parameters, 57.1 B active."""
    return _proxy("moe-1t", experts=224, top_k=8)


def moe_2t() -> Run:
    """AMD's MoE-2T proxy: 2,050 B parameters, 93.5 B active."""
    return _proxy("moe-2t", experts=448, top_k=16)
