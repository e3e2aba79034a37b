"""Command lines that are wrong, drawn with a seed from the verbs' own declarations and from the schema of a run.

Every call is wrong by construction: an option that there is not, a value of another type or out of range, a file that
is missing, damaged, of another kind or far too large, options that exclude each other, a layout that does not fit, a
model of absurd size. `calls` draws so many of them, evenly over verbs and kinds; `attempt` runs one in a process of its
own that has little memory, and says what is wrong with how it ended.
"""

import json
import os
import random
import resource
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from penstock.cli.main import VERBS
from penstock.config import versions
from penstock.config.presets.registry import PRESETS
from penstock.config.run import Run
from penstock.config.schema import Field, every_field
from tests import warm
from tests.cli.bad_material import CONTRADICTIONS, RUN

SEED = 20  # of the calls that are drawn
MOST_SECONDS = 20.0  # of the processor
MOST_BYTES = 4 * 10**9  # of memory
# Seconds of the clock. What is judged are seconds of the processor: other programs may keep it busy.
KILLED_AFTER = 300.0

OTHER_NAMES = Path(versions.__file__).with_name("other_names.json")
LONG = "x" * 5000  # longer than a message may be
NOT_A_NUMBER = ("banana", "", "1.5.2", "0x10", "--", "1e", "nan ", LONG, "\u221e", "[1]")
STRANGE_NAMES = (
    *("debgu", "", " ", "nowhere/to/be/found", "missing.toml", "debug-0l", "debug-99999l", "\u6c34\u95f8", LONG),
)

Words = tuple[str, ...]
Kind = Callable[[], Iterator["BadCall"]]


@dataclass(frozen=True)
class BadCall:
    """A command line, and why it is wrong."""

    words: Words
    why: str

    @property
    def verb(self) -> str:
        """The first word: calls are drawn evenly over these."""
        return self.words[0]


@dataclass(frozen=True)
class Ended:
    """How a call ended, and what is wrong with that."""

    call: BadCall
    seconds: float
    peak_bytes: float
    faults: tuple[str, ...]
    error: str

    def __str__(self) -> str:
        shown = shlex.join(word if len(word) < 200 else f"{word[:40]}...({len(word)})" for word in self.call.words)
        head = f"penstock {shown}   # {self.call.why}: {self.seconds:.1f} s, {self.peak_bytes / 1e9:.1f} GB"
        return "\n".join([head, *(f"    FAULT {fault}" for fault in self.faults), f"    {self.error[-1500:]}"])


def _files(ending: str) -> tuple[str, ...]:
    """Files of a kind that cannot be used by anything."""
    kinds = ("binary", "empty", "folder", "dangling", "loop", "huge", "missing")
    return tuple(f"M/{kind}.{ending}" for kind in kinds)


TOML = (
    *_files("toml"),
    *(f"M/{name}.toml" for name in ["cut", "damaged", "deep", "digits", "key", "preset", "type", "version", "latin"]),
)
TARGETS = (*TOML, *STRANGE_NAMES, "M/folder", "M/damaged-run", "M/good.jsonl", "/dev/zero", "/dev/null")
HARDWARE = (*_files("toml"), "M/damaged.toml", "M/deep.toml", "M/digits.toml", "M/latin.toml", "M/key.toml")
TRACES = (
    *_files("json"),
    *(f"M/{name}.json" for name in ["cut", "deep", "list", "null", "text", "events", "other"]),
    *(f"M/{name}.json.gz" for name in ["binary", "empty", "cut", "bomb", "huge"]),
    *("M/folder", "M/traces", "M/run", "/dev/zero", "/dev/null", "", LONG),
)
TEXTS = (*_files("jsonl"), "M/number.jsonl", "M/field.jsonl", "M/cut.jsonl", "M/latin.jsonl", "M/*.nothing", "")
TOKENIZERS = (
    *_files("json"),
    *_files("model"),
    *(f"M/{name}.json" for name in ["cut", "deep", "list", "null", "other"]),
    *("M/folder", "M/weights", "banana", LONG),
)
CLUSTERS = (
    *("", "8", "xH200", "0xH200", "-8xH200", "8xBanana", "nanxH200", "1e9xH200", "8.5xH200", "8 x H200", "12xH200"),
    *("8x", "8xH200xH200", f"{'9' * 5000}xH200", "\u0664\u0662xBanana", "1000000001xH200"),
    *(f"8x{name}" for name in HARDWARE),
)
OUTPUTS = ("M/folder", "nowhere/there/{}", "/proc/nothing/{}", f"{LONG}.{{}}", "M/binary.txt/{}", "/dev/full/{}")

