"""Weights of other programs start a run: bit for bit, in any layout, and a dense model's as experts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.base.errors import CheckpointError, ConfigError
from penstock.config.load import load_run
from penstock.config.model import Model
from penstock.config.training import Training
from penstock.models.build import build_model
from penstock.models.decoder import Decoder
from penstock.models.huggingface.weight_folder import WeightFolder
from penstock.train.checkpoint import CheckpointStore
from penstock.train.export import export_huggingface
from penstock.train.import_weights import Upcycling, import_weights, model_in
from penstock.train.loop import start
from penstock.train.saved_weights import STEP, WEIGHTS
from penstock.train.setup import prepare
from tests.closeness import assert_close
from tests.distributed.one_loss import BASE, Saved, Trace, put_together, saved_by, start_session
from tests.distributed.pool import Pool
from tests.models.families import save_huggingface
from tests.models.huggingface.family_models import VARIANTS
from tests.train.tiny_run import ENVIRONMENT, tiny_run

CPU = torch.device("cpu")
FAMILIES = ("deepseek-v3", "llama, tied embeddings, YaRN", "qwen3-moe", "olmoe", "llama4", "gpt-oss", "mixtral")


def _decoder(model: Model, folder: Path) -> Decoder:
    """A model whose every tensor has values that bfloat16 holds."""
    run = tiny_run(folder, model=model)
    decoder = build_model(run, CPU)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in decoder.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator).bfloat16())
    return decoder


def _imported(folder: Path, source: Path, model: Model, upcycling: Upcycling | None = None) -> None:
    target = upcycling.model(model) if upcycling else model
    import_weights(WeightFolder(source), model, tiny_run(folder, model=target), upcycling, folder / "start")


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_come_in_and_go_out_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = VARIANTS[name]
    save_huggingface(_decoder(model, tmp_path), tmp_path / "theirs")
    assert model_in(tmp_path / "theirs").family == model.family
    _imported(tmp_path, tmp_path / "theirs", model)
    store = CheckpointStore(tmp_path / "start" / WEIGHTS, keep=0, asynchronous=False)
    export_huggingface(tiny_run(tmp_path, model=model), store, STEP, tmp_path / "again", "fp32", shard_bytes=10_000)
    again = {
        name: tensor for file in (tmp_path / "again").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in theirs.items())


def test_a_run_starts_with_what_was_imported(tmp_path: Path) -> None:
    model = VARIANTS["deepseek-v3"]
    decoder = _decoder(model, tmp_path)
    save_huggingface(decoder, tmp_path / "theirs")
    _imported(tmp_path, tmp_path / "theirs", model)
    training = Training(steps=2, sequence_length=12, initial_weights=str(tmp_path / "start"))
    session = prepare(tiny_run(tmp_path, model=model, training=training), ENVIRONMENT)
    begin = start(session)
    session.state.batches.close()
    assert begin.steps == 0
    (ours,) = session.state.modules
    assert all(torch.equal(t.float(), decoder.state_dict()[name]) for name, t in ours.state_dict().items())
    masters = {name: part.tensor for name, part in session.state.optimizer.parts().items()}
    assert torch.equal(masters["model.embed.weight"], decoder.state_dict()["embed.weight"])
    assert not masters["moment1.embed.weight"].any()


def _started(overrides: tuple[str, ...]) -> tuple[Trace, Saved]:
    """What a rank would save before its first step; nothing was seen so far."""
    session = start_session(overrides)
    start(session)
    session.state.batches.close()
    return Trace([], [], [], 0.0, [], {}), saved_by(session)


@pytest.mark.slow
def test_any_layout_starts_with_the_same_weights(ranks: Pool, tmp_path: Path) -> None:
    run = load_run("debug", BASE)
    decoder = _decoder(run.model, tmp_path)
    save_huggingface(decoder, tmp_path / "theirs")
    import_weights(WeightFolder(tmp_path / "theirs"), run.model, run, None, tmp_path / "start")
    source = f'training.initial_weights="{tmp_path / "start"}"'
    for layout in (
        ("parallel.expert=2", "parallel.tensor=2"),
        ("parallel.expert=2", "parallel.shard=full"),
        ("parallel.pipeline=2", "parallel.expert=2"),
    ):
        tensors = put_together(ranks.run(4, _started, (*layout, source))).tensors
        assert all(torch.equal(tensors[f"model.{name}"], value) for name, value in decoder.state_dict().items())


@pytest.mark.parametrize(
    ("family", "upcycling"),
    [
        ("llama", Upcycling(copies=4, chosen=2)),
        ("llama", Upcycling(copies=4, chosen=2, granularity=3)),
        ("qwen3", Upcycling(copies=3, chosen=1)),
        ("qwen3", Upcycling(copies=3, chosen=2, granularity=2)),
    ],
)
def test_experts_made_of_a_dense_model_compute_the_same_at_first(
    family: str, upcycling: Upcycling, tmp_path: Path
) -> None:
    model = VARIANTS[family]
    dense = _decoder(model, tmp_path).eval()
    save_huggingface(dense, tmp_path / "theirs")
    _imported(tmp_path, tmp_path / "theirs", model, upcycling)
    training = Training(steps=2, sequence_length=12, precision="fp32", initial_weights=str(tmp_path / "start"))
    session = prepare(tiny_run(tmp_path, model=upcycling.model(model), training=training), ENVIRONMENT)
    start(session)
    session.state.batches.close()
    (made,) = session.state.modules
    assert isinstance(made, Decoder)
    tokens_BS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    positions_BS = torch.arange(12).expand(2, -1)
    with torch.no_grad():
        expected_BSV = dense.logits(tokens_BS, positions_BS)
        made_BSV = made.eval().logits(tokens_BS, positions_BS)
    weight = upcycling.chosen > 1 or upcycling.granularity > 1 or family == "llama"
    if weight:
        assert_close(made_BSV, expected_BSV, tolerance=1e-4)
    experts = made.state_dict()["blocks.0.ffn.experts.down_eDF"]
    assert len(experts) == upcycling.copies * upcycling.granularity


@pytest.mark.parametrize(
    ("family", "upcycling", "reason"),
    [
        ("llama", Upcycling(copies=2, chosen=3), "a dense model cannot be made one with such experts"),
        ("llama", Upcycling(copies=2, chosen=1, granularity=5), "a dense model cannot be made one with such experts"),
        ("mixtral", Upcycling(copies=2, chosen=1), "only a dense model can be made one with experts"),
    ],
)
def test_experts_that_cannot_be_made_are_refused(family: str, upcycling: Upcycling, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        upcycling.model(VARIANTS[family])


def test_weights_of_another_model_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    save_huggingface(_decoder(VARIANTS["mixtral"], tmp_path), tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="weights do not belong to this model"):
        _imported(tmp_path, tmp_path / "theirs", VARIANTS["olmoe"])
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_cut_file_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    model = VARIANTS["mixtral"]
    save_huggingface(_decoder(model, tmp_path), tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot read .*model.safetensors"):
        _imported(tmp_path, tmp_path / "theirs", model)
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot read .*config.json; got No such file"),
        ("{", "config.json is no JSON"),
        ("[1]", "config.json is no table of keys; got list"),
        ('{"model_type": "gpt2"}', "model_type is not known here; got gpt2"),
    ],
)
def test_a_folder_that_does_not_say_its_model_is_refused(content: str | None, line: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((CheckpointError, ConfigError), match=line):
        model_in(tmp_path)


def test_a_run_whose_weights_are_not_there_does_not_start(tmp_path: Path) -> None:
    training = Training(steps=2, sequence_length=12, initial_weights=str(tmp_path / "nothing"))
    session = prepare(tiny_run(tmp_path, training=training), ENVIRONMENT)
    with pytest.raises(CheckpointError, match=r"training\.initial_weights: .*nothing has no weights"):
        start(session)
    session.state.batches.close()


def test_float8_blocks_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    model = VARIANTS["deepseek-v3"]
    save_huggingface(_decoder(model, tmp_path), tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("experts.0.down_proj.weight"))
    weights[f"{name}_scale_inv"] = torch.tensor([[0.25]])
    weights[name] = (weights[name] * 4).to(torch.float8_e4m3fn)
    expected = weights[name].float() * 0.25
    save_file(weights, file)
    _imported(tmp_path, tmp_path / "theirs", model)
    store = CheckpointStore(tmp_path / "start" / WEIGHTS, keep=0, asynchronous=False)
    export_huggingface(tiny_run(tmp_path, model=model), store, STEP, tmp_path / "again", "fp32")
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[name], expected)
