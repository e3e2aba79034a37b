"""The text of a script that runs one of our own operators (penstock.kernels), forward or backward, as it was recorded.

Our kernels stand in autograd functions, whose name and arguments the profiler records. `RECIPES` says, for each of
these, how to call the function that applies it. Arguments that are not tensors or numbers (tile sizes, sums to
accumulate into) are not recorded: the script takes the defaults. What 8 bits need is in `penstock.trace.replay_float8`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.base.errors import TraceError
from penstock.trace import replay_float8
from penstock.trace.recorded_call import Argument, TensorArgument, rows_of_groups
from penstock.trace.replay_script import CLOCK, TENSORS, head, literal, report

BACKWARD = "Backward"
"""What PyTorch appends to the name of an autograd function for its backward."""

_FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to call what an autograd function is part of.

    Attributes:
        package: of penstock.
        module: of the package.
        call: arguments in braces, by their place in the autograd function; `order` is a RowOrder.
        counts: place of the rows of each expert, None if there are none.
        rows: place of the tensor whose first dim counts the rows that these add up to, and of one that replaces it if
            it is there.
        bounds: for integers that index something: their place, and the place and dim of what they index.
        with_residual: the call if there is a second argument; empty if that makes no difference.
        most: arguments that are recorded of ours; functions of the same name in other libraries have more.
        float8: knob of the configuration that names the recipe, for what computes in 8 bits; None for others.
        setup: lines behind the `rule` that 8 bits are computed by.
    """

    package: str = "kernels"
    module: str
    call: str
    counts: int | None = None
    rows: tuple[int, ...] = ()
    bounds: tuple[tuple[int, int, int], ...] = ()
    with_residual: str = ""
    most: int | None = None
    float8: replay_float8.Knob | None = None
    setup: str = ""


RECIPES: dict[str, Recipe] = {
    "_RmsNorm": Recipe(module="norm", call="rms_norm({0}, {2}, {3})", with_residual="add_rms_norm({0}, {1}, {2}, {3})"),
    "_RmsNormBeside": Recipe(module="norm", call="rms_norm_beside({0}, {2}, {3})"),
    "_AddThree": Recipe(module="sums", call="add_three({0}, {1}, {2})"),
    "_FanOut": Recipe(module="sums", call="fan_out({0})"),
    "_Swiglu": Recipe(module="swiglu", call="swiglu({0}, {1})"),
    "_Rotate": Recipe(module="rope", call="rotate({0}, {1}, {2})"),
    "_MlaHeads": Recipe(module="rope", call="mla_heads({0}, {1}, {2}, {3}, {4})"),
    "_GroupedGemm": Recipe(
        module="grouped_gemm", call="grouped_gemm({0}, {1}, {2}, {3})", counts=2, rows=(0, 3), bounds=((3, 0, 0),)
    ),
    "_ExpertFfn": Recipe(
        module="expert_ffn",
        call="expert_ffn({0}, {1}, {2}, {3}, {4}, {5})",
        counts=3,
        rows=(0, 5),
        bounds=((5, 0, 0),),
    ),
    "_Permute": Recipe(module="permute", call="permute({0}, order)", counts=2, rows=(1,)),
    "_Unpermute": Recipe(module="permute", call="unpermute({0}, order, {1})", counts=3, rows=(2,)),
    "_LinearCrossEntropy": Recipe(
        module="linear_cross_entropy", call="linear_cross_entropy({0}, {1}, {2})", bounds=((2, 1, 0),)
    ),
    "_LinearInParts": Recipe(module="float32_products", call="linear_in_parts({0}, {1})"),
    "_Float8ExpertFfn": Recipe(
        package="kernels.float8",
        module="expert_ffn",
        call="expert_ffn({0}, {1}, {2}, {3}, {4}, {5}, float8=rule, copies=copies)",
        counts=3,
        rows=(0, 5),
        bounds=((5, 0, 0),),
        float8="experts",
        setup=replay_float8.COPIES,
    ),
    "_Float8Linear": Recipe(
        package="models",
        module="float8_linear",
        call="float8_linear({0}, weight, {2}, ready)",
        most=4,
        float8="dense",
        setup=replay_float8.LINEAR,
    ),
    "_Float8Network": Recipe(
        package="models",
        module="float8_linear",
        call="float8_swiglu_network({0}, gate_up, down, ready)",
        most=5,
        float8="dense",
        setup=replay_float8.NETWORK,
    ),
    "_Float8Norm": Recipe(
        package="kernels.float8",
        module="norm",
        call="rms_norm({0}, {2}, {3}, RECIPE, rule.forward, columns=True)[0]",
        with_residual="add_rms_norm({0}, {1}, {2}, {3}, RECIPE, rule.forward, columns=True)[:2]",
        most=4,
        float8="dense",
    ),
    "_Float8NormBeside": Recipe(
        package="kernels.float8",
        module="norm",
        call="rms_norm_beside({0}, {2}, {3}, RECIPE, rule.forward, columns=True)[:2]",
        most=4,
        float8="dense",
    ),
    "_LatentHeads": Recipe(
        package="kernels.float8",
        module="latent_heads",
        call="mla_heads({0}, {1}, {2}, {3}, {4}, handed, rule.gradient)",
        most=6,
        float8="dense",
        setup=replay_float8.HANDED,
    ),
}
"""By the name of the autograd function."""