# A call of each verb to which one wrong thing is done. Verbs that are not here get their name alone.
SHORT = {
    "init": "init new.toml --model debug",
    "train": f"train {RUN} --dry-run",
    "import": "import M/weights --output out",
    "export": "export M/run out",
    "evaluate": "evaluate M/run",
    "launch slurm": f"launch slurm {RUN} --nodes 1 --gpus-per-node 1",
    "launch kubernetes": f"launch kubernetes {RUN} --nodes 1 --gpus-per-node 1 --image penstock --claim work",
    "data inspect": f"data inspect {RUN}",
    "data pack": "data pack M/good.jsonl --output packed --tokenizer bytes --processes 1",
    "data tokenizer train": "data tokenizer train M/good.jsonl --vocabulary 300 --output new.json",
    "config explain": "config explain model",
    "config diff": f"config diff {RUN} debug",
    "config validate": f"config validate {RUN}",
    "config show": f"config show {RUN}",
    "layout": f"layout {RUN}",
    "plan": f"plan {RUN} --on 8xH200",
    "trace diff": "trace diff M/events.json M/events.json",
    "trace replay": "trace replay M/events.json --op mm",
    "trace": "trace M/events.json",
    "doctor": "doctor M/run",
    "report": "report M/run",
    "ladder": f"ladder {RUN} --steps 3 --warm-up 1",
    "tune": f"tune {RUN} --budget 1s --trials 1",
    "kernels list": f"kernels list {RUN}",
    "kernels tune": f"kernels tune {RUN}",
}


def short(name: str) -> list[str]:
    """Words of a call of a verb."""
    return SHORT.get(name, name).split()


@cache
def commands() -> dict[str, Any]:
    """Every verb that does something, by its full name."""
    found: dict[str, Any] = {}

    def visit(command: Any, name: str) -> None:
        if isinstance(command, TyperGroup):
            for word, inner in command.commands.items():
                visit(vars(inner)["_verb"].load() if "_verb" in vars(inner) else inner, f"{name} {word}")
        else:
            found[name.removesuffix(" PATHS").removesuffix(" PATH")] = command

    for verb in VERBS:
        visit(verb.load(), verb.name)
    return found


def wrong_words() -> Iterator[BadCall]:
    """Verbs and options that there are not; words that are missing or too many; values of another type or too small."""
    groups = ([], ["data"], ["data", "tokenizer"], ["config"], ["launch"], ["kernels"])
    for group in groups:
        for word in ("banana", "--banana", "-Z", "", "\u6c34", LONG):
            yield BadCall((*group, word), "no such verb or option")
    for name, command in commands().items():
        yield from _wrong_words_of(name, command)


def _wrong_words_of(name: str, command: TyperCommand) -> Iterator[BadCall]:
    words = short(name)
    for option in ("--banana", "--banana=3", "-Z", "--hlep"):
        yield BadCall((*words, option), "no such option")
    arguments = [one for one in command.params if isinstance(one, TyperArgument)]
    if arguments and any(one.required for one in arguments):
        yield BadCall(tuple(name.split()), "an argument is missing")
    if all(one.nargs == 1 for one in arguments):
        yield BadCall((*words, *["surplus"] * (len(arguments) + 1)), "too many words")
    for option in command.params:
        if not isinstance(option, TyperOption) or option.opts == ["--help"]:
            continue
        flag = option.opts[0]
        if option.is_flag:
            yield BadCall((*words, f"{flag}=maybe"), "a switch has no value")
            continue
        yield BadCall((*words, flag), "the value is missing")
        kind = option.type_descriptor.annotation
        if flag in words and option.required:
            at = words.index(flag)
            yield BadCall((*words[:at], *words[at + 2 :]), "an option is missing")
        if kind in (int, float):
            yield from (BadCall((*words, flag, value), "not a number") for value in NOT_A_NUMBER)
            if option.min is not None:
                below = (option.min - 1, -(10**9), -(10**30))  # the last exceeds 64 bits
                yield from (BadCall((*words, f"{flag}={value:.0f}"), "too small") for value in below)
        elif kind not in (str, Path, list[str], tuple[str, str]):
            yield from (BadCall((*words, flag, value), "no such choice") for value in ("banana", "", LONG))


