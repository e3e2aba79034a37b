"""Every preset by name, and variants of any preset that keep its first N layers.

`deepseek-v2-lite-8l` is deepseek-v2-lite with 8 layers. Dense layers come first in the model, so a cut keeps all of
them if it can; a model with experts gives up dense layers where it must, so that at least one layer with experts stays.
Layers of multi-token prediction come after the decoder and are kept.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from penstock.base.errors import ConfigError
from penstock.config.presets.debug import debug, debug_softmax
from penstock.config.presets.deepseek import deepseek_v2, deepseek_v2_lite, deepseek_v3
from penstock.config.presets.proxies import moe_1t, moe_2t, moe_515b
from penstock.config.run import Run
from penstock.config.schema import nearest

PRESETS: Mapping[str, Callable[[], Run]] = MappingProxyType(
    {
        "debug": debug,
        "debug-softmax": debug_softmax,
        "deepseek-v2-lite": deepseek_v2_lite,
        "deepseek-v2": deepseek_v2,
        "deepseek-v3": deepseek_v3,
        "moe-515b": moe_515b,
        "moe-1t": moe_1t,
        "moe-2t": moe_2t,
    }
)

_VARIANT = re.compile(r"(?P<base>.+)-(?P<layers>\d+)l")


def is_preset(name: str) -> bool:
    """Whether `name` is a preset or a variant of one (whose number of layers may still be wrong)."""
    variant = _VARIANT.fullmatch(name)
    return name in PRESETS or (variant is not None and variant["base"] in PRESETS)


def preset(name: str) -> Run:
    """The run of a preset, or of a variant that keeps N layers.

    Raises:
        ConfigError: there is no such preset, or it does not have that many layers.
    """
    if name in PRESETS:
        return PRESETS[name]()
    variant = _VARIANT.fullmatch(name)
    if variant is not None and variant["base"] in PRESETS:
        return keep_layers(PRESETS[variant["base"]](), int(variant["layers"]))
    stem, suffix = (name, "") if variant is None else (variant["base"], f"-{variant['layers']}l")
    near = nearest(stem, PRESETS)
    raise ConfigError(
        f"no preset is called {name!r}",
        allowed=f"{', '.join(PRESETS)}, or one of them with -8l to keep 8 layers",
        fix=None if near is None else f"did you mean {near}{suffix}?",
    )


def keep_layers(run: Run, layers: int) -> Run:
    """A run with the first layers of its model only, and the number of them in its name.

    Args:
        run: any run.
        layers: decoder layers that stay.

    Raises:
        ConfigError: the model does not have so many layers.
    """
    model = run.model
    name = f"{run.name}-{layers}l"
    if not 1 <= layers <= model.layers:
        raise ConfigError(f"{name}: cannot keep {layers} layers of {run.name}", allowed=f"1 to {model.layers}")
    most_dense = layers if model.moe is None else layers - 1
    update = {"layers": layers, "dense_layers": min(model.dense_layers, most_dense)}
    return run.model_copy(update={"name": name, "model": model.model_copy(update=update)})
