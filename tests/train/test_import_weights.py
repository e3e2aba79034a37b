"""Weights of other programs start a run: bit for bit, in any layout, and a dense model's as experts."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.base.errors import CheckpointError, ConfigError
from penstock.config.load import load_run
from penstock.config.model import Model
from penstock.config.run import Training
from penstock.models.decoder import Decoder
from penstock.models.huggingface.config import model_in
from penstock.models.huggingface.tensor_file import TensorFile
from penstock.models.huggingface.weight_folder import WeightFolder
from penstock.train import manifest
from penstock.train.checkpoint import CheckpointStore
from penstock.train.saved_weights import STEP, WEIGHTS
from penstock.train.setup import Session, prepare
from penstock.train.weight_exchange import Precision, Upcycling, export_huggingface, import_weights
from tests.closeness import assert_close, assert_equal
from tests.distributed.one_loss import BASE, Saved, StepFigures, put_together, saved_by, start_session
from tests.distributed.pool import Pool
from tests.models.families import save_huggingface
from tests.models.huggingface.family_models import VARIANTS
from tests.train.tiny_run import ENVIRONMENT, random_model, tiny_run

FAMILIES = ("deepseek-v3", "llama, tied embeddings, YaRN", "qwen3-moe", "olmoe", "llama4", "gpt-oss", "mixtral")


def _written(model: Model, folder: Path) -> Decoder:
    """A model whose every tensor has values that bfloat16 holds, and its folder `theirs`."""
    decoder = random_model(tiny_run(folder, model=model), torch.bfloat16)
    save_huggingface(decoder, folder / "theirs")
    return decoder


def _imported(folder: Path, model: Model, upcycling: Upcycling | None = None) -> None:
    target = upcycling.model(model) if upcycling else model
    run = tiny_run(folder, model=target)
    import_weights(WeightFolder(folder / "theirs"), model, run, upcycling, folder / "start")


def _begun(folder: Path, model: Model, precision: Precision = "fp32") -> Session:
    """A run that starts with what was imported, before its first step."""
    training = Training(steps=2, sequence_length=12, precision=precision, initial_weights=str(folder / "start"))
    session = prepare(tiny_run(folder, model=model, training=training), ENVIRONMENT)
    session.state.batches.close()
    return session


def _exported(folder: Path, model: Model, **options: int) -> dict[str, Tensor]:
    store = CheckpointStore(folder / "start" / WEIGHTS, keep=0, asynchronous=False)
    export_huggingface(tiny_run(folder, model=model), store, STEP, folder / "again", "fp32", **options)
    files = (folder / "again").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_come_in_and_go_out_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = VARIANTS[name]
    _written(model, tmp_path)
    assert model_in(tmp_path / "theirs").family == model.family
    _imported(tmp_path, model)
    assert_equal(_exported(tmp_path, model, shard_bytes=10_000), load_file(tmp_path / "theirs" / "model.safetensors"))


def test_a_run_starts_with_what_was_imported(tmp_path: Path) -> None:
    model = VARIANTS["deepseek-v3"]
    decoder = _written(model, tmp_path)
    _imported(tmp_path, model)
    session = _begun(tmp_path, model, "bf16")
    (ours,) = session.state.modules
    assert_equal({name: tensor.float() for name, tensor in ours.state_dict().items()}, decoder.state_dict())
    masters = session.state.optimizer.parts()
    assert torch.equal(masters["model.embed.weight"].tensor, decoder.state_dict()["embed.weight"])
    assert not masters["moment1.embed.weight"].tensor.any()


def _started(overrides: tuple[str, ...]) -> tuple[StepFigures, Saved]:
    """What a rank would save before its first step; nothing was seen so far."""
    session = start_session(overrides)
    session.state.batches.close()
    return StepFigures([], [], [], 0.0, [], {}), saved_by(session)


@pytest.mark.slow
def test_any_layout_starts_with_the_same_weights(ranks: Pool, tmp_path: Path) -> None:
    run = load_run("debug", BASE)
    decoder = _written(run.model, tmp_path)
    import_weights(WeightFolder(tmp_path / "theirs"), run.model, run, None, tmp_path / "start")
    source = f'training.initial_weights="{tmp_path / "start"}"'
    for layout in (
        ("parallel.expert=2", "parallel.tensor=2"),
        ("parallel.expert=2", "parallel.shard=full"),
        ("parallel.pipeline=2", "parallel.expert=2"),
    ):
        tensors = put_together(ranks.run(4, _started, (*layout, source))).tensors
        assert all(torch.equal(tensors[f"model.{name}"], value) for name, value in decoder.state_dict().items())


def _bytes_read(overrides: tuple[str, ...]) -> tuple[int, int, int]:
    """Bytes that this rank reads for its tensors, that it checks, and that its tensors have in the files."""
    read, check = TensorFile._read_some, manifest.check_files
    values, checked = list[int](), list[int]()

    def count(file: TensorFile, room: memoryview, offset: int) -> int:
        values.append(len(room))
        return read(file, room, offset)

    def sizes(folder: Path, files: Mapping[str, str]) -> None:
        checked.extend((folder / name).stat().st_size for name in files if name.endswith(".safetensors"))
        check(folder, files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFile, "_read_some", count)
        patch.setattr(manifest, "check_files", sizes)
        session = start_session(overrides)
    session.state.batches.close()
    ours = {name: part for name, part in session.state.parts().items() if name.startswith("model.")}
    return sum(values), sum(checked), sum(4 * part.tensor.numel() for part in ours.values())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_reads_its_part_and_one_of_them_checks_each_file(
    size: int, ranks: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run("debug", BASE)
    _written(run.model, tmp_path)
    monkeypatch.setattr(manifest, "FILE_BYTES", 100_000)
    import_weights(WeightFolder(tmp_path / "theirs"), run.model, run, None, tmp_path / "start")
    files = [path.stat().st_size for path in (tmp_path / "start").rglob("*.safetensors")]
    source = f'training.initial_weights="{tmp_path / "start"}"'
    by_rank = ranks.run(size, _bytes_read, ("parallel.expert=2", source))
    assert all(values == ours < sum(files) for values, _, ours in by_rank)
    assert sum(checked for _, checked, _ in by_rank) == sum(files)
    assert all(checked < sum(files) for _, checked, _ in by_rank)


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
    dense = _written(model, tmp_path).eval()
    _imported(tmp_path, model, upcycling)
    (made,) = _begun(tmp_path, upcycling.model(model)).state.modules
    assert isinstance(made, Decoder)
    tokens_BS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    positions_BS = torch.arange(12).expand(2, -1)
    with torch.no_grad():
        expected_BSV = dense.logits(tokens_BS, positions_BS)
        made_BSV = made.eval().logits(tokens_BS, positions_BS)
    if upcycling.chosen > 1 or upcycling.granularity > 1 or family == "llama":
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


def test_weights_of_another_model_and_a_cut_file_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    _written(VARIANTS["mixtral"], tmp_path)
    with pytest.raises(CheckpointError, match="weights do not belong to this model"):
        _imported(tmp_path, VARIANTS["olmoe"])
    file = tmp_path / "theirs" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot read .*model.safetensors"):
        _imported(tmp_path, VARIANTS["mixtral"])
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_what_a_configuration_describes_is_not_built_beside_files_that_cannot_hold_it(tmp_path: Path) -> None:
    """10,000 layers of 65,536 experts would take gigabytes for their names alone."""
    _written(VARIANTS["qwen3-moe"], tmp_path)
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10_000, "num_experts": 65_536}))
    run = tiny_run(tmp_path, model=VARIANTS["qwen3-moe"])
    with pytest.raises(
        CheckpointError, match=r"model: it has more than 655,370,000 tensors, the files \d+; fix: choose"
    ):
        import_weights(WeightFolder(tmp_path / "theirs"), model_in(tmp_path / "theirs"), run, None, tmp_path / "start")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot read .*config.json; got No such file"),
        ("{", "config.json is no JSON"),
        ("[1]", "config.json is no table of keys; got list"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is not supported; got layers"),
    ],
)
def test_a_folder_that_does_not_say_its_model_is_refused(content: str | None, line: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises((CheckpointError, ConfigError), match=line):
        model_in(tmp_path)


def test_a_run_whose_weights_are_not_there_does_not_start(tmp_path: Path) -> None:
    training = Training(steps=2, sequence_length=12, initial_weights=str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match=r"training\.initial_weights: .*nothing has no weights"):
        prepare(tiny_run(tmp_path, training=training), ENVIRONMENT)


def test_float8_blocks_are_read_as_what_they_stand_for(tmp_path: Path) -> None:
    model = VARIANTS["deepseek-v3"]
    _written(model, tmp_path)
    file = tmp_path / "theirs" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("experts.0.down_proj.weight"))
    weights[f"{name}_scale_inv"] = torch.tensor([[0.25]])
    weights[name] = (weights[name] * 4).to(torch.float8_e4m3fn)
    expected = weights[name].float() * 0.25
    save_file(weights, file)
    _imported(tmp_path, model)
    assert torch.equal(_exported(tmp_path, model)[name], expected)