def wrong_targets() -> Iterator[BadCall]:
    """Runs that there are not, or that cannot be read."""
    for name in SHORT:
        words = short(name)
        if RUN in words:
            for target in TARGETS:
                yield BadCall(tuple(target if word == RUN else word for word in words), "no run")


def wrong_fields() -> Iterator[BadCall]:
    """Overrides that name no field, or give it a value of another type, out of range, or unknown."""
    verbs = (
        "train",
        "config validate",
        "config show",
        "layout",
        "plan",
        "data inspect",
        "launch slurm",
        "kernels list",
    )
    pairs = [pair for field in every_field(Run) for pair in _wrong_values(field)]
    assignments = ("training.steps", "=3", "a.b.c=3", "training..steps=3", "=", "training=banana", "model.moe=[1]")
    for verb in verbs:
        for word in assignments:
            yield BadCall((*short(verb), word), "no assignment")
        for field, value in pairs:
            yield BadCall((*short(verb), f"{field}={value}"), "a wrong value")


def _wrong_values(field: Field) -> Iterator[tuple[str, str]]:
    path = field.path.replace("NAME", "part")
    yield f"{path}x", "1"  # no such field
    if field.sections:
        values = ["banana", "3", "[{}]"]
    elif field.type_text == "whole number":
        values = ["banana", "1.5", "nan", "[1]", "{a=1}", "true", f"1{'0' * 30}", "9" * 5000, "[" * 5000]
    elif field.type_text == "number":
        values = ["banana", "nan", "inf", "-inf", "1e999", "[1.0]", "true", "9" * 5000]
    elif field.type_text == "true or false":
        values = ["banana", "2", "nan", "[true]"]
    elif field.choices:
        values = ["banana", "[1]", '""', "7", LONG]
    elif field.takes_list:
        values = ["{a=1}", "[[1]]", "[1.5]", "[", "[" * 5000]
    else:
        values = ["[1]", "{a=1}", '"']
    if field.low is not None:
        values.append(f"{field.low - 1:.0f}")
    if field.high is not None:
        values.append(f"{field.high + 1:.0f}")
    yield from ((path, value) for value in values)


def other_names() -> Iterator[BadCall]:
    """Options and fields as Megatron-Core, TorchTitan, Primus, Hugging Face and nanochat call them."""
    names = json.loads(OTHER_NAMES.read_text(encoding="utf-8"))
    for verb in ("train", "plan", "layout", "config show", "launch slurm", "tune"):
        ours = {option for parameter in commands()[verb].params for option in parameter.opts}
        for name in names:
            if not name.startswith("--"):
                yield BadCall((*short(verb), f"{name}=2"), "another trainer's field")
            elif name not in ours:
                yield BadCall((*short(verb), name, "2"), "another trainer's option")


def misspelled() -> Iterator[BadCall]:
    """Verbs, options, presets and fields with two letters exchanged."""
    for name, command in commands().items():
        yield BadCall((_misspell(name.split()[0]), *short(name)[1:]), "a misspelled verb")
        for option in command.params:
            if isinstance(option, TyperOption) and len(option.opts[0]) > 5:
                yield BadCall((*short(name), _misspell(option.opts[0])), "a misspelled option")
    for verb in ("train", "plan", "layout", "config show", "launch slurm", "tune", "ladder"):
        for preset in PRESETS:
            words = (_misspell(preset) if word == RUN else word for word in short(verb))
            yield BadCall(tuple(words), "a misspelled preset")
        for field in every_field(Run):
            if not field.sections and len(field.path) > 5:
                path = _misspell(field.path.replace("NAME", "part"))
                yield BadCall((*short(verb), f"{path}=1"), "a misspelled field")


