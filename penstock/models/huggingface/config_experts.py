"""What `config.json` says of experts in its own way: which layers have them, shared ones, what is DeepSeek's own."""

from collections.abc import Sequence

from penstock.base.errors import ConfigError
from penstock.config.model import LatentAttention, Model, Moe
from penstock.models.huggingface.config_parts import Keys, Part, Values, refused


def moe_of(model: Model) -> Moe:
    """The experts of a model whose family has some. Raises ConfigError if it has none."""
    if model.moe is None:
        raise ConfigError(f"every model of the family {model.family} has experts", got='model.moe = "none"')
    return model.moe


# -------------------------------------------------------------------------------------------- which layers have experts


def layers_with_experts(has_experts: Sequence[bool], step: int, key: str) -> Values:
    """Our two fields for a list of layers: so many dense ones first, then every n-th with experts.

    Args:
        has_experts: for each layer.
        step: the n that the file names; of two ways to say the same, the one with it and no dense layers is taken.
        key: what to name in a complaint.
    """
    layers = len(has_experts)
    places = [layer for layer, has in enumerate(has_experts) if has]
    if places:
        every = places[1] - places[0] if len(places) > 1 else layers - places[0]
        for dense, n in ((0, step), (places[0] - every + 1, every)):
            expected = [layer >= dense and (layer - dense + 1) % n == 0 for layer in range(layers)]
            if dense >= 0 and expected == list(has_experts):
                return {"dense_layers": dense, "moe.moe_layer_freq": n}
    raise refused(key, places, "dense layers first, then every n-th layer with experts, the n-th first")


def _read_exceptions(keys: Keys) -> Values:
    step, without = keys.whole("decoder_sparse_step", 1, low=1), keys.numbers_of_layers("mlp_only_layers") or []
    layers = range(keys.layers)
    has_experts = [layer not in without and (layer + 1) % step == 0 for layer in layers]
    return layers_with_experts(has_experts, step, "mlp_only_layers")


def _write_exceptions(model: Model) -> Values:
    if model.dense_layers == 0:
        return {"decoder_sparse_step": moe_of(model).moe_layer_freq, "mlp_only_layers": []}
    return {"decoder_sparse_step": 1, "mlp_only_layers": [one for one in range(model.layers) if model.is_dense(one)]}


def _read_list(keys: Keys) -> Values:
    step, layers = keys.whole("interleave_moe_layer_step", 1, low=1), keys.layers
    listed = keys.numbers_of_layers("moe_layers")
    listed = list(range(step - 1, layers, step)) if listed is None else listed
    return layers_with_experts([layer in listed for layer in range(layers)], step, "moe_layers")


def _write_list(model: Model) -> Values:
    listed = [layer for layer in range(model.layers) if not model.is_dense(layer)]
    return {"interleave_moe_layer_step": moe_of(model).moe_layer_freq, "moe_layers": listed}


def _read_dense(keys: Keys) -> Values:
    return {"dense_layers": keys.layers}


def _write_nothing(model: Model) -> Values:
    return {}


EXCEPTIONS = Part(_read_exceptions, _write_exceptions)
"""Every n-th layer but those that are listed."""
LIST = Part(_read_list, _write_list)
"""Every n-th layer, or those that are listed."""
DENSE = Part(_read_dense, _write_nothing)
"""No layer."""


# ----------------------------------------------------------------------------------------------------- shared experts


def _read_shared(keys: Keys) -> Values:
    return {
        "moe.shared_expert_intermediate_size": keys.whole("n_shared_experts", 0) * keys.whole("moe_intermediate_size")
    }


def _write_shared(model: Model) -> Values:
    moe = moe_of(model)
    return {"n_shared_experts": moe.shared_expert_intermediate_size // moe.moe_intermediate_size}


def _read_one_shared(keys: Keys) -> Values:
    return {"moe.shared_expert_intermediate_size": keys.whole("intermediate_size")}


SHARED = Part(_read_shared, _write_shared)
"""Several, each as wide as a routed one."""
ONE_SHARED = Part(_read_one_shared, _write_nothing)
"""One, as wide as a routed one."""


# ----------------------------------------------------------------------------------------------------------- DeepSeek


def _read_latents(keys: Keys) -> Values:
    return {"attention.kind": "mla", "attention.q_lora_rank": keys.whole("q_lora_rank", 0)}


def _write_latents(model: Model) -> Values:
    attention = model.attention
    assert isinstance(attention, LatentAttention), "other attention lacks fields that the family needs"
    return {"num_key_value_heads": attention.heads, "q_lora_rank": attention.q_lora_rank or None}


def _read_groups(keys: Keys) -> Values:
    if keys.get("topk_method", "greedy") == "greedy":
        return {}
    return {"moe.router.n_group": keys.whole("n_group"), "moe.router.topk_group": keys.whole("topk_group")}


def _write_groups(model: Model) -> Values:
    router = moe_of(model).router
    method = "group_limited_greedy" if router.n_group > 1 else "greedy"
    return {"topk_method": method, "n_group": router.n_group, "topk_group": router.topk_group}


LATENTS = Part(_read_latents, _write_latents)
GROUPS_OF_V2 = Part(_read_groups, _write_groups)
