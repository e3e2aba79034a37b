"""OLMoE-1B-7B (0924).

Sources: the Hugging Face config of the model, arXiv 2409.02060 section 2 and appendix B (learning rate, batch, warm-up,
auxiliary loss and z-loss).
"""

from penstock.config.model import Balance, GroupedQueryAttention, Model, Moe, Rope, Router
from penstock.config.presets.recipe import pretrain
from penstock.config.run import Run


def olmoe_1b_7b() -> Run:
    """OLMoE-1B-7B: 6.9 B parameters, 1.3 B active."""
    model = Model(
        family="olmoe",
        vocab_size=50304,
        hidden_size=2048,
        layers=16,
        attention=GroupedQueryAttention(
            heads=16, kv_heads=16, head_dim=128, qk_norm="projection", rope=Rope(theta=10000.0)
        ),
        moe=Moe(
            experts=64,
            top_k=8,
            moe_intermediate_size=1024,
            router=Router(scoring_func="softmax"),
            balance=Balance(aux_loss="micro-batch", aux_loss_coef=1e-2, z_loss_coef=1e-3),
        ),
        rms_norm_eps=1e-5,
    )
    return pretrain("olmoe-1b-7b", model, learning_rate=4e-4, warmup=2500)