def _misspell(word: str) -> str:
    """The last two different letters side by side, exchanged."""
    at = next(at for at in range(len(word) - 2, 0, -1) if word[at] != word[at + 1])
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def absurd_sizes() -> Iterator[BadCall]:
    """Models, batches and clusters that no machine has."""
    capped = [field.path for field in every_field(Run) if (field.high or 0) > 10**4]  # sizes of models and batches
    fields = [path for path in dict.fromkeys(capped) if path not in ("seed", "training.steps")]  # any of these is fine
    for field in fields:
        for size in (10**12, 10**15, 10**18, 2**63):  # the last exceeds signed 64 bits
            for verb in ("train", "config show", "layout", "plan", "data inspect", "kernels list", "config validate"):
                yield BadCall((*short(verb), f"{field}={size}"), "an absurd size")
    for size in (10**9, 10**12, 2**63, 10**30):
        for words in (
            ("train", RUN, "--fake-world", f"{size}"),
            ("train", RUN, "--fake-world", f"{size}", "--rank", f"{size - 1}"),
            ("train", RUN, "--fake-world", "8", "--rank", f"{size}"),
            ("train", RUN, "--processes", f"{size}", "--dry-run"),
            ("layout", RUN, "--world", f"{size}"),
            ("plan", RUN, "--on", f"{size}xH200"),
            ("plan", RUN, "--on", "8xH200", "--scale", f"{size}"),
            ("plan", RUN, "--on", "8xH200", "--global-batch-tokens", f"{size}"),
            ("plan", RUN, "--on", "8xH200", "--sweep", f"training.sequence_length={size}"),
            ("launch", "slurm", RUN, "--nodes", f"{size}", "--gpus-per-node", "8"),
            ("launch", "slurm", RUN, "--nodes", "1", "--gpus-per-node", f"{size}"),
            ("launch", "slurm", RUN, "--nodes", "1", "--gpus-per-node", "1", "--cpus-per-node", f"{size}"),
            ("data", "inspect", RUN, "--step", f"{size}"),
            ("data", "tokenizer", "train", "M/good.jsonl", "--output", "new.json", "--vocabulary", f"{size}"),
            ("data", "pack", "M/good.jsonl", "--output", "x", "--tokenizer", "bytes", "--processes", f"{size}"),
            ("import", "M/weights", "--output", "out", "--copies", f"{size}"),
            ("ladder", RUN, "--processes", f"{size}"),
            ("calibrate", "--processes", f"{size}"),
            ("preflight", "--processes", f"{size}"),
            ("export", "M/run", "out", "--step", f"{size}"),
        ):
            yield BadCall(words, "an absurd size")


