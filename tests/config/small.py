"""A run whose values never change, so that tests may quote them; presets are tuned now and then."""

from collections.abc import Sequence

from penstock.config.model import Balance, LatentAttention, Model, Moe, Router
from penstock.config.run import LearningRateSchedule, Optimizer, Run, Training
from penstock.config.tree import build, merge, parse_overrides

SMALL = Run(
    name="small",
    model=Model(
        family="deepseek-v3",
        vocab_size=257,
        hidden_size=128,
        layers=4,
        dense_layers=1,
        intermediate_size=384,
        attention=LatentAttention(heads=4, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
        moe=Moe(
            experts=8,
            top_k=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            router=Router(scoring_func="sigmoid", norm_topk_prob=True, expert_bias=True),
            balance=Balance(aux_loss="sequence", aux_loss_coef=1e-4),
        ),
    ),
    training=Training(steps=200, sequence_length=128, micro_batch=4, global_batch=8, precision="fp32"),
    optimizer=Optimizer(learning_rate=3e-3),
    schedule=LearningRateSchedule(warmup_steps=20),
)


def unchecked_run(overrides: Sequence[str]) -> Run:
    """The small run with overrides, of the right types, with no rule checked."""
    return build(Run, merge(Run, SMALL.model_dump(), parse_overrides(Run, overrides)))
