"""Llama 3.1 8B, 70B and 405B, and the text models of Llama 4 Scout and Maverick.

Sources: the Hugging Face configs of the base models, arXiv 2407.21783 table 3 (Llama 3.1: learning rates). Llama 4 was
published with an image encoder of 0.87 B parameters, which is not here; of its training nothing was published. Three
layers of four see a chunk of 8,192 positions, the fourth sees all, without position embedding and with a temperature.
Scout's rotary embedding is as first published; its files were changed later to a factor of 16 and equal bounds.
"""

from penstock.config.model import Balance, GroupedQueryAttention, Llama3Rope, LocalAttention, Model, Moe, Rope, Router
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


def _llama3(name: str, sizes: tuple[int, int, int, int], learning_rate: float) -> Run:
    """`sizes` are layers, hidden, intermediate and heads."""
    layers, hidden, intermediate, heads = sizes
    model = Model(
        family="llama",
        vocab_size=128256,
        hidden_size=hidden,
        layers=layers,
        dense_layers=layers,
        intermediate_size=intermediate,
        attention=GroupedQueryAttention(
            heads=heads, kv_heads=8, head_dim=128, rope=Rope(theta=5e5, llama3=Llama3Rope(factor=8.0))
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain(name, model, learning_rate=learning_rate, sequence_length=8192)


def llama_3_1_8b() -> Run:
    """Llama 3.1 8B, dense: 8.0 B parameters."""
    return _llama3("llama3.1-8b", (32, 4096, 14336, 32), 3e-4)


def llama_3_1_70b() -> Run:
    """Llama 3.1 70B, dense: 70.6 B parameters."""
    return _llama3("llama3.1-70b", (80, 8192, 28672, 64), 1.5e-4)


def llama_3_1_405b() -> Run:
    """Llama 3.1 405B, dense: 405.9 B parameters."""
    return _llama3("llama3.1-405b", (126, 16384, 53248, 128), 8e-5)


def _llama4(name: str, *, experts: int, every: int, qk_norm: bool, rope: Rope) -> Run:
    local = LocalAttention(
        kind="chunk", size=8192, global_every=4, global_rope=False, global_temperature=0.1, temperature_floor=8192
    )
    model = Model(
        family="llama4",
        vocab_size=202048,
        hidden_size=5120,
        layers=48,
        intermediate_size=16384,
        attention=GroupedQueryAttention(
            heads=40, kv_heads=8, head_dim=128, rope=rope, qk_norm="rotated-head" if qk_norm else "none", local=local
        ),
        moe=Moe(
            experts=experts,
            top_k=1,
            moe_intermediate_size=8192,
            shared_expert_intermediate_size=8192,
            moe_layer_freq=every,
            router=Router(scoring_func="sigmoid", apply_probs_on_input=True),
            balance=Balance(aux_loss="micro-batch", aux_loss_coef=1e-3),
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain(name, model, learning_rate=2e-4, sequence_length=8192)


def llama4_scout() -> Run:
    """Llama 4 Scout, text model: 107.8 B parameters, 17.2 B active."""
    rope = Rope(theta=5e5, llama3=Llama3Rope(factor=8.0))
    return _llama4("llama4-scout", experts=16, every=1, qk_norm=True, rope=rope)


def llama4_maverick() -> Run:
    """Llama 4 Maverick, text model: 400.7 B parameters, 17.2 B active."""
    return _llama4("llama4-maverick", experts=128, every=2, qk_norm=False, rope=Rope(theta=5e5))
