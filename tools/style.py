"""The house rules that ruff and pyrefly cannot say, as small functions over one parsed file each.

A rule takes a `Source` and yields `(line, message)`. `findings` runs every rule over every Python file of the
repository and adds four rules about the whole: the ninetieth percentile of function lengths of penstock/, that no two
of its public classes share a name, that none of its values has a name that says nothing, and the lines that each folder
may have (pyproject.toml).

    python tools/style.py            # prints `path:line: rule: message`, exits with 1 if there is any

What ruff says already stands in pyproject.toml: docstrings, names, complexity, parameters, print, broad except, pickle,
exec, global, commented code, relative imports, the environment outside of its reader.
"""

import ast
import gc
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from penstock.base.shapes import LEGEND

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("penstock", "tests", "benchmarks", "tools")

FILE_LINES = 600
FUNCTION_LINES = 80
KERNEL_LINES = 120
FUNCTION_LINES_P90 = 40
DOCSTRING_LINES = 30
CLOSENESS = "tests/closeness.py"
BY_ELEMENT = frozenset({"assert_close", "allclose", "isclose", "assert_allclose", "assert_array_almost_equal"})
EMPTY_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "manager", "misc"})
EMPTY_VALUES = frozenset({"found", "told", "own", "most", "place", "words", "one"})
EMPTY_VALUES_LEFT = 23
"""Fields of records that still have such a name; a value is named after what it is."""

PEOPLE = re.compile(r"\b(who|whom|whoever|nobody|somebody)\b", re.IGNORECASE)
"""The subject of a sentence is a part of the program: the rank, the kernel, the caller."""

FILLER = re.compile(r"^\s*\w+: (likewise|of it|of them|the same|its own|that|which one)\.?$", re.MULTILINE)
"""An entry of Args or Attributes that says nothing."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[["Source"], Iterator[tuple[int, str]]]


@dataclass(frozen=True)
class Source:
    """One Python file: path relative to the root with forward slashes, text, syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def is_product(self) -> bool:
        """The file is part of the installed package."""
        return self.path.startswith("penstock/")

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The whole tree: to walk it once for each rule takes most of the time of all."""
        return tuple(ast.walk(self.tree))

    @property
    def functions(self) -> list[Function]:
        """Every function and method, nested ones included."""
        return [node for node in self.nodes if isinstance(node, Function)]


class Finding(NamedTuple):
    """A line that breaks a rule."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def parse(path: str, text: str) -> Source:
    """Source of a text at a path relative to the root, with forward slashes."""
    return Source(path, text, ast.parse(text, filename=path))


def is_kernel(function: Function) -> bool:
    """The function is compiled by Triton: decorated with `triton.jit`, with or without arguments."""
    names = {ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list}
    return bool(names & {"triton.jit", "jit", "gluon.jit"})


def length(function: Function) -> int:
    """Lines from `def` to the end: signature and docstring count, decorators do not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def line_of(node: ast.AST) -> int:
    """First line of a node; 1 for the nodes that have no place."""
    return node.lineno if isinstance(node, ast.expr | ast.stmt) else 1


def file_is_short(source: Source) -> Iterator[tuple[int, str]]:
    """A file can be read in one sitting."""
    lines = source.text.count("\n")
    if lines > FILE_LINES:
        yield lines, f"{lines} lines, at most {FILE_LINES}"


def function_is_short(source: Source) -> Iterator[tuple[int, str]]:
    """A function fits on a screen; a Triton kernel on two."""
    for function in source.functions:
        limit = KERNEL_LINES if is_kernel(function) else FUNCTION_LINES
        if length(function) > limit:
            yield function.lineno, f"{function.name} has {length(function)} lines, at most {limit}"


def module_says_what_it_is(source: Source) -> Iterator[tuple[int, str]]:
    """Every module opens with a docstring, short enough to be read; longer reasons go to docs/decisions."""
    docstring = ast.get_docstring(source.tree)
    if not source.tree.body:
        return
    if docstring is None:
        yield 1, "no module docstring"
    elif docstring.count("\n") + 1 > DOCSTRING_LINES:
        yield 1, f"module docstring has {docstring.count(chr(10)) + 1} lines, at most {DOCSTRING_LINES}"


def package_holds_no_code(source: Source) -> Iterator[tuple[int, str]]:
    """`__init__.py` is a docstring only; that of the package also has the version, and imports names lazily."""
    if not source.path.endswith("/__init__.py"):
        return
    for node in source.tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not (source.path == "penstock/__init__.py" and _is_lazy(node)):
            yield node.lineno, "code in __init__.py"


def _is_lazy(node: ast.stmt) -> bool:
    """A statement of penstock/__init__.py that imports nothing of the package when it is executed."""
    match node:
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.UnaryOp(operand=ast.Name("TYPE_CHECKING"))):
            return True
        case ast.FunctionDef():
            return node.name in ("__getattr__", "__dir__")
        case ast.ImportFrom():
            return node.module in ("importlib", "typing")
        case ast.Assign(targets=[ast.Name(name)]):
            return name in ("__version__", "_MODULES")
    return False


def text_is_ascii(source: Source) -> Iterator[tuple[int, str]]:
    """Code is ASCII; a test that needs other characters writes them as escapes."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if not line.isascii():
            strange = next(character for character in line if not character.isascii())
            yield number, f"character {strange!a}"


