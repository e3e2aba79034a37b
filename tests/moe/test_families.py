"""The layer with experts of a family equals that of `transformers`: output and all gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

from penstock.config.model import ClampedSwiglu, Moe, Router
from penstock.kernels import operators
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.expert_kernels import REFERENCE, TORCH, TRITON
from penstock.kernels.operators import Operators
from penstock.moe.balance import Scope
from penstock.moe.experts import ACTIVATIONS
from penstock.moe.layer import MoE
from penstock.moe.router import hash_table
from penstock.parallel.async_transfer import WeightGradStore
from penstock.parallel.layer_context import LayerContext
from tests.closeness import assert_close, assert_equal
from tests.moe.mixture import make_layer, plain_moe

T, D, F, E = 13, 16, 8, 6

FORMS: dict[str, Operators] = {
    "reference": operators.REFERENCE,
    "torch": operators.TORCH,
    **{
        f"one function, {name}": replace(
            operators.REFERENCE, expert_ffn=partial(expert_ffn, kernels=kernels), expert_ffn_is_fused=True
        )
        for name, kernels in {"reference": REFERENCE, "torch": TORCH, "triton": TRITON}.items()
    },
}


def gpt_oss(top_k: int) -> Moe:
    router = Router(softmax_after_top_k=top_k > 1, logit_bias=True)
    return plain_moe(E, F, top_k=top_k, bias=True, clamped=ClampedSwiglu(alpha=1.702, limit=0.5), router=router)


def llama4(top_k: int) -> Moe:
    router = Router(scoring_func="sigmoid", apply_probs_on_input=True)
    return plain_moe(E, F, top_k=top_k, shared_expert_intermediate_size=F, router=router)


def deepseek_v4(top_k: int) -> Moe:
    router = Router(scoring_func="sqrt-softplus", norm_topk_prob=True, routed_scaling_factor=1.5)
    clamped = ClampedSwiglu(alpha=1.0, limit=0.5, up_offset=0.0)
    of_shared = {"shared_expert_intermediate_size": F, "clamp_shared": True}
    return plain_moe(E, F, top_k=top_k, clamped=clamped, router=router, **of_shared)


def nemotron(top_k: int) -> Moe:
    router = Router(scoring_func="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5)
    return plain_moe(E, F, top_k=top_k, router=router, shared_expert_intermediate_size=F)


Named = dict[str, Tensor]


def as_gpt_oss(ours: Named) -> Named:
    """Gate and up alternate, and matrices are multiplied from the right."""
    alternate = ours["experts.gate_up_eFD"].unflatten(1, (2, F)).transpose(1, 2).flatten(1, 2)
    return {
        "router.weight": ours["router.weight_ED"],
        "router.bias": ours["router.logit_bias_E"],
        "experts.gate_up_proj": alternate.transpose(1, 2),
        "experts.gate_up_proj_bias": ours["experts.gate_up_bias_eF"].unflatten(1, (2, F)).transpose(1, 2).flatten(1, 2),
        "experts.down_proj": ours["experts.down_eDF"].transpose(1, 2),
        "experts.down_proj_bias": ours["experts.down_bias_eD"],
    }


def of_shared(ours: Named, prefix: str) -> Named:
    gate, up = ours["shared.gate_up.weight"].chunk(2)
    weights = {"gate_proj": gate, "up_proj": up, "down_proj": ours["shared.down.weight"]}
    return {f"{prefix}.{name}.weight": weight for name, weight in weights.items()}


def as_llama4(ours: Named) -> Named:
    return {
        "router.weight": ours["router.weight_ED"],
        "experts.gate_up_proj": ours["experts.gate_up_eFD"].transpose(1, 2),
        "experts.down_proj": ours["experts.down_eDF"].transpose(1, 2),
        **of_shared(ours, "shared_expert"),
    }


def as_deepseek_v4(ours: Named) -> Named:
    return {
        "gate.weight": ours["router.weight_ED"],
        "experts.gate_up_proj": ours["experts.gate_up_eFD"],
        "experts.down_proj": ours["experts.down_eDF"],
        **of_shared(ours, "shared_experts"),
    }


def as_nemotron(ours: Named) -> Named:
    return {
        "gate.weight": ours["router.weight_ED"],
        "experts.up_proj": ours["experts.gate_up_eFD"],
        "experts.down_proj": ours["experts.down_eDF"],
        "shared_experts.up_proj.weight": ours["shared.gate_up.weight"],
        "shared_experts.down_proj.weight": ours["shared.down.weight"],
    }


def compare(layer: MoE, theirs: nn.Module, renamed: Callable[[Named], Named], tokens_T: Tensor | None = None) -> None:
    given = {name: value.detach() for name, value in renamed(dict(layer.named_parameters())).items()}
    theirs.load_state_dict(dict(theirs.named_buffers()) | given)
    x_TD, direction_TD = torch.randn(T, D), torch.randn(T, D)
    own_TD, their_TD = (x_TD.clone().requires_grad_() for _ in range(2))
    of_tokens = () if tokens_T is None else (tokens_T[None],)
    y_TD = torch.stack(layer(own_TD, Scope(tokens_T=tokens_T))).sum(0)
    right_TD = theirs(their_TD[None], *of_tokens)[0].view(T, D)
    assert_close(y_TD, right_TD, tolerance=1e-5)
    y_TD.backward(direction_TD)
    right_TD.backward(direction_TD)
    assert_close(own_TD.grad, their_TD.grad, tolerance=1e-4)
    found = renamed({name: one.grad for name, one in layer.named_parameters()})
    assert_close(found, {name: one.grad for name, one in theirs.named_parameters()}, tolerance=1e-4)


@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("family", "top_k"), [("gpt-oss", 2), ("gpt-oss", 4), ("llama4", 1), ("llama4", 2)])
def test_the_layer_of_a_family_equals_that_of_transformers(family: str, top_k: int, forms: Operators) -> None:
    context = LayerContext(operators=forms)
    sizes = {"hidden_size": D, "intermediate_size": F, "num_local_experts": E, "num_experts_per_tok": top_k}
    if family == "llama4":
        config = Llama4TextConfig(**sizes, num_hidden_layers=1)
        compare(make_layer(llama4(top_k), context, D, std=0.5), Llama4TextMoe(config), as_llama4)
        return
    config = GptOssConfig(**sizes, num_hidden_layers=1, swiglu_limit=0.5)
    config._experts_implementation = "eager"
    compare(make_layer(gpt_oss(top_k), context, D, std=0.5), GptOssMLP(config), as_gpt_oss)


@pytest.mark.parametrize("is_hashed", [False, True], ids=["chosen by scores", "by token ids"])
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_the_layer_of_deepseek_v4_equals_that_of_transformers(forms: Operators, is_hashed: bool) -> None:
    sizes = {"hidden_size": D, "moe_intermediate_size": F, "n_routed_experts": E, "num_experts_per_tok": 2}
    kinds = ["hash_moe" if is_hashed else "moe"]
    config = DeepseekV4Config(
        **sizes, vocab_size=7, num_hidden_layers=1, mlp_layer_types=kinds, swiglu_limit=0.5, routed_scaling_factor=1.5
    )
    config._experts_implementation = "eager"
    table_VK = hash_table(7, E, 2, torch.Generator().manual_seed(2)) if is_hashed else None
    tokens_T = torch.arange(T) % 7 if is_hashed else None
    layer = make_layer(deepseek_v4(2), LayerContext(operators=forms), D, std=0.5, table_VK=table_VK)
    theirs = DeepseekV4SparseMoeBlock(config, 0)
    if table_VK is not None:
        theirs.gate.tid2eid.copy_(table_VK)
    compare(layer, theirs, as_deepseek_v4, tokens_T)


@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_the_layer_of_nemotron_equals_that_of_transformers(forms: Operators) -> None:
    sizes = {"hidden_size": D, "moe_intermediate_size": F, "n_routed_experts": E, "num_experts_per_tok": 2}
    shared = {"moe_shared_expert_intermediate_size": F, "n_group": 1, "topk_group": 1}
    config = NemotronHConfig(**sizes, **shared, routed_scaling_factor=2.5, norm_topk_prob=True)
    config._experts_implementation = "eager"
    layer = make_layer(nemotron(2), LayerContext(operators=forms), D, std=0.5, activation=ACTIVATIONS["relu2"])
    compare(layer, NemotronHMoE(config), as_nemotron)


FAMILIES = pytest.mark.parametrize("moe", [gpt_oss(2), llama4(1)], ids=["gpt-oss", "llama4"])


def trained(layer: MoE) -> list[Tensor]:
    """Output, and the gradient of the input."""
    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y_TD = torch.stack(layer.layer_context.run("moe", layer, x_TD, Scope())).sum(0)
    y_TD.square().sum().backward()
    return [y_TD.detach(), x_TD.grad]


def gradients(layer: MoE) -> list[Tensor]:
    found = [parameter.grad for parameter in layer.parameters()]
    assert None not in found, "every parameter takes part"
    return found


@FAMILIES
@pytest.mark.parametrize("kinds", [("expert-activation",), ("moe",)], ids=["experts", "layer"])
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_what_is_recomputed_gives_the_same_bits(forms: Operators, kinds: tuple[str, ...], moe: Moe) -> None:
    found = []
    for rule in (frozenset[str](), frozenset(kinds)):
        layer = make_layer(moe, LayerContext(operators=forms, recompute=rule), D, std=0.5)
        found.append([*trained(layer), *gradients(layer)])
    assert_equal(*found)


@FAMILIES
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_gradients_of_matrices_may_be_put_off_beside_those_of_biases(forms: Operators, moe: Moe) -> None:
    weight_grads = WeightGradStore()
    at_once = make_layer(moe, LayerContext(operators=forms), D, std=0.5)
    layer = make_layer(moe, LayerContext(operators=forms, weight_grads=weight_grads), D, std=0.5)
    expected = [*trained(at_once), *gradients(at_once)]
    with weight_grads.collecting() as work:
        found = trained(layer)
    assert layer.experts.gate_up_eFD.grad is None and layer.experts.down_eDF.grad is None
    for task in work:
        task()
    assert_equal([*found, *gradients(layer)], expected)


def test_a_learned_bias_of_logits_is_trained_and_chooses() -> None:
    router = make_layer(gpt_oss(2), LayerContext(), D, std=0.5).router
    assert router.logit_bias_E.dtype == torch.float32
    router.logit_bias_E.data.copy_(100.0 * (torch.arange(E) == 4))
    routing = router(torch.randn(T, D), Scope())
    assert (routing.experts_TK[:, 0] == 4).all()
    routing.weights_TK[:, 0].sum().backward()
    assert router.logit_bias_E.grad is not None
