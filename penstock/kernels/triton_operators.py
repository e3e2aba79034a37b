"""All operators as Triton kernels. Plain causal attention stays with torch, whose cuDNN backend is fast."""

from penstock.kernels.bounded_attention import bounded_attention
from penstock.kernels.delta_rule_launches import delta_rule
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.head_norms import gated_norm, unit_length
from penstock.kernels.norm import add_rms_norm, add_three, fan_out, rms_norm, rms_norm_beside
from penstock.kernels.operators import Operators
from penstock.kernels.permute import order_rows, unpermute
from penstock.kernels.replica_kernels import assign_replicas, plan_replicas
from penstock.kernels.rope import mla_heads, rotate
from penstock.kernels.short_convolution import short_convolution
from penstock.kernels.sparse_attention_launches import choose_keys, sparse_attention
from penstock.kernels.swiglu import swiglu
from penstock.kernels.topk import balance_loss, route

TRITON = Operators(
    attention_backend="auto",
    bounded_attention=bounded_attention,
    route=route,
    balance_loss=balance_loss,
    order_rows=order_rows,
    plan_replicas=plan_replicas,
    assign_replicas=assign_replicas,
    unpermute=unpermute,
    expert_ffn=expert_ffn,
    expert_ffn_is_fused=True,
    saves_rows=True,
    swiglu=swiglu,
    rms_norm=rms_norm,
    rms_norm_beside=rms_norm_beside,
    add_rms_norm=add_rms_norm,
    add_three=add_three,
    fan_out=fan_out,
    rotate=rotate,
    delta_rule=delta_rule,
    short_convolution=short_convolution,
    unit_length=unit_length,
    gated_norm=gated_norm,
    choose_keys=choose_keys,
    sparse_attention=sparse_attention,
    mla_heads=mla_heads,
)