def wrong_files() -> Iterator[BadCall]:
    """Files that are missing, damaged, of another kind, too large, or folders; and places that cannot be written."""
    places: dict[str, Sequence[str]] = {
        "trace {}": TRACES,
        "trace diff {} M/events.json": TRACES,
        "trace diff M/events.json {}": TRACES,
        "trace replay {} --op aten::mm": TRACES,
        "doctor {}": TRACES,
        "doctor {} --on 8xH200": TARGETS,
        "report {} --html new.html": [place for place in TRACES if place != "M/run"],  # which has no steps yet
        f"plan {RUN} --on {{}}": CLUSTERS,
        "init new.toml --model {}": ("debgu", "", LONG),
        "init new.toml --model debug --data {}": TEXTS,
        "init new.toml --model debug --tokenizer {}": TOKENIZERS,
        "init {} --model debug": ("new.json", "", "M/folder.toml", "no/where.toml", f"{LONG}.toml"),
        "data pack {} --output packed --tokenizer bytes --processes 1": TEXTS,
        "data pack M/good.jsonl --output packed --processes 1 --tokenizer {}": TOKENIZERS,
        "data pack M/good.jsonl --output packed --processes 1 --tokenizer bytes --text-field {}": ("body", LONG),
        "data pack M/good.jsonl --tokenizer bytes --processes 1 --output {}": ("/proc/no/x", LONG, "M/binary.txt/x"),
        "data tokenizer train {} --vocabulary 300 --output new.json": TEXTS,
        "data tokenizer train M/good.jsonl --output new.json --vocabulary {}": ("0", "-1", "3", "256"),
        "data tokenizer train M/good.jsonl --vocabulary 300 --output {}": ("/proc/no/x", LONG, "M/folder", "/dev/full"),
        f"train {RUN} --dry-run data.source=jsonl data.files={{}}": TEXTS,
        f"train {RUN} --dry-run data.source=packed data.files={{}}": ("M/binary", "M/empty", "M/huge", "M/nothing"),
        f"train {RUN} --dry-run data.source=parquet data.files={{}}": _files("parquet"),
        f"train {RUN} --dry-run data.tokenizer={{}}": TOKENIZERS,
        "train M/run --resume --dry-run training.steps={}": ("0", "banana"),
        "train {} --resume --dry-run": ("M/folder", "M/damaged-run", "debug-2l", "M/binary.toml", ""),
        f"kernels list {RUN} --device H200 kernels.measured={{}}": [
            f"M/{name}.json" for name in ("cut", "list", "huge", "deep")
        ],
        f"train {RUN} --dry-run training.initial_weights={{}}": ("M/weights", "M/folder", "M/nowhere"),
        "data inspect {}": ("M/damaged-run", "M/cut-run --step 9"),
        "export {} out": (*_files("toml"), "M/run", "M/cut-run", "M/damaged-run", "M/folder", "M/weights"),
        "import {} --output out": (*_files("json"), "M/weights", "M/damaged-weights", "M/folder", "M/run"),
        "import {} --output out --preset debug": ("M/weights", "M/damaged-weights", "M/folder", "M/nothing"),
        "report {}": ("M/damaged-run", "M/nothing", "M/run --on 8xBanana"),
        f"ladder {RUN} --ladder {{}}": HARDWARE,
        "preflight --hardware {}": HARDWARE,
        f"kernels list {RUN} --device {{}}": ("banana", "", LONG),
        "config explain {}": ("banana", "", "model.banana", LONG, "."),
        "calibrate --device {}": ("banana", "", "cuda:9"),
    }
    for template, wrong in places.items():
        for value in wrong:
            words = [word.replace("{}", value) for word in template.split()]
            yield BadCall(tuple(words), "a wrong file or value")
    for verb, option, ending in (
        *(("plan", f"--{kind}", kind) for kind in ("html", "png", "svg")),
        *(("plan", "--write", "toml"), ("launch slurm", "--output", "sh"), ("launch kubernetes", "--output", "yaml")),
    ):
        for place in (*OUTPUTS, *(["new.banana"] if verb == "plan" else [])):
            yield BadCall((*short(verb), option, place.format(f"x.{ending}")), "cannot be written")


def wrong_names() -> Iterator[BadCall]:
    """Names, times and images that Slurm, Kubernetes or a file system refuses."""
    slurm, kubernetes = short("launch slurm"), short("launch kubernetes")
    for time_limit in ("banana", "", "-1", "1:2:3:4", "24h", "1.5", "1-", "12:99", "1-25:00:00", "\u0663", "1 2"):
        yield BadCall((*slurm, "--time", time_limit), "no time of Slurm")
    for option in ("--partition", "--account", "--name", "--container"):
        for value in ("", "two words", "line\nbreak", "-dash", "semi;colon\n#SBATCH --exclusive"):
            yield BadCall((*slurm, option, value), "no name of Slurm")
    for option in ("--name", "--namespace", "--claim"):
        for value in ("Bad_Name!", "", "-a", "a-", "UPPER", "a" * 300, "two words", "\u6c34", "a\nb"):
            yield BadCall((*kubernetes, option, value), "no name of Kubernetes")
    for value in ("", "two words", "UPPER", "image:", ":tag", "a\nb", "a//b", "-x", LONG):
        yield BadCall((*kubernetes, "--image", value), "no image")
    for value in ("", "a/b", "..", "a\nb", " ", LONG, "/abs", "~"):
        yield BadCall(("train", RUN, "--dry-run", "--name", value), "no name of a run")