def name_says_something(source: Source) -> Iterator[tuple[int, str]]:
    """No file and no class is named for being of use."""
    for part in source.path.removesuffix(".py").split("/"):
        if EMPTY_NAMES & set(part.split("_")):
            yield 1, f"file or folder {part!r}"
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and node.name.lower().endswith(("utils", "helper", "helpers", "manager")):
            yield node.lineno, f"class {node.name}"


def assert_speaks(source: Source) -> Iterator[tuple[int, str]]:
    """An assert of the product has a message. pytest writes the messages of tests."""
    if not source.is_product:
        return
    for node in source.nodes:
        if isinstance(node, ast.Assert) and node.msg is None:
            yield node.lineno, "assert without a message"


def attribute_has_no_default(source: Source) -> Iterator[tuple[int, str]]:
    """`getattr(x, "name", default)` hides whether `x` has the attribute; our own objects always know."""
    if not source.is_product:
        return
    for node in source.nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "getattr" and len(node.args) == 3:
            yield node.lineno, "getattr with a default"


def module_keeps_no_state(source: Source) -> Iterator[tuple[int, str]]:
    """No empty container stands at module level waiting to be filled."""
    if not source.is_product:
        return
    for node in source.tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        if ast.unparse(node.value) in {"[]", "{}", "set()", "dict()", "list()", "defaultdict(list)"}:
            yield node.lineno, f"global mutable state: {ast.unparse(node)}"


