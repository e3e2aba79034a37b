"""Parts of `config.json` about experts: which layers have them, shared ones, groups; as `config_parts`."""

from collections.abc import Sequence
from functools import partial

from penstock.base.errors import ConfigError
from penstock.config.model import Model, Moe
from penstock.models.huggingface.config_parts import Keys, Part, Values, agreed, refused


def moe_of(model: Model) -> Moe:
    """The experts of a model. Raises ConfigError if it has none."""
    if model.moe is None:
        raise ConfigError(f"every model of the family {model.family} has experts", got='model.moe = "none"')
    return model.moe


def layers_with_experts(has_experts: Sequence[bool], step: int, key: str) -> Values:
    """`dense_layers` and `moe_layer_freq` for a list of layers: dense layers first, then every n-th layer with experts.

    Of two equivalent results the one without dense layers and with n = `step`, as the file says, is preferred.
    """
    layers = len(has_experts)
    places = [layer for layer, has in enumerate(has_experts) if has]
    if places:
        every = places[1] - places[0] if len(places) > 1 else layers - places[0]
        for dense, n in ((0, step), (places[0] - every + 1, every)):  # the n-th layer behind the dense ones is first
            expected = [layer >= dense and (layer - dense + 1) % n == 0 for layer in range(layers)]
            if dense >= 0 and expected == list(has_experts):
                return {"dense_layers": dense, "moe.moe_layer_freq": n}
    raise refused(key, places, "dense layers first, then every n-th layer with experts, the n-th first")


def _read_exceptions(keys: Keys, usual: Sequence[int] = ()) -> Values:
    step, listed = keys.whole("decoder_sparse_step", 1, low=1), keys.numbers_of_layers("mlp_only_layers")
    without = usual if listed is None else listed
    has_experts = [layer not in without and (layer + 1) % step == 0 for layer in range(keys.layers)]
    return layers_with_experts(has_experts, step, "mlp_only_layers or decoder_sparse_step")


def _write_exceptions(model: Model) -> Values:
    if model.dense_layers == 0:
        return {"decoder_sparse_step": moe_of(model).moe_layer_freq, "mlp_only_layers": []}
    return {"decoder_sparse_step": 1, "mlp_only_layers": [item for item in range(model.layers) if model.is_dense(item)]}


def _read_list(keys: Keys) -> Values:
    step, layers = keys.whole("interleave_moe_layer_step", 1, low=1), keys.layers
    listed = keys.numbers_of_layers("moe_layers")
    listed = list(range(step - 1, layers, step)) if listed is None else listed
    return layers_with_experts(
        [layer in listed for layer in range(layers)], step, "moe_layers or interleave_moe_layer_step"
    )


def _write_list(model: Model) -> Values:
    listed = [layer for layer in range(model.layers) if not model.is_dense(layer)]
    return {"interleave_moe_layer_step": moe_of(model).moe_layer_freq, "moe_layers": listed}


def _read_range(keys: Keys) -> Values:
    layers, start, step = keys.layers, keys.whole("moe_layer_start_index"), keys.whole("moe_layer_interval", 1, low=1)
    end = keys.get("moe_layer_end_index", -1)
    end = layers - 1 if end == -1 else keys.whole("moe_layer_end_index")
    has_experts = [start <= layer <= end and (layer + 1) % step == 0 for layer in range(layers)]
    return layers_with_experts(has_experts, step, "moe_layer_start_index, moe_layer_end_index or moe_layer_interval")


def _write_range(model: Model) -> Values:
    step = moe_of(model).moe_layer_freq
    return {"moe_layer_start_index": model.dense_layers, "moe_layer_end_index": -1, "moe_layer_interval": step}


def _read_first_dense(keys: Keys) -> Values:
    types = keys.of_layers("mlp_layer_types", keys.layers)
    first = None
    if keys.given.get("first_k_dense_replace") is not None:
        first = min(keys.whole("first_k_dense_replace"), keys.layers)  # more than there are: all
    if types is None:
        return {} if first is None else {"dense_layers": first}
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
        raise refused("mlp_layer_types", types, "dense layers first, then sparse ones")
    return {"dense_layers": agreed({"mlp_layer_types": dense, "first_k_dense_replace": first})}


