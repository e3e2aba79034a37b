"""A session holds everything that a run needs, and leaves nothing on disk."""

from pathlib import Path

import pytest
import torch

from penstock.base.errors import DataError, DeviceError
from penstock.config.data import Data
from penstock.config.parallel import Offload
from penstock.config.run import Run
from penstock.config.training import Evaluation
from penstock.train.setup import Session, open_texts, prepare, state_bytes
from tests.train.tiny_run import ENVIRONMENT, tiny_run


def session_of(run: Run) -> Session:
    session = prepare(run, ENVIRONMENT)
    session.state.batches.close()
    return session


def test_a_session_is_complete_and_nothing_is_written(tmp_path: Path) -> None:
    session = session_of(tiny_run(tmp_path / "runs"))
    assert session.model.whole.training
    assert session.state.modules == session.model.modules
    assert session.device == torch.device("cpu")
    assert session.device_name
    assert session.held_out is not None
    assert 0 < session.held_out.tokens <= 3 * 12
    assert session.size.flops_per_token > 0
    assert list(tmp_path.iterdir()) == []


def test_without_rows_nothing_is_held_out(tmp_path: Path) -> None:
    assert open_texts(tiny_run(tmp_path, evaluation=Evaluation(rows=0))).held_out is None


def test_a_checkpoint_is_bound_to_the_model_less_what_may_change(tmp_path: Path) -> None:
    identity = session_of(tiny_run(tmp_path)).state.identity
    assert identity["model.layers"] == 2
    assert identity["model.moe.experts"] == 4
    assert all(name.startswith("model.") for name in identity)
    assert "model.moe.router.expert_bias_rate" not in identity
    assert not any(name.startswith("model.moe.balance") for name in identity)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (session_of(tiny_run(tmp_path, seed=seed)).model for seed in (1, 1, 2))
    assert torch.equal(first.whole.head_VD, again.whole.head_VD)
    assert not torch.equal(first.whole.head_VD, other.whole.head_VD)


def test_a_missing_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="there is no GPU"):
        prepare(tiny_run(tmp_path, device="cuda"), ENVIRONMENT)


def test_missing_data_are_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, data=Data(source="text", files=(str(tmp_path / "gone.txt"),)))
    with pytest.raises(DataError):
        prepare(run, ENVIRONMENT)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_of_state_are_those_of_the_tensors(precision: str, tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    run = run.model_copy(update={"training": run.training.model_copy(update={"precision": precision})})
    session = session_of(run)
    held = [*session.model.whole.parameters(), *(tensor for _, tensor in session.state.optimizer.gradients())]
    held += [part.tensor for name, part in session.state.optimizer.parts().items() if name != "step"]
    # A float32 weight is its own master.
    assert state_bytes(run) == sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


def test_a_run_may_keep_its_optimizer_on_the_host(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, offload=Offload(optimizer=True))
    memory = session_of(run).state.optimizer.memory()
    assert memory.host == 2 * memory.weights, "float32 weights stay, their moments go"
    assert session_of(tiny_run(tmp_path)).state.optimizer.memory().host == 0


def test_held_out_documents_of_one_token_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("some text to learn from " * 40)
    (tmp_path / "held_out.txt").write_text("x")
    data = Data(
        source="text",
        files=(str(tmp_path / "train.txt"),),
        validation_files=(str(tmp_path / "held_out.txt"),),
        document_mask=True,
    )
    run = tiny_run(tmp_path, data=data, evaluation=Evaluation(rows=2))
    run = run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": 257})})
    with pytest.raises(DataError, match="predict no text.*evaluation.rows"):
        open_texts(run)
