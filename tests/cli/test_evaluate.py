"""`penstock evaluate`: losses of saved weights on text, as `transformers` computes them from the exported folder."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock.config.model import Balance
from penstock.train.saved_model import HARNESS, HARNESS_MODEL
from tests.cli import answers
from tests.train.tiny_run import byte_run, random_model, save_run, tiny_moe

S = 32  # the context of `byte_run`
TEXTS = ("Gr\u00fc\u00dfe, w\u00f6rld: " * 9, "h\u00e9llo \u2211 " * 5)  # over a row each; 1 to 3 bytes a character


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    run = byte_run(tmp_path)
    return save_run(run, random_model(run))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """One document."""
    path = tmp_path / "a.txt"
    path.write_text(TEXTS[0], encoding="utf-8")
    return path


def _exported(run_folder: Path, tmp_path: Path) -> Path:
    answers.printed("export", run_folder, tmp_path / "weights")
    return tmp_path / "weights"


@torch.no_grad()
def _by_transformers(folder: Path, text: str) -> tuple[float, int]:
    """Nats and number of the predicted tokens of a document and its end, in rows without overlap."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [*transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"], model.config.eos_token_id]
    nats = 0.0
    for begin in range(0, len(ids) - 1, S):
        row = torch.tensor(ids[begin : begin + S + 1])
        nats += float(F.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="sum"))
    return nats, len(ids) - 1


def test_transformers_computes_the_same_loss_from_the_exported_folder(
    run_folder: Path, text: Path, tmp_path: Path
) -> None:
    folder = _exported(run_folder, tmp_path)
    nats, tokens = _by_transformers(folder, TEXTS[0])
    text_bytes = len(TEXTS[0].encode()) - 1  # the first byte is not predicted
    for weights in (run_folder, folder):
        (loss,) = answers.told_as_json("evaluate", weights, "--data", text, "--rows", 0)["texts"]
        assert (loss["source"], loss["tokens"], loss["text_bytes"]) == (str(text), tokens, text_bytes)
        assert loss["rows"] == math.ceil(tokens / S)
        # float32 sums of about 150 losses on both sides.
        assert loss["loss"] == pytest.approx(nats / tokens, rel=tokens * torch.finfo(torch.float32).eps)
        assert loss["bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-4)


def test_each_source_has_a_line_and_suffixes_say_what_a_file_is(run_folder: Path, text: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"body": one}) + "\n" for one in TEXTS))
    words = ("--data", text, "--data", lines, "--text-field", "body", "--rows", 0)
    plain, documents = answers.told_as_json("evaluate", run_folder, *words)["texts"]
    assert documents["text_bytes"] == sum(len(one.encode()) for one in TEXTS) - 1
    assert documents["tokens"] == documents["text_bytes"] + len(TEXTS)  # with an end token each
    assert plain["text_bytes"] < documents["text_bytes"]
    head, names, first, second, after = answers.printed("evaluate", run_folder, *words).splitlines()
    assert head == f"step 1 of {run_folder}, rows of {S} tokens"
    assert names.split() == ["source", "loss", "bits/byte", "tokens", "bytes", "rows", "seconds"]
    assert (first.split()[0], second.split()[0]) == (str(text), str(lines))
    assert after == f"next:  penstock sample {run_folder} 'The '"


def test_what_is_odd_about_a_file_is_one_line(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": TEXTS[0]}) + "\n")
    (tmp_path / "b.jsonl").touch()
    code, _, err = answers.outcome("evaluate", run_folder, "--data", tmp_path / "*.jsonl", "--rows", 0)
    assert (code, err) == (0, f"data: {tmp_path / 'b.jsonl'} is empty and left out\n")


def test_experts_take_every_token_however_the_run_bounded_them(text: Path, tmp_path: Path) -> None:
    losses = []
    for name, balance in {"free": Balance(), "bound": Balance(capacity_factor=0.25, force_load_balance=True)}.items():
        run = byte_run(tmp_path / name, model=tiny_moe(balance=balance).model_copy(update={"vocab_size": 257}))
        folder = save_run(run, random_model(run))
        (loss,) = answers.told_as_json("evaluate", folder, "--data", text, "--rows", 2)["texts"]
        losses.append(loss["loss"])
    assert losses[0] == losses[1]


def test_a_run_without_data_is_evaluated_on_its_held_out_text(run_folder: Path) -> None:
    (loss,) = answers.told_as_json("evaluate", run_folder, "--rows", 3)["texts"]
    assert (loss["source"], loss["rows"], loss["tokens"]) == ("standard-library", 3, 3 * S)


def test_the_harness_gets_the_exported_weights(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def simple_evaluate(**arguments: Any) -> dict[str, Any]:
        calls.append(sorted(path.name for path in Path(arguments["model_args"]["pretrained"]).iterdir()))
        return {"results": {task: {"alias": task, "acc,none": 0.25} for task in arguments["tasks"]}}

    monkeypatch.setitem(sys.modules, HARNESS, SimpleNamespace(simple_evaluate=simple_evaluate))
    monkeypatch.setitem(sys.modules, HARNESS_MODEL, SimpleNamespace())
    out = answers.printed("evaluate", run_folder, "--tasks", "one,two")
    assert [line.split() for line in out.splitlines()[2:4]] == [["one", "acc", "0.2500"], ["two", "acc", "0.2500"]]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(calls[0])
    assert answers.told_as_json("evaluate", run_folder, "--tasks", "one")["tasks"]["one"]["acc,none"] == 0.25


def test_what_cannot_be_evaluated_is_one_line(
    run_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, HARNESS, None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, HARNESS_MODEL, None)
    missing = answers.refused("evaluate", tmp_path / "nothing", "--tasks", "arc_easy")
    assert missing.startswith("--tasks needs lm-evaluation-harness; got ") and "pip install 'lm_eval[hf]'" in missing
    folder = _exported(run_folder, tmp_path)
    assert answers.refused("evaluate", folder) == f"{folder} names no text; fix: give --data FILE"
    assert answers.refused("evaluate", folder, "--data", text, "--step", 1).endswith("fix: leave --step out")
    assert answers.refused("evaluate", tmp_path, "--data", text).startswith(f"{tmp_path} is not the folder of a run")
    assert "--data" in answers.refused("evaluate", run_folder, "--data", tmp_path / "*.nothing")
