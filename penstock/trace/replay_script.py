"""The text of a script that runs one operator as it was recorded. Everything that it needs is in it.

A script has four parts: what makes tensors of a size, stride and dtype; what finds the overload of the operator (a
trace has all arguments in order, those after the star too, and PyTorch wants these by name); the call; and the clock.
The schema is known only to PyTorch, so the overload is found when the script runs.
"""

from collections.abc import Sequence

from penstock.trace.recorded_call import Argument, TensorArgument

TENSORS = '''
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensor(dtype, size, stride, below=None, device=DEVICE):
    """Random values; integers are at least 0 and less than `below`."""
    elements = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in zip(size, stride))
    if below is not None:
        values = torch.randint(below, (elements,), device=device).to(dtype)
    elif "float4" in str(dtype) or "e8m0" in str(dtype):
        values = torch.randint(120, 130, (elements,), dtype=torch.uint8, device=device).view(dtype)
    else:
        values = torch.randn(elements, device=device).to(dtype)
    return values.as_strided(size, stride)
'''

CLOCK = '''
def median_us(run, warm_up=10, times=50):
    """Median time of a call, in microseconds: on the GPU's clock if there is one."""
    for _ in range(warm_up):
        run()
    samples = []
    for _ in range(times):
        if DEVICE == "cpu":
            start = time.perf_counter()
            run()
            samples.append((time.perf_counter() - start) * 1e6)
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3)
    return statistics.median(samples)
'''

OVERLOAD = '''
def fits(slot, value):
    """Whether a parameter of a schema takes a recorded value; None is also what the trace does not hold."""
    kind = str(slot.type)
    if value is None:
        return slot.has_default_value() or kind.startswith("Optional")
    if isinstance(value, torch.Tensor):
        return kind in ("Tensor", "Optional[Tensor]")
    if isinstance(value, tuple):
        return kind in ("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]")
    if "Tensor" in kind:
        return False
    if isinstance(value, list):
        return "List" in kind and not (kind.endswith("List[int]") and any(isinstance(one, float) for one in value))
    if isinstance(value, bool):
        return "bool" in kind or "number" in kind
    if isinstance(value, float):
        return "float" in kind or "number" in kind
    return "List" not in kind and "str" not in kind


def bind(name, values):
    """The call of the first overload that takes the values, in the order of the schema."""
    namespace, operator = name.split("::")
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if packet is None:
        sys.exit(f"this PyTorch has no {name}: import the library that brings it at the top of this file")
    overloads = [getattr(packet, one) for one in packet.overloads()]
    for overload in sorted(overloads, key=lambda one: len(one._schema.arguments)):
        slots = overload._schema.arguments
        rest = slots[len(values):]
        if len(values) > len(slots) or not all(map(fits, slots, values)) or not all(fits(slot, None) for slot in rest):
            continue
        taken = [slot.default_value if value is None else value for slot, value in zip(slots, values)]
        taken = [list(value) if isinstance(value, tuple) else value for value in taken]
        if not any(isinstance(value, torch.Tensor | tuple) for value in values):
            taken = [DEVICE if str(slot.type) == "Optional[Device]" else value for slot, value in zip(slots, taken)]
        positional = [value for slot, value in zip(slots, taken) if not slot.kwarg_only]
        by_name = {slot.name: value for slot, value in zip(slots, taken) if slot.kwarg_only}
        return lambda: overload(*positional, **by_name)
    sys.exit(f"no overload of {name} takes what the trace holds; it has: " + ", ".join(packet.overloads()))
'''


def operator_script(name: str, arguments: Sequence[Argument], *, seen: Sequence[str], recorded_us: float) -> str:
    """A script that runs one of PyTorch's operators.

    Args:
        name: of its schema, `aten::mm`.
        arguments: what it was called with.
        seen: lines for the script's docstring: where and how often the trace has it, what was made up.
        recorded_us: median GPU time of a call in the trace.
    """
    values = ",\n".join(f"    {literal(one)}" for one in arguments)
    return (
        head(name, seen, run="python")
        + "import statistics\nimport sys\nimport time\n\nimport torch\n"
        + TENSORS
        + "\n"
        + OVERLOAD
        + "\n"
        + CLOCK
        + f"\n\nrun = bind(\n    {name!r},\n    [\n{_indented(values)},\n    ],\n)\n"
        + report(name, recorded_us)
    )


def head(name: str, seen: Sequence[str], *, run: str) -> str:
    """The docstring of a script."""
    lines = "\n".join(seen)
    return (
        f'"""{name} as a trace has it, with random values. Written by `penstock trace replay`; run it with `{run}`.\n\n'
        f'{lines}\n"""\n\n'
    )


def report(name: str, recorded_us: float) -> str:
    """The lines that run the clock and print what it says; `run` is the call."""
    return f'print(f"{name}: {{median_us(run):.1f}} us on {{DEVICE}}, {recorded_us:.1f} us in the trace")\n'


def literal(argument: Argument) -> str:
    """An argument as Python that has `torch` and `tensor`."""
    if isinstance(argument, TensorArgument):
        return _tensor_literal(argument)
    if isinstance(argument, tuple):
        return f"({', '.join(map(_tensor_literal, argument))}{',' if len(argument) == 1 else ''})"
    if isinstance(argument, float) and (argument != argument or abs(argument) == float("inf")):
        return f'float("{argument}")'
    return repr(argument)


def _tensor_literal(argument: TensorArgument) -> str:
    if argument.values is not None:
        return f"torch.tensor({list(argument.values)}, dtype=torch.{argument.dtype}, device=DEVICE)"
    if argument.is_number:
        return f"torch.tensor(1, dtype=torch.{argument.dtype})"
    below = "" if argument.below is None else f", below={argument.below}"
    return f"tensor(torch.{argument.dtype}, {argument.size}, {argument.stride}{below})"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))
