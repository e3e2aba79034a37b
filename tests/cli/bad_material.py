"""Files and folders for tests/cli/bad_calls.py: damaged, of another kind, far too large; and some that are right."""

import gzip
import random
from pathlib import Path

RUN = "debug-2l"
HUGE = 8 * 10**9
"""Bytes of a file that takes no room on disk; more than a call may hold in memory."""


def make_material(folder: Path) -> None:
    """Files and folders that calls name, as `M/...`; wrong ones, and some that are right."""
    noise = random.Random(1).randbytes(4096)
    for ending in ("toml", "json", "json.gz", "jsonl", "parquet", "txt", "model", "bin", "idx"):
        (folder / f"binary.{ending}").write_bytes(noise)
        (folder / f"empty.{ending}").touch()
        (folder / f"folder.{ending}").mkdir()
        (folder / f"dangling.{ending}").symlink_to("nowhere")
        (folder / f"loop.{ending}").symlink_to(f"loop.{ending}")
        with (folder / f"huge.{ending}").open("wb") as file:
            file.truncate(HUGE)
    texts = {
        "cut.toml": "[training]\nsteps = 1",
        "damaged.toml": "[training\nsteps = ",
        "deep.toml": f"a = {'[' * 100_000}",
        "digits.toml": f"preset = 'debug'\nseed = {'9' * 10_000}",
        "key.toml": "preset = 'debug'\n[training]\nstpes = 3",
        "preset.toml": "preset = 7",
        "type.toml": "preset = 'debug'\ntraining = 3",
        "version.toml": "version = 'soon'\npreset = 'debug'",
        "cut.json": '{"traceEvents": [{"ph": "X"',
        "deep.json": "[" * 100_000,
        "list.json": "[1, 2, 3]",
        "null.json": "null",
        "text.json": '{"traceEvents": "none"}',
        "events.json": '{"traceEvents": [1, null, "x", {"ph": "X", "ts": "soon", "dur": {}}]}',
        "other.json": '{"model": {"type": "BPE", "vocab": 3}}',
        "number.jsonl": '{"text": 7}\n',
        "field.jsonl": '{"content": "x"}\n',
        "cut.jsonl": '{"text": "x',
        "good.jsonl": '{"text": "water"}\n' * 50,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.toml").write_bytes("name = 'm\u00fcller'".encode("latin-1"))
    (folder / "latin.jsonl").write_bytes('{"text": "m\u00fcller"}\n'.encode("latin-1"))
    (folder / "cut.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])
    (folder / "bomb.json.gz").write_bytes(gzip.compress(bytes(2**26)) * (HUGE // 2**26))
    _make_runs(folder)


def _make_runs(folder: Path) -> None:
    """Folders that look like runs, and weights: each with a fault."""
    for name in ("folder", "run", "damaged-run", "cut-run", "weights", "damaged-weights", "traces"):
        (folder / name).mkdir()
    (folder / "run/config.toml").write_text(f"preset = '{RUN}'\nname = 'run'\n", encoding="utf-8")
    (folder / "damaged-run/config.toml").write_bytes(b"\xff\xfe\x00")
    for place in (folder / "cut-run", folder / "cut-run/checkpoints/step-00000004"):
        place.mkdir(parents=True, exist_ok=True)
    (folder / "cut-run/config.toml").write_text(f"preset = '{RUN}'\nname = 'cut-run'\n", encoding="utf-8")
    (folder / "cut-run/metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xff{')
    (folder / "cut-run/checkpoints/step-00000004/manifest.json").write_text('{"step": "four"', encoding="utf-8")
    (folder / "damaged-weights/config.json").write_text('{"model_type": "mixtral"', encoding="utf-8")
    (folder / "weights/config.json").write_text('{"model_type": "banana"}', encoding="utf-8")
    (folder / "weights/model.safetensors").write_bytes(b"\xff" * 64)
    (folder / "traces/rank-0.json").write_text("{}", encoding="utf-8")
    (folder / "traces/rank-1.json").write_text("[]", encoding="utf-8")
