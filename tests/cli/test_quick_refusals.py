"""What the arguments alone decide is refused before PyTorch is imported, which takes seconds."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.refusals import CALLS
from penstock.cli.signatures import described_verbs
from penstock.config.explain import fields_with
from penstock.config.versions import fields_of_other_name
from tests.cli import answers, bad_calls

OTHER_NAMES = json.loads(Path("penstock/config/other_names.json").read_text(encoding="utf-8"))
WITH_OVERRIDES = [
    verb
    for verb, node in described_verbs().items()
    if [parameter["opts"] for parameter in node["parameters"]][:2] == [["target"], ["overrides"]]
]


def test_refusals_import_no_pytorch() -> None:
    named = [
        *CALLS,
        *(f"{verb} {words}" for verb in WITH_OVERRIDES for words in ("debgu", "debug lr=3", "debug --lrr 3")),
        # A rule between fields; options of `plan` and `init` may change the others.
        *(f"{verb} debug model.moe.top_k=1000" for verb in WITH_OVERRIDES if verb not in ("plan", "init")),
    ]
    drawn = bad_calls.calls(100, seed=47, kinds=bad_calls.KINDS_OF_ARGUMENTS)
    calls = [*map(shlex.split, named), *(call.words for call in drawn)]
    program = (
        "import json, sys\nfrom penstock.cli.main import main\n"
        "for call in json.load(sys.stdin):\n"
        "    code = main(call)\n"
        "    assert (code, 'torch' in sys.modules) == (2, False), (call, code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(calls), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("error: ") == len(calls)


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_an_option_of_another_trainer_is_answered_with_our_fields(verb: str) -> None:
    options = [name for name in OTHER_NAMES if name.startswith("--")]
    ours = [parameter["opts"] for parameter in described_verbs()[verb]["parameters"]]
    assert len(options) > 60
    for option in options:
        if [option] not in ours:
            message = answers.refused(verb, "debug", option, "2")
            assert all(f"{field}=..." in message for field in fields_of_other_name(option)), message


def test_a_field_of_another_trainer_is_answered_with_ours() -> None:
    for name in ("per_device_train_batch_size", "training.local_batch_size", "optimizer.lr", "lr"):
        (field,) = fields_of_other_name(name)
        assert answers.refused("config", "show", "debug", f"{name}=2").endswith(f"fix: it is {field} here")


def test_a_word_finds_the_fields_that_have_it_and_those_that_others_call_so() -> None:
    assert next(field.path for field in fields_with("seq-length")) == "training.sequence_length"
    assert "model.moe.router.expert_bias" in [field.path for field in fields_with("expert_bias")]
    assert answers.printed("config", "search", "micro_batch").splitlines()[1].startswith("training.micro_batch ")
    assert "no field has 'zebra'" in answers.refused("config", "search", "zebra")