def others_are_not_changed(source: Source) -> Iterator[tuple[int, str]]:
    """No value of ours is put into a module that is not ours; switches may be set to a constant, or put back."""
    if not source.is_product:
        return
    imported = {
        (alias.asname or alias.name).split(".")[0]
        for node in source.nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    kept: set[tuple[str, str]] = set()  # a name, and the attribute that it has the value of
    for node in source.nodes:
        if not isinstance(node, ast.Assign) or isinstance(node.value, ast.Constant):
            continue
        value = ast.unparse(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                kept.add((target.id, value))
            elif (
                isinstance(target, ast.Attribute)
                and ast.unparse(target).split(".")[0] in imported
                and (value, ast.unparse(target)) not in kept
            ):
                yield node.lineno, f"assigns to {ast.unparse(target)}"


def function_is_typed(source: Source) -> Iterator[tuple[int, str]]:
    """Every function is fully typed. pyrefly leaves the kernels folder out for Triton's sake; only kernels may be."""
    if not source.is_product:
        return
    for function in source.functions:
        if is_kernel(function):
            continue
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
        bare = [a.arg for a in (*named, *starred) if a.annotation is None and a.arg not in {"self", "cls"}]
        if bare or (function.returns is None and function.name != "__init__"):
            yield function.lineno, f"{function.name} is not fully typed ({', '.join(bare) or 'return value'})"


def shape_letters_are_in_the_legend(source: Source) -> Iterator[tuple[int, str]]:
    """The capitals at the end of a tensor's name stand in `penstock/base/shapes.py`; a small one is one rank's part."""
    if not source.is_product:
        return
    inside_kernels = {id(node) for function in source.functions if is_kernel(function) for node in ast.walk(function)}
    seen: set[str] = set()
    for node in source.nodes:
        if id(node) in inside_kernels or not isinstance(node, ast.Name | ast.arg):
            continue
        name = node.id if isinstance(node, ast.Name) else node.arg
        stem, _, suffix = name.rpartition("_")
        if not stem or not stem.strip("_").islower() or not suffix[:1].isalpha() or suffix.islower() or name in seen:
            continue
        seen.add(name)
        strange = {letter for letter in suffix if not letter.isdigit() and letter.upper() not in LEGEND}
        if strange:
            yield line_of(node), f"{name}: {', '.join(sorted(strange))} is not in the legend of dimensions"


def numbers_are_compared_by_size(source: Source) -> Iterator[tuple[int, str]]:
    """Tests compare tensors by norm or largest magnitude; element by element small ones depend on the processor."""
    if not source.path.startswith("tests/") or source.path == CLOSENESS:
        return
    advice = f"compares by element; take {CLOSENESS}"
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and node.attr in BY_ELEMENT:
            if ast.unparse(node.value) not in {"math", "closeness"}:
                yield node.lineno, f"{ast.unparse(node)} {advice}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {"torch", "numpy"}:
            for alias in node.names:
                if alias.name in BY_ELEMENT:
                    yield node.lineno, f"{node.module}.{alias.name} {advice}"
        elif isinstance(node, ast.Compare):
            left, right = (ast.unparse(side) for side in (node.left, node.comparators[0]))
            if (left.endswith(".tolist()") and "approx(" in right) or left.endswith(".abs().max()"):
                yield node.lineno, f"{left} {advice}"


def prose_is_plain(source: Source) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and messages name parts of the program, and no docstring entry is filler."""
    if not PEOPLE.search(source.text) and not FILLER.search(source.text):
        return
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and (found := PEOPLE.search(token.string)):
            yield token.start[0], f"a comment says {found[0]!r}"
    for node in source.nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or " " not in node.value:
            continue
        if found := PEOPLE.search(node.value):
            yield node.lineno + node.value[: found.start()].count("\n"), f"a text says {found[0]!r}"
        if found := FILLER.search(node.value):
            line = node.lineno + node.value[: found.start()].count("\n")
            yield line, f"{found[0].strip()!r} adds nothing: leave the entry out"


_LITTLE = frozenset(
    {"a", "an", "the", "of", "to", "in", "on", "for", "and", "or", "as", "is", "are", "be", "by", "with", "from", "at"}
    | {"it", "its", "that", "this", "all", "each", "every", "returns"}
)
"""Words without which a docstring says as much."""


def docstring_adds_to_the_name(source: Source) -> Iterator[tuple[int, str]]:
    """A docstring of one line says more than the names of the function, its arguments and its types."""
    for function in source.functions if source.is_product else ():
        docstring = ast.get_docstring(function)
        if docstring is None or "\n" in docstring or "`" in docstring or len(function.body) == 1:
            continue
        signature = f"{function.name} {ast.unparse(function.args)}"
        signature += "" if function.returns is None else f" {ast.unparse(function.returns)}"
        if _stems(docstring) <= _stems(re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", signature)):
            yield function.body[0].lineno, f"the docstring of {function.name} says no more than its name: leave it out"


def _stems(text: str) -> set[str]:
    terms = {word.lower() for word in re.findall(r"[A-Za-z]+", text)} - _LITTLE
    return {re.sub(r"(?<=\w{3})(ing|ed|es|s)$", "", term) for term in terms}


RULES: tuple[Rule, ...] = (
    file_is_short,
    function_is_short,
    module_says_what_it_is,
    package_holds_no_code,
    text_is_ascii,
    name_says_something,
    assert_speaks,
    attribute_has_no_default,
    module_keeps_no_state,
    others_are_not_changed,
    function_is_typed,
    shape_letters_are_in_the_legend,
    numbers_are_compared_by_size,
    prose_is_plain,
    docstring_adds_to_the_name,
)


def findings_of(source: Source) -> list[Finding]:
    """Everything that one file breaks."""
    broken = [Finding(source.path, line, rule.__name__, text) for rule in RULES for line, text in rule(source)]
    vars(source).pop("nodes", None)  # of a thousand files they are gigabytes
    return broken


def functions_are_short_as_a_rule(sources: Sequence[Source]) -> list[Finding]:
    """Nine of ten functions of the product stay well under the limit, so that the limit stays an exception."""
    lengths = sorted(length(f) for source in sources if source.is_product for f in source.functions)
    p90 = lengths[int(0.9 * (len(lengths) - 1))] if lengths else 0
    message = f"p90 is {p90} lines, at most {FUNCTION_LINES_P90}"
    return [Finding("penstock", 0, "functions_are_short_as_a_rule", message)] if p90 > FUNCTION_LINES_P90 else []


def public_classes_have_names_of_their_own(sources: Sequence[Source]) -> list[Finding]:
    """A search for a class finds one."""
    places = defaultdict(list)
    for source in sources:
        for node in source.tree.body if source.is_product else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append((source.path, node.lineno))
    rule = "public_classes_have_names_of_their_own"
    return [
        Finding(path, line, rule, f"class {name} is also in {', '.join(other for other, _ in found if other != path)}")
        for name, found in places.items()
        if len(found) > 1
        for path, line in found
    ]


def values_are_named_after_what_they_are(sources: Sequence[Source], left: int = EMPTY_VALUES_LEFT) -> list[Finding]:
    """`found`, `told`, `one` and the like say nothing of a value; no line of the product adds one."""
    bound = [
        (source.path, line, name)
        for source in sources
        for line, name in (_bound_names(source) if source.is_product else ())
        if name in EMPTY_VALUES
    ]
    rule = "values_are_named_after_what_they_are"
    return [Finding(path, line, rule, f"{name} says nothing") for path, line, name in bound if len(bound) > left]


def _bound_names(source: Source) -> Iterator[tuple[int, str]]:
    """Lines and names of variables, parameters and fields."""
    for node in ast.walk(source.tree):  # not `source.nodes`, which would stay for all files together
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def folders_keep_their_budget(sources: Sequence[Source], budgets: Mapping[str, int]) -> list[Finding]:
    """Each folder has at most the lines that pyproject.toml gives it, and each folder of the product has a budget."""
    lines: Counter[str] = Counter()
    for source in sources:
        folder = source.path.rpartition("/")[0]
        lines["/".join(folder.split("/")[: 2 if source.is_product else 1])] += len(source.text.splitlines())
    rule, where = "folders_keep_their_budget", "docs/decisions/0173-size.md"
    return [
        Finding("pyproject.toml", 0, rule, f"{folder} has {count} lines, at most {budgets.get(folder, 0)}; see {where}")
        for folder, count in sorted(lines.items())
        if folder != "penstock" and count > budgets.get(folder, 0)
    ]


@cache
def sources(root: Path = ROOT) -> tuple[Source, ...]:
    """Every Python file of the repository's own folders, in a fixed order; read once."""
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    gc.disable()  # trees are millions of objects and no garbage; looking through them takes longer than all the rest
    try:
        return tuple(parse(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in paths)
    finally:
        gc.enable()


def findings(root: Path = ROOT) -> list[Finding]:
    """Everything that the repository breaks."""
    files = sources(root)
    budgets = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["penstock"]["lines"]
    about_the_whole = [
        *functions_are_short_as_a_rule(files),
        *public_classes_have_names_of_their_own(files),
        *values_are_named_after_what_they_are(files),
        *folders_keep_their_budget(files, budgets),
    ]
    return [finding for source in files for finding in findings_of(source)] + about_the_whole


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    sources(ROOT)
    gc.disable()  # nothing here is garbage before the end
    broken = findings(ROOT)
    print(*broken, sep="\n", end="\n" if broken else "")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
