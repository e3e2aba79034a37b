"""docs/families.md: for each family the presets, layouts that fit, projected and measured speeds, and the commands."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.config.presets.registry import PRESETS
from penstock.config.size import size_of
from penstock.config.versions import new_path
from penstock.models.huggingface.families import FAMILIES
from tools.pages import page, table

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"

SECTIONS: dict[str, tuple[str, ...]] = {
    "DeepSeek-V2": ("deepseek-v2-lite", "deepseek-v2"),
    "DeepSeek-V3": ("deepseek-v3", "deepseek-v3.2"),
    "DeepSeek-V4": ("deepseek-v4-flash",),
    "Qwen3 with experts": ("qwen3-30b-a3b", "qwen3-235b-a22b"),
    "Qwen3-Next and Qwen3.5": ("qwen3-next-80b-a3b", "qwen3.5-35b-a3b"),
    "Kimi and Moonlight": ("kimi-k2", "moonlight-16b-a3b", "kimi-linear-48b-a3b"),
    "GLM": ("glm-4.5", "glm-4.5-air", "glm-5", "glm-4.7-flash"),
    "gpt-oss": ("gpt-oss-20b", "gpt-oss-120b"),
    "Llama 4": ("llama4-scout", "llama4-maverick"),
    "Mixtral": ("mixtral-8x7b", "mixtral-8x22b"),
    "MiniMax-M2": ("minimax-m2",),
    "ERNIE 4.5": ("ernie-4.5-21b-a3b", "ernie-4.5-300b-a47b"),
    "OLMoE": ("olmoe-1b-7b",),
    "Qwen1.5 with experts": ("qwen1.5-moe-a2.7b",),
    "dots.llm1, Solar-Open, K-EXAONE, Hy3": ("dots.llm1", "solar-open-100b", "k-exaone-236b-a23b", "hy3"),
    "Dense: Llama 3.1 and Qwen3": (
        *("llama3.1-8b", "llama3.1-70b", "llama3.1-405b", "qwen3-0.6b", "qwen3-1.7b"),
        *("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b"),
    ),
    "Dense: others": (
        *("mistral-7b", "qwen2.5-7b", "seed-oss-36b", "phi-4", "ernie-4.5-0.3b", "glm-4-9b", "glm-4-32b"),
        *("olmo-2-7b", "exaone-4.0-32b", "smollm3-3b", "granite-3.3-8b", "gemma-3-1b"),
    ),
}

_PLANNED = ("preset", "on", "layout", "step, s", "tokens/s/GPU", "MFU", "memory, GB")
_MEASURED = ("cut, on one H200", "tokens/s", "MFU", "memory, GB")


def families_page() -> str:
    """The whole page."""
    plans = _numbers("plan-families.json")["searches"].values()
    sections = [line for title, presets in SECTIONS.items() for line in _section(title, presets, list(plans))]
    return page("families", sections=sections)


def _numbers(file: str) -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads((RESULTS / file).read_text(encoding="utf-8"))["numbers"]
    return numbers


def _section(title: str, presets: tuple[str, ...], plans: list[dict[str, Any]]) -> list[str]:
    rows = [_planned(plan) for name in presets for plan in plans if plan["model"] == name]
    measured = [row for name in presets for row in _measured(name)]
    commands = [f"penstock plan {name} --on {plan['on']}" for name in presets for plan in _smallest(name, plans)]
    return [
        f"## {title}",
        "",
        " ".join([*map(_size, presets), *_forms(presets)]),
        "",
        *(["```bash", *commands, "```", ""] if commands else []),
        *([*table(_PLANNED, rows), ""] if rows else []),
        *([*table(_MEASURED, measured), ""] if measured else []),
    ]


def _smallest(name: str, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first cluster on which the model fits."""
    return [plan for plan in plans if plan["model"] == name and plan.get("fits")][:1]


def _size(name: str) -> str:
    model = PRESETS[name]().model
    counted = size_of(model, 4096)
    active = f", {counted.active_parameters / 1e9:.1f} B of them active" if model.moe else ""
    return f"`{name}` has {counted.parameters / 1e9:,.1f} B parameters{active}."


def _forms(presets: tuple[str, ...]) -> Iterator[str]:
    """Hugging Face class of each family, and how near the two are on tiny models."""
    parity = _numbers("parity.json")["models"]
    for name in dict.fromkeys(PRESETS[preset]().model.family for preset in presets):
        models = [model for model in parity if model["family"] == name]
        logits, gradient = (max(model["plain"][figure] for model in models) for figure in ("logits", "gradient"))
        apart = f"logits {logits:.0e} and gradients {gradient:.0e} apart on tiny models in float64"
        yield f"Hugging Face class: `{FAMILIES[name].architecture}` ({apart})."


def _planned(plan: dict[str, Any]) -> tuple[str, ...]:
    if "best" not in plan:
        return (f"`{plan['model']}`", plan["on"], "none fits", "", "", "", "")
    return (
        f"`{plan['model']}`",
        plan["on"],
        plan["best"],
        f"{plan['step_seconds']:.1f}",
        f"{plan['tokens_per_second']:,.0f}",
        f"{plan['model_flops_utilization']:.0%}",
        f"{plan['memory_bytes'] / 1e9:.0f}",
    )


def _measured(name: str) -> Iterator[tuple[str, ...]]:
    """The cut with the most layers that ran on one GPU with our kernels, as it is typed; the fastest of its runs."""
    runs = []
    for case in _numbers("projection-h200.json")["cases"]:
        overrides = dict(override.split("=", 1) for override in case["overrides"])
        variant = re.fullmatch(rf"{re.escape(name)}(?:-(?P<layers>\d+)l)?", case["target"])
        if variant is None or case["processes"] > 1 or case["reason"] or "kernels.all" in overrides:
            continue
        changed = [
            f"{new_path(path) or path}={value}" for path, value in overrides.items() if path.startswith("model.")
        ]
        figures = case["figures"]
        layers = int(variant["layers"] or overrides["model.layers"])
        speed, size = figures["tokens_per_second_per_device"], figures["peak_memory_bytes"]
        cut = " ".join([case["target"], *changed])
        runs.append((layers, speed, figures["model_flops_utilization"], size, cut))
    for _, speed, share, size, cut in sorted(runs)[-1:]:
        larger = _numbers("one-gpu-presets-h200.json")["presets"].get(cut, {}).get("triton, 8")  # 32 rows a step
        if larger is not None:
            speed, share = larger["tokens_per_second"], larger["model_flops_utilization"]
            size = larger["peak_memory_gib"] * 2**30
        yield (f"`{cut}`", f"{speed:,.0f}", f"{share:.0%}", f"{size / 1e9:.0f}")
