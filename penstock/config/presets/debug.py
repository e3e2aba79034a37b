"""Small models that train on a laptop's CPU in about a minute, on the running Python's own source code."""

from penstock.config.model import Balance, LatentAttention, Model, Moe, Rope, Router
from penstock.config.run import Checkpoint, Evaluation, LearningRateSchedule, Optimizer, Run, Training


def debug() -> Run:
    """A DeepSeek-V3 in miniature: latent attention, one dense layer, sigmoid router with expert bias, shared expert."""
    return Run(
        name="debug",
        model=Model(
            family="deepseek-v3",
            vocab_size=257,
            hidden_size=128,
            layers=4,
            dense_layers=1,
            intermediate_size=384,
            attention=LatentAttention(
                heads=4,
                q_lora_rank=0,
                kv_lora_rank=64,
                qk_nope_head_dim=32,
                qk_rope_head_dim=16,
                v_head_dim=32,
                rope=Rope(theta=10000.0),
            ),
            moe=Moe(
                experts=8,
                top_k=2,
                moe_intermediate_size=128,
                shared_expert_intermediate_size=128,
                router=Router(scoring_func="sigmoid", norm_topk_prob=True, expert_bias=True, expert_bias_rate=1e-2),
                balance=Balance(aux_loss="sequence", aux_loss_coef=1e-4),
            ),
        ),
        training=Training(steps=1200, sequence_length=128, micro_batch=4, global_batch=4, precision="fp32"),
        optimizer=Optimizer(learning_rate=4e-3),
        schedule=LearningRateSchedule(warmup_steps=20),
        evaluation=Evaluation(every=200, rows=64),
        checkpoint=Checkpoint(every=400, keep=2),
    )


def debug_softmax() -> Run:
    """The same with a softmax router and an auxiliary loss (DeepSeek-V2 in miniature)."""
    base = debug()
    assert base.model.moe is not None, "the debug model has experts"
    moe = base.model.moe.model_copy(
        update={"router": Router(scoring_func="softmax"), "balance": Balance(aux_loss="sequence", aux_loss_coef=1e-2)}
    )
    model = base.model.model_copy(update={"family": "deepseek-v2", "moe": moe})
    return base.model_copy(update={"name": "debug-softmax", "model": model})
