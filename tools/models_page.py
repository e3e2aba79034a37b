"""docs/models.md: the families, their presets, what each is made of, and how Hugging Face keeps it."""

from penstock.config.model import Model
from penstock.config.presets.registry import PRESETS
from penstock.config.schema import as_toml, every_field, find, leaves
from penstock.config.size import size_of
from penstock.models.huggingface.config import TRAINING_ONLY
from penstock.models.huggingface.families import FAMILIES, LACKING
from penstock.models.huggingface.family import Family
from penstock.models.huggingface.weight_names import rotary_halves
from tools.pages import page, table

SIZES = {"family", "vocab_size", "hidden_size", "layers", "dense_layers", "intermediate_size"}
SIZES |= {"initializer_range", "rms_norm_eps"}
SIZES |= {f"attention.{name}" for name in ("kind", "heads", "kv_heads", "head_dim", "q_lora_rank", "kv_lora_rank")}
SIZES |= {f"attention.{name}" for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
SIZES |= {f"moe.{name}" for name in ("experts", "top_k", "moe_intermediate_size", "shared_expert_intermediate_size")}
"""Fields that say how large a model is and not of what kind."""


def models_page() -> str:
    """The whole page."""
    families = [name for name in FAMILIES if any(make().model.family == name for make in PRESETS.values())]
    return page(
        "models",
        presets=table(("preset", "parameters", "active", "layers", "width", "heads", "experts", "FFN"), _presets()),
        families=table(("family", "presets", "fields that its models set"), map(_family_row, families)),
        forms=table(("family", "`model_type`", "class", "experts are", "differs in"), _forms()),
        values=table(("family", "always set", "required values"), [_said(*item) for item in FAMILIES.items()]),
        lacking=table(
            ("part", "`model_type`"),
            [(part, ", ".join(f"`{one}`" for one in types)) for part, types in LACKING.items()],
        ),
        training=", ".join(f"`model.{path}`".replace(".`", ".*`") for path in TRAINING_ONLY),
    )


def _presets() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, make in PRESETS.items():
        model = make().model
        counted = size_of(model, 4096)
        heads = model.attention
        kinds = {"mla": "MLA", "compressed": "compressed"}
        shape = f"{heads.heads} / {heads.kv_heads}" if heads.kind == "gqa" else f"{heads.heads} {kinds[heads.kind]}"
        rows.append(
            (
                f"`{name}`",
                _billions(counted.parameters),
                _billions(counted.active_parameters) if model.moe else "all",
                _layers(model),
                f"{model.hidden_size}",
                shape,
                "none" if model.moe is None else f"{model.moe.top_k} of {model.moe.experts}",
                _widths(model),
            )
        )
    return rows


def _billions(parameters: int) -> str:
    return f"{parameters / 1e9:,.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} M"


def _layers(model: Model) -> str:
    dense = model.layers - model.moe_layers
    return f"{model.layers}" if dense in (0, model.layers) else f"{model.layers}, {dense} of them dense"


def _widths(model: Model) -> str:
    parts = [f"{model.intermediate_size} dense"] if model.moe_layers < model.layers else []
    if model.moe is not None:
        parts.append(f"{model.moe.moe_intermediate_size}")
        parts += (
            [f"{model.moe.shared_expert_intermediate_size} shared"] if model.moe.shared_expert_intermediate_size else []
        )
    return ", ".join(parts)


def _family_row(family: str) -> tuple[str, ...]:
    presets = {name: make().model for name, make in PRESETS.items() if make().model.family == family}
    values: dict[str, set[str]] = {}
    for model in presets.values():
        for path, value in _set_by(model).items():
            values.setdefault(path, set()).add(as_toml(value).strip('"'))
    shown = "; ".join(f"`{path}` {' or '.join(sorted(found))}" for path, found in values.items())
    return family, ", ".join(f"`{name}`" for name in presets), shown


def _set_by(model: Model) -> dict[str, object]:
    """The fields of a model that are not sizes, nor choices of training, nor what they would be anyway."""
    found = {}
    for path, value in leaves(model).items():
        field = find(Model, path)[0]
        is_usual = not field.required and field.default == value
        if path not in SIZES and not path.startswith(TRAINING_ONLY) and not is_usual:
            found[path] = value
    given = [field.path for field in every_field(Model) if field.optional and field.sections and field.path != "moe"]
    for section in dict.fromkeys(given):
        is_there = any(path.startswith(f"{section}.") for path in leaves(model))
        if is_there and not any(path.startswith(f"{section}.") for path in found):
            found[section] = "as by default"
    return found


def _forms() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, family in FAMILIES.items():
        experts = family.names.get("ffn.experts.gate_up_eFD", ())
        kept = "one tensor each" if any("{expert}" in name for name in experts) else "stacked" if experts else "none"
        forms = (
            ["queries and keys: halves"]
            if rotary_halves in {form for forms in family.forms.values() for form in forms}
            else []
        )
        forms += [
            f"`{ours}`: {', '.join(maker.__name__ for maker in makers)}"
            for ours, makers in family.forms.items()
            if makers != (rotary_halves,)
        ]
        rows.append((name, f"`{family.model_type}`", f"`{family.architecture}`", kept, "; ".join(forms) or "nothing"))
    return rows


def _said(name: str, family: Family) -> tuple[str, ...]:
    always = ", ".join(f"`{path}` {as_toml(value)}".replace('"', "") for path, value in family.always.items())
    fixed = ", ".join(f"`{key}` {as_toml(value)}".replace('"', "") for key, value in family.fixed.items())
    return name, always, fixed