def contradictions() -> Iterator[BadCall]:
    """Options that exclude each other, questions that are none, layouts that do not fit."""
    for line in CONTRADICTIONS.strip().splitlines():
        yield BadCall(tuple(line.split()), "a contradiction")


KINDS = (
    *(wrong_words, other_names, misspelled, wrong_targets, wrong_fields),
    *(absurd_sizes, wrong_files, wrong_names, contradictions),
)

KINDS_OF_ARGUMENTS = (wrong_words, other_names, misspelled, wrong_fields)
"""Kinds that the arguments alone decide: no file, device or rule between fields is needed."""


def calls(number: int, seed: int = SEED, kinds: Sequence[Kind] = KINDS) -> list[BadCall]:
    """So many different calls, drawn in turn from each kind of mistake, and within it from every verb."""
    draw = random.Random(seed)
    lines = [_in_turn(list(kind()), draw) for kind in kinds]  # one queue for each kind of mistake
    found: dict[Words, BadCall] = {}
    while len(found) < number:
        for line in lines:
            call = next(line, None)
            if call is not None:
                found.setdefault(call.words, call)  # different calls only
    return list(found.values())[:number]


def _in_turn(every: list[BadCall], draw: random.Random) -> Iterator[BadCall]:
    """All calls of a kind, in an order in which the verbs take turns."""
    draw.shuffle(every)  # by the seed
    by_verb: dict[str, list[BadCall]] = {}
    for call in every:
        by_verb.setdefault(call.verb, []).append(call)
    while any(by_verb.values()):
        for waiting in by_verb.values():
            if waiting:
                yield waiting.pop()


def attempt(call: BadCall, folder: Path) -> Ended:
    """Run a call in an empty folder of its own; `folder` holds the material (`make_material`), its `M`."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "M").symlink_to(folder)  # the material, read only by calls
        figures = Path(place).with_suffix(".figures")  # outside, so that what is left behind is the call's
        environment = {**os.environ, "TMPDIR": place, "COLUMNS": "200"}
        done = warm.run(
            _measured, call.words, str(figures), folder=Path(place), environment=environment, timeout=KILLED_AFTER
        )
        left = sorted(path.name for path in Path(place).iterdir() if path.name != "M")  # half-written files
        seconds, peak_bytes = KILLED_AFTER, 0.0
        if figures.exists():
            seconds, peak_bytes = map(float, figures.read_text(encoding="utf-8").split())
            figures.unlink()
    return Ended(call, seconds, peak_bytes, tuple(_faults(done, left, seconds, peak_bytes)), done.stderr.strip())


def _faults(done: Any, left: list[str], seconds: float, peak_bytes: float) -> Iterator[str]:
    errors = done.stderr.strip().splitlines()
    if done.returncode != 2:  # 1 is a bug, negative a signal
        yield f"exit code {done.returncode}"
    if len(errors) != 1 or not errors[0].startswith("error: "):
        yield f"{len(errors)} lines on stderr"
    if "Traceback" in done.stderr:
        yield "a traceback"
    if len(done.stderr) > 3000:
        yield f"{len(done.stderr)} characters on stderr"
    if left:
        yield f"left behind: {', '.join(left)}"
    if seconds > MOST_SECONDS:
        yield f"{seconds:.0f} s"
    if peak_bytes > MOST_BYTES:
        yield f"{peak_bytes / 1e9:.1f} GB"


def _measured(words: Words, figures: str) -> int:
    """The call, with a limit of memory; writes the seconds and the most bytes that it took."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))  # more raises MemoryError
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a question finds the end of the input
    try:
        return warm.penstock(words)
    finally:
        used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        seconds = sum(one.ru_utime + one.ru_stime for one in used)
        Path(figures).write_text(f"{seconds} {max(one.ru_maxrss for one in used) * 1024}", encoding="utf-8")
