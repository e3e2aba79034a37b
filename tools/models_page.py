"""docs/models.md: the families, their presets, what each is made of, and how Hugging Face keeps it."""

from penstock.config.model import LatentAttention, Model
from penstock.config.presets.registry import PRESETS
from penstock.config.schema import as_toml, every_field, find, leaves
from penstock.config.size import size_of
from penstock.models.huggingface.config import TRAINING_ONLY
from penstock.models.huggingface.families import FAMILIES, Family
from penstock.models.huggingface.rearrangements import rotary_halves
from tools.hardware_page import table

SIZES = {
    "family",
    "vocab_size",
    "hidden_size",
    "layers",
    "dense_layers",
    "intermediate_size",
    "initializer_range",
    "rms_norm_eps",
}
SIZES |= {f"attention.{name}" for name in ("kind", "heads", "kv_heads", "head_dim", "q_lora_rank", "kv_lora_rank")}
SIZES |= {f"attention.{name}" for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
SIZES |= {f"moe.{name}" for name in ("experts", "top_k", "moe_intermediate_size", "shared_expert_intermediate_size")}
"""Fields that say how large a model is and not of what kind."""


def models_page() -> str:
    """The whole page."""
    families = [name for name in FAMILIES if any(make().model.family == name for make in PRESETS.values())]
    return "\n".join(
        [
            _HEAD,
            *table(("preset", "parameters", "active", "layers", "width", "heads", "experts", "FFN"), _presets()),
            _FAMILIES,
            *table(("family", "presets", "fields that its models set"), [_family_row(name) for name in families]),
            _NAMES,
            *table(("family", "`model_type`", "class", "experts are", "differs in"), _forms()),
            _CONFIG,
            *table(
                ("family", "always set", "required values"), [_said(name, family) for name, family in FAMILIES.items()]
            ),
            _PARTS,
            _END.format(training=", ".join(f"`model.{path}`".replace(".`", ".*`") for path in TRAINING_ONLY)),
        ]
    )


def _presets() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, make in PRESETS.items():
        model = make().model
        counted = size_of(model, 4096)
        heads = model.attention
        shape = f"{heads.heads} MLA" if isinstance(heads, LatentAttention) else f"{heads.heads} / {heads.kv_heads}"
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
    given = [one.path for one in every_field(Model) if one.optional and one.sections and one.path != "moe"]
    for section in dict.fromkeys(given):
        is_there = any(path.startswith(f"{section}.") for path in leaves(model))
        if is_there and not any(path.startswith(f"{section}.") for path in found):
            found[section] = "as by default"
    return found


def _forms() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, family in FAMILIES.items():
        experts = family.names.get("ffn.experts.gate_up_eFD", ())
        kept = "one tensor each" if any("{expert}" in one for one in experts) else "stacked" if experts else "none"
        forms = (
            ["queries and keys: halves"]
            if rotary_halves in {one for many in family.forms.values() for one in many}
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


_HEAD = """# Models

Written by `make docs` from the presets and from
[penstock/models/huggingface/families.py](../penstock/models/huggingface/families.py); change it there.

This page lists the presets, the families to which they belong, and the mapping to Hugging Face checkpoints. All
families use the same decoder class and differ only in config values (`penstock config explain model`). The suffix
`-8l` cuts any preset to its first eight layers; a cut keeps the kind of each layer and at least one layer with
experts:

```bash run
penstock config show qwen3-30b-a3b-8l --toml > mine.toml
```

Cuts that were trained on one H200, with their step time and memory beside what the plan says, are in
[projection](projection.md#every-run).

## Presets

Parameters include the embedding and the output projection, and exclude multi-token prediction; they are counted on
the model that is built, and a test compares them with the published totals. Sizes are those of the published
`config.json` files. Of Llama 4 only the text model is supported. Few training hyperparameters were published; the file
of a preset names the source of its learning rate ([penstock/config/presets](../penstock/config/presets/registry.py)).
"""

_FAMILIES = """
## What a family sets

The table omits sizes and training settings. Fields that are not listed have their [defaults](config.md).
"""

_NAMES = """
## Weights under Hugging Face names

`penstock export` writes files that `transformers` loads, under the published names of weights, and `penstock import`
reads published files ([weights](weights.md)); both are exact bit for bit. In some published files the order of elements
differs from Penstock's; the last column of the table names the differences:

- **halves**: rotary embedding rotates pairs of elements. In Penstock the two elements of a pair are neighbours; in
  the file all first elements of a head precede all second ones. Import and export permute the rows of queries and
  keys, and their biases and norms.
- **transposed**: in the file, a stack of experts is input x output.
- **interleaved**: in the file, rows of the gate and of the up projection alternate; in Penstock all rows of the gate
  come first.

Import ignores image encoders, copies of the embedding and tables of frequencies. It dequantizes experts in MXFP4
(gpt-oss) and matrices in block-scaled float8 (DeepSeek-V3) to bfloat16.
"""

_CONFIG = """
## `config.json`

Export reads its own `config.json` back; if it cannot express the model, it ends with an error that names the field.
Import also reads older keys (`rope_theta`, `rope_scaling`, `text_config`); if Penstock does not support a value,
import ends with an error that names the key. In the table, *always set* are the fields that follow from the family,
and *required values* are the keys for which import accepts only this value:
"""

_PARTS = """
## What is in it

What a model of any family is trained with; each item is a choice in the run file.

- **Text**: plain, JSON Lines, Parquet, Hugging Face datasets, Megatron's `.bin` and `.idx`, compressed files, and
  weighted mixtures ([text](data.md)). Every source resumes at the exact token on any number of ranks.
- **Routing**: softmax before or after top-k, sigmoid with expert bias, groups of experts; auxiliary loss per
  micro-batch, sequence or global batch; dropless, or with a capacity. The metrics show how even each layer's load
  is.
- **Training**: AdamW or Muon ([optimizer](optimizer.md)); bfloat16 with float32 masters; a loss mean that does not
  depend on the number of micro-batches; cosine, linear and WSD schedules. A killed run that resumes equals one that
  was not interrupted, bit for bit on a CPU.
- **Layouts**: FSDP, expert, tensor (with sequence), context and pipeline parallelism, eight pipeline schedules,
  recomputation and offload ([layouts](layouts.md), [schedules](schedules.md)). Attention and experts have separate
  layouts over the same ranks. Any layout resumes the checkpoint of any other.
- **Dispatch**: all-to-all, all-gather, our own kernels that write into the memory of the node's other GPUs, and a
  hierarchical form for several nodes, with or without waits of the host ([dispatch](dispatch.md),
  [overlap](overlap.md), [graphs](graphs.md)).
- **8 bits**: dense products, experts, the output projection, rows sent to experts and FSDP's gathers, each off by
  default, in five recipes ([8 bits](float8.md)).
- **Kernels**: each operator has an eager definition and a Triton kernel. Tests run the kernels in Triton's
  interpreter on a CPU, and compile them for NVIDIA and AMD GPUs ([kernels](kernels.md)).
"""

_END = """
`config.json` has no training settings: {training} have their defaults after import.

## Tests, and how to add a family

The tests compare logits, loss and every gradient of each family with `transformers` on tiny random models, in plain
rows and in packed rows ([numerics](numerics.md)), and the loss on one rank with that on several. How to add a family,
file by file: [the recipe](../CONTRIBUTING.md#add-a-family-of-hugging-face). Commands, layouts and speeds of each
family: [families](families.md). """
