"""How results of several runs are put into one."""

import argparse
import json
import re
from pathlib import Path

import pytest

from benchmarks import one_gpu, record


def part(command: str) -> dict[str, object]:
    return {"command": command, "commit": "0123abc", "environment": {}, "numbers": {}}


def test_the_command_of_joined_runs_says_all_but_which_part_each_was(tmp_path: Path) -> None:
    commands = [
        "python -m benchmarks.a --part 0/2 --output a.json --steps 13 --commit 0123abc training.micro_batch=8",
        "python -m benchmarks.a --part 1/2 --output b.json --steps 13 training.micro_batch=8",
        "python -m benchmarks.b --known a.json b.json --output c.json",
    ]
    options = argparse.Namespace(output=tmp_path / "joined.json")
    record.write_joined(options, [part(command) for command in commands], {})
    told = json.loads(options.output.read_text())["command"]
    assert told == "python -m benchmarks.a --steps 13 training.micro_batch=8 && python -m benchmarks.b"


def test_runs_of_one_gpu_are_joined_by_the_rows_of_a_micro_batch(tmp_path: Path) -> None:
    file, wrong = tmp_path / "one.json", tmp_path / "wrong.json"
    for path, overrides in ((file, ["training.micro_batch=8"]), (wrong, [])):
        variants = {"torch": {"tokens_per_second": 2.0}, "triton": {"tokens_per_second": 3.0}}
        numbers = {"preset": "debug", "overrides": overrides, "variants": variants}
        path.write_text(json.dumps(part("python") | {"numbers": numbers}))
    options = argparse.Namespace(join=[file], output=tmp_path / "joined.json")
    one_gpu.join(options)
    assert json.loads(options.output.read_text())["numbers"]["ratios"] == {"debug": {"triton, 8 over torch": 1.5}}
    with pytest.raises(SystemExit, match="wrong.json: its overrides do not say training.micro_batch"):
        one_gpu.join(argparse.Namespace(join=[wrong]))


def test_options_have_the_types_of_their_defaults_and_lists_those_of_their_items() -> None:
    parser = record.parser(
        "A benchmark.", steps=3, rate=0.5, only=("", "cases"), tiny=False, files=[Path], sizes=[1, 2]
    )
    words = "--steps 4 --rate 2 --only a --tiny --files a b --sizes 8 --output c.json"
    options = parser.parse_args(words.split())
    assert (options.steps, options.rate, options.only, options.tiny) == (4, 2.0, "a", True)
    assert (options.files, options.sizes, options.output) == ([Path("a"), Path("b")], [8], Path("c.json"))
    plain = parser.parse_args([])
    assert (plain.files, plain.sizes, plain.output, plain.tiny) == ([], [1, 2], None, False)


def test_a_benchmark_reads_only_options_that_its_parser_has() -> None:
    for path in sorted(Path("benchmarks").rglob("*.py")):
        text = path.read_text()
        given = re.search(r"record\.parser\((.*?)\n?\s*\)(\.parse_args|\n)", text, re.DOTALL)
        names = {"output", "commit", "part", "join"} | set(re.findall(r"(\w+)=", given[1] if given else ""))
        names |= {name.replace("-", "_") for name in re.findall(r'add_argument\("-*([\w-]+)"', text)}
        assert set(re.findall(r"\boptions\.(\w+)", text)) <= names, path