_ORDER = '''
def shuffled_order(counts, tokens, top_k):
    """Tokens sent to experts at random, so that each expert has its count."""
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    experts = experts[torch.randperm(len(experts))].view(tokens, top_k)
    return permute.order_rows(experts.to(DEVICE), len(counts))

'''

_BACKWARD = """outputs = outputs if isinstance(outputs, tuple) else (outputs,)
outputs = [one for one in outputs if one is not None and one.requires_grad]
gradients = [torch.randn_like(one) for one in outputs]
inputs = [one for one in arguments if isinstance(one, torch.Tensor) and one.requires_grad]


def run():
    torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)


"""


def is_ours(name: str) -> bool:
    """Whether an operator's name is one of our autograd functions, or the backward of one."""
    return name.removesuffix(BACKWARD) in RECIPES


def kernel_script(
    name: str,
    arguments: Sequence[Argument],
    *,
    counts: Sequence[int] | None,
    seen: Sequence[str],
    recorded_us: float,
    header: Mapping[str, Any],
) -> str:
    """A script that runs one of our operators.

    Args:
        name: of the autograd function, with `Backward` for its backward.
        arguments: of its forward.
        counts: rows of each expert; None makes them even.
        seen: lines for the script's docstring.
        recorded_us: median GPU time of a call in the trace.
        header: of the trace; may hold a configuration.

    Raises:
        TraceError: the arguments are not those of this version's function, or the counts do not fit.
    """
    recipe = RECIPES[name.removesuffix(BACKWARD)]
    if recipe.with_residual and len(arguments) > 1 and arguments[1] is not None:
        recipe = replace(recipe, call=recipe.with_residual)
    places = [int(place) for place in _places(recipe.call)]
    needed = [*places, *recipe.rows[:1], *([] if recipe.counts is None else [recipe.counts])]
    if max(needed) >= len(arguments) or (recipe.most is not None and len(arguments) > recipe.most):
        raise TraceError(f"{name} was recorded by another version: it has {len(arguments)} arguments")
    values, order = _exact(name, recipe, list(arguments), counts)
    rule, told = ("", "") if recipe.float8 is None else replay_float8.rule_text(header, recipe.float8)
    imports = "" if recipe.float8 is None else replay_float8.IMPORTS
    listed = ",\n".join(f"    {_with_gradient(one)}" for one in values)
    call = recipe.call.format(*(f"arguments[{place}]" for place in range(len(values))))
    return (
        head(name, [*seen, *filter(None, [told])], run="python")
        + "import os\nimport statistics\nimport time\n\nimport torch\n\n"
        + 'if not torch.cuda.is_available():\n    os.environ.setdefault("TRITON_INTERPRET", "1")\n'
        + f"{imports}from penstock.{recipe.package} import {recipe.module}  # noqa: E402\n"
        + TENSORS
        + CLOCK
        + (_ORDER if order else "\n")
        + f"\narguments = [\n{listed},\n]\n{order}{rule}{recipe.setup}"
        + (f"outputs = {recipe.module}.{call}\n{_BACKWARD}" if name.endswith(BACKWARD) else _forward(recipe, call))
        + report(name, recorded_us)
    )


def _forward(recipe: Recipe, call: str) -> str:
    return f"\n\ndef run():\n    {recipe.module}.{call}\n\n\n"


def _places(call: str) -> list[str]:
    return [part.split("}")[0] for part in call.split("{")[1:]]


def _with_gradient(argument: Argument) -> str:
    is_float = isinstance(argument, TensorArgument) and argument.dtype in _FLOATS
    return literal(argument) + (".requires_grad_()" if is_float else "")


def _exact(
    name: str, recipe: Recipe, values: list[Argument], counts: Sequence[int] | None
) -> tuple[list[Argument], str]:
    """Arguments with their counts and bounds; and the line that makes an order, if the call takes one."""
    for place, source, dim in recipe.bounds:
        index, indexed = values[place], values[source]
        if isinstance(index, TensorArgument) and isinstance(indexed, TensorArgument):
            values[place] = replace(index, below=max(1, indexed.size[dim]))
    if recipe.counts is None:
        if counts is not None:
            raise TraceError(f"{name} takes no rows of experts", fix="leave --counts out")
        return values, ""
    counted = values[recipe.counts]
    sources = [values[place] for place in recipe.rows if place < len(values)]
    sized = [one for one in sources if isinstance(one, TensorArgument)]
    if not isinstance(counted, TensorArgument) or not sized:
        raise TraceError(f"{name} was recorded by another version: its counts are not where they should be")
    size = sized[-1].size
    is_order = "order" in recipe.call
    rows = size[0] * size[1] if is_order else size[0]
    known = rows_of_groups(rows, counted.size[0], counts)
    values[recipe.counts] = replace(counted, values=tuple(known))
    return values, f"order = shuffled_order({known}, {size[0]}, {size[1]})\n" if is_order else ""
