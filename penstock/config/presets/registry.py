"""Every preset by name, and variants of any preset that keep its first N layers.

`deepseek-v2-lite-8l` is deepseek-v2-lite with 8 layers. Layers keep their kind: dense ones come first or between those
with experts, and every n-th sees the whole row. A model with experts gives up dense layers where it must, so that at
least one layer with experts stays. Layers of multi-token prediction come after the decoder and are kept.
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from penstock.base.errors import ConfigError, asked, nearest
from penstock.config.follow import follow
from penstock.config.presets import by_sizes, debug, deepseek, grouped_query, qwen3
from penstock.config.run import Run

PRESETS: Mapping[str, Callable[[], Run]] = MappingProxyType(
    {
        "debug": debug.debug,
        "debug-softmax": debug.debug_softmax,
        "deepseek-v2-lite": deepseek.deepseek_v2_lite,
        "deepseek-v2": deepseek.deepseek_v2,
        "deepseek-v3": deepseek.deepseek_v3,
        "deepseek-v3.2": deepseek.deepseek_v3_2,
        "deepseek-v4-flash": deepseek.deepseek_v4_flash,
        "moonlight-16b-a3b": deepseek.moonlight_16b_a3b,
        "kimi-k2": deepseek.kimi_k2,
        "kimi-linear-48b-a3b": deepseek.kimi_linear_48b_a3b,
        "glm-4.5": deepseek.glm_4_5,
        "glm-4.5-air": deepseek.glm_4_5_air,
        "glm-5": deepseek.glm_5,
        "ernie-4.5-21b-a3b": grouped_query.ernie_4_5_21b_a3b,
        "ernie-4.5-300b-a47b": grouped_query.ernie_4_5_300b_a47b,
        "minimax-m2": grouped_query.minimax_m2,
        "mixtral-8x7b": grouped_query.mixtral_8x7b,
        "mixtral-8x22b": grouped_query.mixtral_8x22b,
        "qwen3-30b-a3b": qwen3.qwen3_30b_a3b,
        "qwen3-235b-a22b": qwen3.qwen3_235b_a22b,
        "qwen3-next-80b-a3b": qwen3.qwen3_next_80b_a3b,
        "qwen3.5-35b-a3b": qwen3.qwen3_5_35b_a3b,
        "olmoe-1b-7b": grouped_query.olmoe_1b_7b,
        "llama4-scout": grouped_query.llama4_scout,
        "llama4-maverick": grouped_query.llama4_maverick,
        "gpt-oss-20b": grouped_query.gpt_oss_20b,
        "gpt-oss-120b": grouped_query.gpt_oss_120b,
        "llama3.1-8b": grouped_query.llama_3_1_8b,
        "llama3.1-70b": grouped_query.llama_3_1_70b,
        "llama3.1-405b": grouped_query.llama_3_1_405b,
        "qwen3-0.6b": qwen3.qwen3_0_6b,
        "qwen3-1.7b": qwen3.qwen3_1_7b,
        "qwen3-4b": qwen3.qwen3_4b,
        "qwen3-8b": qwen3.qwen3_8b,
        "qwen3-14b": qwen3.qwen3_14b,
        "qwen3-32b": qwen3.qwen3_32b,
        "qwen1.5-moe-a2.7b": by_sizes.qwen1_5_moe_a2_7b,
        "dots.llm1": by_sizes.dots_llm1,
        "solar-open-100b": by_sizes.solar_open_100b,
        "k-exaone-236b-a23b": by_sizes.k_exaone_236b_a23b,
        "hy3": by_sizes.hy3,
        "glm-4.7-flash": by_sizes.glm_4_7_flash,
        "mistral-7b": by_sizes.mistral_7b,
        "qwen2.5-7b": by_sizes.qwen2_5_7b,
        "seed-oss-36b": by_sizes.seed_oss_36b,
        "phi-4": by_sizes.phi_4,
        "ernie-4.5-0.3b": by_sizes.ernie_4_5_0_3b,
        "glm-4-9b": by_sizes.glm_4_9b,
        "glm-4-32b": by_sizes.glm_4_32b,
        "olmo-2-7b": by_sizes.olmo_2_7b,
        "exaone-4.0-32b": by_sizes.exaone_4_0_32b,
        "smollm3-3b": by_sizes.smollm3_3b,
        "granite-3.3-8b": by_sizes.granite_3_3_8b,
        "gemma-3-1b": by_sizes.gemma_3_1b,
        "moe-515b": grouped_query.moe_515b,
        "moe-1t": grouped_query.moe_1t,
        "moe-2t": grouped_query.moe_2t,
    }
)

_VARIANT = re.compile(r"(?P<base>.+)-(?P<layers>\d+)l")


def is_preset(name: str) -> bool:
    """Whether `name` is a preset or a variant of one, whose number of layers may still be wrong."""
    variant = _VARIANT.fullmatch(name)
    return name in PRESETS or (variant is not None and variant["base"] in PRESETS)


def preset(name: str) -> Run:
    """The run of a preset, or of a variant that keeps N layers. Raises a ConfigError if there is none."""
    if name in PRESETS:
        return PRESETS[name]()
    variant = _VARIANT.fullmatch(name)
    if variant is not None and variant["base"] in PRESETS:
        return keep_layers(PRESETS[variant["base"]](), int(variant["layers"]))
    # Suggestions keep the cut.
    stem, suffix = (name, "") if variant is None else (variant["base"], f"-{variant['layers']}l")
    raise ConfigError(
        f"no preset is called {name!r}",
        allowed=f"{', '.join(PRESETS)}, or one of them with -8l to keep 8 layers",
        fix=asked(f"{near}{suffix}" for near in nearest(stem, PRESETS)),
    )


def keep_layers(run: Run, layers: int) -> Run:
    """A run with the first layers of its model, and their number in its name. Raises a ConfigError if it has fewer."""
    model = run.model
    name = f"{run.name}-{layers}l"
    if not 1 <= layers <= model.layers:
        raise ConfigError(f"{name}: cannot keep {layers} layers of {run.name}", allowed=f"1 to {model.layers}")
    cut = run.model_copy(update={"name": name, "model": model.model_copy(update={"layers": layers})})
    return follow(cut, ("name", "model.layers"))