def _read_listed_dense(keys: Keys) -> Values:
    given = _read_first_dense(keys)
    usual = min(1, keys.layers)
    if given.get("dense_layers", usual) != usual and keys.get("mlp_layer_types", None) is None:
        raise refused("first_k_dense_replace", given["dense_layers"], f"{usual}, or mlp_layer_types beside it")
    return {"dense_layers": usual, **given}


def _write_listed_dense(model: Model) -> Values:
    kinds = ("sparse", "dense")
    return {"mlp_layer_types": [kinds[model.is_dense(layer)] for layer in range(model.layers)]}


def _read_kinds(keys: Keys) -> Values:
    keys.skip("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    if (scaling := keys.get("rope_scaling", None)) is not None:  # which this class does not read
        raise refused("rope_scaling", scaling, "none: rope_parameters has a table for each kind of layers")
    types = keys.of_layers("mlp_layer_types", keys.layers) or []
    if any(kind != "sparse" for kind in types):
        raise refused("mlp_layer_types", types, "sparse in each layer")
    return {}


KINDS_OF_MELLUM = Part(_read_kinds, lambda model: {})
"""Every layer has experts; multi-token prediction is left out."""

LISTED_DENSE = Part(_read_listed_dense, _write_listed_dense)
"""The first layers are dense, as the list of all kinds says; without the list the first one."""
EXCEPTIONS = Part(_read_exceptions, _write_exceptions)  # every n-th layer has experts, except listed ones
EXCEPTIONS_OF_FLINT = Part(partial(_read_exceptions, usual=(0, 1)), _write_exceptions)
LIST = Part(_read_list, _write_list)  # every n-th layer has experts, or the listed ones
RANGE = Part(_read_range, _write_range)
"""Of a range of layers, every n-th has experts, counted from the first layer of the model."""
FIRST_DENSE = Part(_read_first_dense, lambda model: {})
"""The first layers are dense; some files also list the kinds of all layers."""
DENSE = Part(lambda keys: {"dense_layers": keys.layers}, lambda model: {})  # no layer has experts


# ----------------------------------------------------------------------------------------------------- shared experts


def shared(count: str) -> Part:
    """Several shared experts, each as wide as a routed one; `count` is the key of their number."""
    width = "moe.shared_expert_intermediate_size"

    def write(model: Model) -> Values:
        moe = moe_of(model)
        return {count: moe.shared_expert_intermediate_size // moe.moe_intermediate_size}

    return Part(lambda keys: {width: keys.whole(count, 0) * keys.whole("moe_intermediate_size")}, write)


SHARED = shared("n_shared_experts")
ONE_SHARED = Part(
    lambda keys: {"moe.shared_expert_intermediate_size": keys.whole("intermediate_size")}, lambda model: {}
)
"""One shared expert, as wide as a routed one."""


def _read_choices(keys: Keys) -> Values:
    layers, listed = keys.layers, keys.get("moe_topk", 1)
    choices = keys.of_layers("moe_topk", layers) or [] if isinstance(listed, list) else [listed] * layers
    return {"moe.top_k": agreed({f"moe_topk of layer {layer}": top_k for layer, top_k in enumerate(choices)})}


CHOICES_OF_HUNYUAN = Part(_read_choices, lambda model: {"moe_topk": moe_of(model).top_k})
"""The same number of experts per token in each layer; files may list it."""


def _read_groups(keys: Keys) -> Values:
    keys.skip("n_group", "topk_group")
    method = keys.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise refused("topk_method", method, "greedy, group_limited_greedy")
    if method == "greedy":
        return {}
    return {"moe.router.n_group": keys.whole("n_group"), "moe.router.topk_group": keys.whole("topk_group")}


def _write_groups(model: Model) -> Values:
    router = moe_of(model).router
    method = "group_limited_greedy" if router.n_group > 1 else "greedy"
    return {"topk_method": method, "n_group": router.n_group, "topk_group": router.topk_group}


GROUPS_OF_V2 = Part(_read_groups, _write_groups)
