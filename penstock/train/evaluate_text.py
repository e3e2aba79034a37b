"""Loss and bits per byte of saved weights on texts, one source after another, and the tasks of lm-evaluation-harness.

    open_model -> own_texts or texts_of -> evaluate_text

Rows and losses are those of the evaluation in training: rows of the sequence length without overlap, from documents
that each end with the end-of-document token. Experts are dropless, and products have 16 or 32 bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from penstock.base.errors import DataError, DeviceError
from penstock.base.files import read_json
from penstock.config.data import Data
from penstock.config.load import CONFIG_FILE
from penstock.config.run import Run
from penstock.config.training import LearningRateSchedule, Optimizer, Training
from penstock.data.evaluation import evaluation_batches
from penstock.data.files import matched
from penstock.data.mixture import Text, TextPart
from penstock.data.open import open_text, source_of
from penstock.kernels.reference import IGNORED_LABEL
from penstock.models.decoder import Decoder
from penstock.models.huggingface.config import model_in
from penstock.models.rank_model import RankModel
from penstock.train.generate import load_decoder, load_weight_folder
from penstock.train.global_batch import CutRule
from penstock.train.passes import loss_rule
from penstock.train.saved_weights import chosen_step, open_saved
from penstock.train.setup import open_split
from penstock.train.step import evaluate
from penstock.train.weight_exchange import Precision, export_huggingface

HARNESS = "lm_eval"
HARNESS_MODEL = f"{HARNESS}.models.huggingface"  # needs packages that the harness alone does not
ALL_ROWS = 2**40
_SEQUENCE_LENGTH = 2048  # of a folder of Hugging Face weights, whose config.json may allow millions of positions


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """Weights to evaluate, and the run that computes with them."""

    run: Run
    decoder: Decoder
    folder: Path
    step: int | None  # of a run's checkpoint; None for a folder of Hugging Face weights

    @property
    def label(self) -> str:
        return str(self.folder) if self.step is None else f"step {self.step} of {self.folder}"


def is_weight_folder(folder: Path) -> bool:
    """Whether a folder has Hugging Face weights, and is no run."""
    return (folder / CONFIG_FILE).is_file() and any(folder.glob("*.safetensors"))


def open_model(folder: Path, step: int | None, device: torch.device) -> SavedModel:
    """The model of a run, of a folder of `penstock import`, or of a folder of Hugging Face weights.

    Raises a RunFolderError for other folders, a CheckpointError, a ConfigError, or a DeviceError without enough memory.
    """
    if not is_weight_folder(folder):
        run, store = open_saved(folder)
        step = chosen_step(store, folder, step)
        return SavedModel(run=run, decoder=load_decoder(run, store, step, device), folder=folder, step=step)
    if step is not None:
        raise DataError("--step is for runs", got=f"the weight folder {folder}", fix="leave --step out")
    model = model_in(folder)
    fields = read_json(folder / CONFIG_FILE)
    precision: Precision = "fp32" if fields.get("dtype", fields.get("torch_dtype")) == "float32" else "bf16"
    positions = min(fields.get("max_position_embeddings") or _SEQUENCE_LENGTH, _SEQUENCE_LENGTH)
    run = Run(
        name=folder.resolve().name,
        model=model,
        data=Data(tokenizer=str(folder)),
        training=Training(steps=1, sequence_length=positions, micro_batch=1, global_batch=1, precision=precision),
        optimizer=Optimizer(learning_rate=1e-5),
        schedule=LearningRateSchedule(warmup_steps=0),
    )
    return SavedModel(run=run, decoder=load_weight_folder(run, folder, device), folder=folder, step=None)


def own_texts(saved: SavedModel) -> dict[str, TextPart]:
    """The held-out text of a run, by the parts of its mixture."""
    if saved.step is None:
        raise DataError(f"{saved.folder} names no text", fix="give --data FILE")
    return {part.name or saved.run.data.source: part for part in open_split(saved.run, "validation").parts}


def texts_of(run: Run, names: Sequence[str], text_field: str, cache: Path) -> tuple[dict[str, TextPart], list[str]]:
    """The documents of each file, folder or glob, encoded with the run's tokenizer; and reports on the files."""
    texts = {name: _text_of(run, name, text_field, cache) for name in names}
    notices = [notice for text in texts.values() for notice in text.corrupt.take_notices()]
    return {name: text.parts[0] for name, text in texts.items()}, notices


