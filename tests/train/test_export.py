"""Exports in Hugging Face format are the same for every layout of the checkpoint."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.base.errors import CheckpointError, ConfigError
from penstock.config.model import GroupedQueryAttention, Rope
from penstock.config.run import Qat, Run
from penstock.kernels.mxfp4 import to_mxfp4
from penstock.models.build import build_model
from penstock.models.decoder import Decoder
from penstock.models.huggingface.tensor_file import TensorEntry, write_entries
from penstock.models.huggingface.weight_folder import BLOCKS, SCALES
from penstock.models.huggingface.weights import load_huggingface
from penstock.parallel.shard import whole
from penstock.train import weight_exchange
from penstock.train.checkpoint import CheckpointStore
from penstock.train.saved_model import load_decoder
from penstock.train.state import identity_of
from penstock.train.weight_exchange import INDEX_FILE, TOLERANCE, Precision, export_huggingface, verify_export
from tests.closeness import assert_equal
from tests.distributed.pool import Pool
from tests.models.families import moe_with, save_huggingface
from tests.models.huggingface.family_models import YARN, deepseek_v4, gpt_oss, llama4, nope, qwen3_moe
from tests.parallel.test_collectives import world
from tests.train.layouts import Layout, ranks_of
from tests.train.small_model import holdings_of
from tests.train.tiny_run import CPU, TRAINING, random_model, tiny_model, tiny_run


def _tensors(model: Decoder) -> dict[str, Tensor]:
    trained = [holding.name for holding in holdings_of(model)]
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return {**tensors, **{f"moment1.{name}": torch.ones_like(tensors[f"model.{name}"]) for name in trained}}


def _save(store: CheckpointStore, run: Run, model: Decoder) -> None:
    parts = {name: whole(tensor) for name, tensor in _tensors(model).items()}
    store.save(1, parts, {"model": identity_of(run)})


def _layout(name: str, tensor: Tensor) -> Layout:
    """On 4 ranks: experts and gate-up matrices cut, in blocks too, norms and others in row shards or whole."""
    if tensor.ndim == 3:
        return Layout((2, 2, 1) if "gate_up" in name else (2, 1, 2), (1, 2, 1) if "gate_up" in name else (1, 1, 1))
    if "gate_up" in name:
        return Layout((2, 1), (2, 1), shards=2)
    if tensor.ndim == 2:
        return Layout((1, 2), (1, 1), shards=2)
    return Layout((1,), (1,), copies=4) if "bias" in name else Layout((1,), (1,), shards=3)


def _save_on_ranks(folder: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    store = CheckpointStore(Path(folder), keep=0, asynchronous=True, world=world())
    layouts = {name: _layout(name, tensor) for name, tensor in tensors.items()}
    store.save(1, ranks_of(tensors, layouts, 4)[store.rank], facts)
    store.close()


def _store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, keep=0, asynchronous=False)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path)


@pytest.fixture
def model(run: Run, tmp_path: Path) -> Decoder:
    """A model whose checkpoint is in the folder `saved`."""
    made = random_model(run)
    _save(_store(tmp_path / "saved"), run, made)
    return made


def _exported(run: Run, folder: Path, precision: Precision = "fp32", **options: int) -> Path:
    export_huggingface(run, _store(folder / "saved"), 1, folder / "out", precision, **options)
    return folder / "out"


def _assert_holds(folder: Path, run: Run, model: Decoder) -> None:
    again = build_model(run, torch.device("cpu"))
    load_huggingface(again, folder)
    assert_equal(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_four_ranks_saved_is_exported_as_if_one_had(
    ranks: Pool, run: Run, model: Decoder, tmp_path: Path, precision: Any
) -> None:
    ranks.run(4, _save_on_ranks, str(tmp_path / "four"), _tensors(model), {"model": identity_of(run)})
    assert len(list((tmp_path / "four" / "step-000001").glob("*.safetensors"))) == 4
    export_huggingface(run, _store(tmp_path / "four"), 1, tmp_path / "four-out", precision)
    one = _exported(run, tmp_path, precision)
    for file in ("config.json", "model.safetensors"):
        assert (one / file).read_bytes() == (tmp_path / "four-out" / file).read_bytes()

    exported = load_file(tmp_path / "four-out" / "model.safetensors")
    gates = {name.rsplit(".", 1)[1] for name in exported if ".mlp.gate." in name}
    assert gates == {"weight", "e_score_correction_bias"}
    for name, tensor in exported.items():
        is_float32 = precision == "fp32" or ".mlp.gate." in name
        assert tensor.dtype == (torch.float32 if is_float32 else torch.bfloat16), name


def test_an_export_holds_the_very_weights_for_all_to_read(run: Run, model: Decoder, tmp_path: Path) -> None:
    export_huggingface(run, _store(tmp_path / "saved"), 1, tmp_path / "deep" / "out", "fp32")
    save_huggingface(model, tmp_path / "direct", run.training.sequence_length)
    exported, direct = tmp_path / "deep" / "out", tmp_path / "direct"
    assert (exported / "config.json").read_text() == (direct / "config.json").read_text()
    assert_equal(*(load_file(folder / "model.safetensors") for folder in (exported, direct)))
    _assert_holds(exported, run, model)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [exported, *exported.iterdir()]}
    assert modes == {"out": 0o755, "config.json": 0o644, "model.safetensors": 0o644}


@pytest.mark.usefixtures("model")
def test_a_full_disk_leaves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, entries: list[TensorEntry], metadata: object, **options: object) -> None:
        write_entries(path, entries[:3])
        raise OSError("No space left on device")

    monkeypatch.setattr(weight_exchange, "write_entries", fail)
    with pytest.raises(CheckpointError, match="cannot write .*out; got No space left on device"):
        _exported(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.usefixtures("model")
def test_a_model_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"of another model; got model\.rms_norm_eps = 0\.001"):
        _exported(tiny_run(tmp_path, model=tiny_model(rms_norm_eps=1e-3)), tmp_path)


def test_a_model_without_hugging_face_form_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    attention = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=8)
    with pytest.raises(ConfigError, match="no Hugging Face form"):
        _exported(tiny_run(tmp_path, model=tiny_model(family="plain", attention=attention)), tmp_path)


def test_a_large_model_has_several_files_and_an_index(run: Run, model: Decoder, tmp_path: Path) -> None:
    out = _exported(run, tmp_path, shard_bytes=4000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 2
    index = json.loads((out / INDEX_FILE).read_text())
    assert index["weight_map"] == {name: file for file in files for name in load_file(out / file)}
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in model.state_dict().values())
    _assert_holds(out, run, model)


LLAMA4 = llama4(local=nope(2), qk_norm="rotated-head", rope=Rope())
_IN_MXFP4 = {
    "gpt-oss": moe_with(gpt_oss(rope=Rope(yarn=YARN)), moe_intermediate_size=64),
    "llama4": moe_with(LLAMA4, moe_intermediate_size=64, shared_expert_intermediate_size=64),
    "qwen3-moe": moe_with(qwen3_moe(), moe_intermediate_size=64),
}


@pytest.mark.parametrize("family", _IN_MXFP4)
def test_experts_in_mxfp4_are_exported_as_the_run_computes_with_them(family: str, tmp_path: Path) -> None:
    training, form = TRAINING.model_copy(update={"precision": "bf16"}), Qat(experts="mxfp4")
    run = tiny_run(tmp_path, model=_IN_MXFP4[family], training=training, qat=form)
    model = random_model(run.model_copy(update={"training": TRAINING}))  # masters
    _save(_store(tmp_path / "saved"), run, model)
    out = _exported(run, tmp_path, "bf16")
    computed = build_model(run, torch.device("cpu"))
    again = build_model(run, torch.device("cpu"))
    computed.load_state_dict(model.state_dict())  # rounds to bfloat16, as the optimizer does
    load_huggingface(again, out)
    expected = {
        name: to_mxfp4(weight) if name.endswith(("experts.gate_up_eFD", "experts.down_eDF")) else weight
        for name, weight in computed.state_dict().items()
    }
    assert_equal(again.state_dict(), expected)
    assert verify_export(run, out) < TOLERANCE
    # Samples and evaluation of the checkpoint read rounded experts too.
    sampled, tokens_BS = load_decoder(run, _store(tmp_path / "saved"), 1, CPU), torch.arange(24).view(2, 12)
    positions_BS = torch.arange(12).expand(2, -1)
    assert_equal(sampled.logits(tokens_BS, positions_BS), again.eval().logits(tokens_BS, positions_BS))

    packed = [name for name in load_file(out / "model.safetensors") if name.endswith((BLOCKS, SCALES))]
    method = json.loads((out / "config.json").read_text()).get("quantization_config", {}).get("quant_method")
    assert (len(packed), method) == ((4 * run.model.layers, "mxfp4") if family == "gpt-oss" else (0, None))
    # What was imported and is exported again has the same bytes.
    _save(_store(tmp_path / "again"), run, again.float())
    export_huggingface(run, _store(tmp_path / "again"), 1, tmp_path / "again-out", "bf16")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again-out" / file).read_bytes() == (out / file).read_bytes()


def test_of_deepseek_v4_tables_of_token_ids_are_whole_numbers_and_mixes_of_streams_float32(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, model=deepseek_v4(), training=TRAINING.model_copy(update={"precision": "bf16"}))
    model = build_model(run.model_copy(update={"training": TRAINING}), CPU)  # masters
    table_VK = model.state_dict()["blocks.0.ffn.router.table_VK"]
    assert table_VK.unique().tolist() == [*range(8)]  # all experts
    _save(_store(tmp_path / "saved"), run, model)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        export_huggingface(run, _store(tmp_path / "saved"), 1, tmp_path / precision, precision)
        files = load_file(tmp_path / precision / "model.safetensors")
        assert_equal(files["model.layers.0.ffn.gate.tid2eid"], table_VK.long())
        assert files["model.layers.2.attn.wkv.weight"].dtype == dtype
        assert files["model.layers.2.hc_attn_fn"].dtype == files["model.hc_head.hc_fn"].dtype == torch.float32
    again = build_model(run.model_copy(update={"training": TRAINING}), CPU)
    load_huggingface(again, tmp_path / "fp32")
    assert_equal(again.state_dict(), model.state_dict())
