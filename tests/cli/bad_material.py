"""Files and contradictions for tests/cli/bad_calls.py: damaged, of another kind, far too large; some are right."""

import gzip
import random
from pathlib import Path

RUN = "debug-2l"
HUGE = 8 * 10**9  # bytes of a file that takes no room on disk; more than a call may hold in memory

CONTRADICTIONS = f"""
train {RUN} --rank 3
train {RUN} --fake-world 4 --rank 4
train {RUN} --fake-world 3 parallel.expert=2
train {RUN} --dry-run --processes 7 training.global_batch=4
train {RUN} --resume --name nothing-there
train M/run --resume --name other
train M/run
train {RUN} --dry-run parallel.expert=7
train {RUN} --dry-run parallel.pipeline=5
train {RUN} --dry-run pipeline.layout=banana
train {RUN} --dry-run model.moe.top_k=1000
train {RUN} --dry-run data.source=huggingface
train {RUN} --dry-run data.source=packed
train {RUN} --dry-run data.end_of_document=banana
train {RUN} --dry-run record.folder=M/binary.txt
train {RUN} record.folder=/proc/nothing
layout {RUN} --world 3 parallel.expert=2
layout {RUN} parallel.tensor=7
plan --on 8xH200
plan {RUN}
plan {RUN} --on 8xH200 --explain banana
plan {RUN} --on 8xH200 --explain memory --scale 8
plan {RUN} --on 8xH200 --compare {RUN} debug
plan --on 8xH200 --compare {RUN} debug --write x.toml
plan {RUN} --on 8xH200 --scale banana
plan {RUN} --on 8xH200 --scale 0
plan {RUN} --on 8xH200 --scale 8,,16
plan {RUN} --on 8xH200 --sweep banana=1
plan {RUN} --on 8xH200 --sweep micro_batch=
plan {RUN} --on 8xH200 --sweep micro_batch=banana
plan {RUN} --on 8xH200 --layout ep=banana
plan {RUN} --on 8xH200 --layout ep=3 --write x.toml
plan {RUN} --on 8xH200 --only ep=3,ep=
plan {RUN} --on 8xH200 --only banana=2
plan {RUN} --on 8xH200 --imbalance nan
plan {RUN} --on 8xH200 --saving banana
plan {RUN} --on 8xH200 --saving conventional --write x.toml
launch slurm {RUN} --nodes 3 --gpus-per-node 1 parallel.expert=2
launch kubernetes {RUN} --nodes 0 --gpus-per-node 8 --image a --claim b
data inspect {RUN} --held-out evaluation.rows=0
data inspect {RUN} --step 0
data inspect {RUN} --rows -1
data pack M/good.jsonl --output packed --tokenizer bytes --end-of-document banana
trace replay M/events.json --op aten::mm --counts banana
trace replay M/events.json --op aten::mm --shape banana
trace replay M/events.json --op aten::mm --rank 99
trace diff M/events.json M/events.json --rank 7
trace M/events.json --rank 99
doctor M/run M/run --on 8xH200
doctor M/run --step 99999
report M/run --on 8xH200 --no-plan
report M/run --html page.banana
report M/events.json
ladder {RUN} --steps 3 --warm-up 3
ladder {RUN} --resume
ladder {RUN} --only banana
ladder {RUN} --timeout nan
ladder {RUN} --processes 3 parallel.expert=2
ladder {RUN} --json /proc/no/x.json
ladder {RUN} --json M/folder --resume
kernels tune {RUN}
kernels tune {RUN} --output /proc/no/x.json
import M/weights --output M/folder
import M/weights --output out --copies 4 --chosen 9
import M/weights --output /proc/no
export M/run M/folder
export M/run out --step -1
init M/cut.toml --model debug
init new.toml --model debug banana=3
init new.toml --yes
calibrate --device cuda --processes 2000
calibrate --output /proc/no/x.toml --device banana
"""


def make_material(folder: Path) -> None:
    """Files and folders that calls name, as `M/...`; wrong ones, and some that are right."""
    noise = random.Random(1).randbytes(4096)  # the same every time
    for ending in ("toml", "json", "json.gz", "jsonl", "parquet", "txt", "model", "bin", "idx"):
        (folder / f"binary.{ending}").write_bytes(noise)
        (folder / f"empty.{ending}").touch()
        (folder / f"folder.{ending}").mkdir()
        (folder / f"dangling.{ending}").symlink_to("nowhere")
        (folder / f"loop.{ending}").symlink_to(f"loop.{ending}")
        with (folder / f"huge.{ending}").open("wb") as file:
            file.truncate(HUGE)  # sparse
    texts = {
        "cut.toml": "[training]\nsteps = 1",
        "damaged.toml": "[training\nsteps = ",
        "deep.toml": f"a = {'[' * 100_000}",  # deeper than parsers recurse
        "digits.toml": f"preset = 'debug'\nseed = {'9' * 10_000}",  # Python refuses to convert so many
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
    (folder / "cut.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}')[:-9])  # without its checksum
    (folder / "bomb.json.gz").write_bytes(gzip.compress(bytes(2**26)) * (HUGE // 2**26))  # some MB that unpack to 8 GB
    _make_runs(folder)


def _make_runs(folder: Path) -> None:
    """Folders that look like runs, and weights: each with a fault."""
    for name in ("folder", "run", "damaged-run", "cut-run", "weights", "damaged-weights", "traces"):
        (folder / name).mkdir()
    (folder / "run/config.toml").write_text(f"preset = '{RUN}'\nname = 'run'\n", encoding="utf-8")
    (folder / "damaged-run/config.toml").write_bytes(b"\xff\xfe\x00")  # no UTF-8
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