def _text_of(run: Run, name: str, text_field: str, cache: Path) -> Text:
    first = matched((name,), field="--data")[0]  # of a folder or a glob
    files = {"source": source_of(first), "files": (name,), "text_field": text_field}
    whole = {"validation_files": (), "validation_share": 0.0, "mixture": {}, "fill_in_middle": 0.0}
    data = run.data.model_copy(update=files | whole)
    return open_text(data, "train", vocab_size=run.model.vocab_size, seed=run.seed, cache=cache)


@dataclass(frozen=True, kw_only=True)
class TextLoss:
    """Losses of one text."""

    source: str
    loss: float  # nats per token
    bits_per_byte: float
    tokens: int  # that were predicted
    text_bytes: int  # of UTF-8, of these tokens
    rows: int
    seconds: float


def evaluate_text(saved: SavedModel, name: str, text: TextPart, *, rows: int, sequence_length: int) -> TextLoss:
    """Loss and bits per byte on up to `rows` rows of a text; 0 takes all of it.

    Raises a DataError if the text predicts nothing.
    """
    micro_batch = saved.run.training.micro_batch
    chosen = evaluation_batches(
        Text((replace(text, weight=1.0),)),
        rows=micro_batch,
        sequence_length=sequence_length,
        limit_rows=rows or ALL_ROWS,
        document_mask=saved.run.data.document_mask,
    )
    if chosen.text_bytes == 0:
        raise DataError(f"{name} predicts no text: each of its documents is one token long", fix="give longer text")
    cut = CutRule(micro_batch=micro_batch, depths=0, device=saved.decoder.head_VD.device)
    rule = replace(loss_rule(saved.run), depths=0)
    result = evaluate(RankModel(decoders={0: saved.decoder}), chosen, cut, rule)
    filled = sum(int((batch.labels_BS != IGNORED_LABEL).any(1).sum()) for batch in chosen.batches)
    return TextLoss(source=name, text_bytes=chosen.text_bytes, rows=filled, **asdict(result))


def import_harness() -> Any:
    """lm-evaluation-harness. Raises a DeviceError if it is not installed."""
    try:
        import_module(HARNESS_MODEL)
        return import_module(HARNESS)
    except ImportError as error:
        raise DeviceError(
            "--tasks needs lm-evaluation-harness", got=str(error), fix="pip install 'lm_eval[hf]', or leave --tasks out"
        ) from error


def evaluate_tasks(harness: Any, saved: SavedModel, tasks: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Results of the harness by task, computed by `transformers` on the exported weights."""
    with _exported(saved) as folder:
        dtype = "bfloat16" if saved.run.training.precision == "bf16" else "float32"
        arguments = {"pretrained": str(folder), "dtype": dtype}
        try:
            answer = harness.simple_evaluate(
                model="hf", model_args=arguments, tasks=list(tasks), device=str(device), batch_size=1
            )
        except (OSError, ValueError, KeyError) as error:
            raise DataError("lm-evaluation-harness refused the tasks", got=error) from error
    results: dict[str, Any] = answer["results"]
    return results


@contextmanager
def _exported(saved: SavedModel) -> Iterator[Path]:
    if saved.step is None:
        yield saved.folder
        return
    run, store = open_saved(saved.folder)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, "weights")
        why_not = export_huggingface(run, store, saved.step, folder, run.training.precision)
        if why_not:
            raise DataError("--tasks needs the tokenizer in the exported folder", got=why_not, fix="leave --tasks out")
        yield folder
