"""Targets, files, their version, and the way there and back."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.config.load import RUN_FILE, dump_toml, load_run
from penstock.config.model import CompressedAttention, GroupedQueryAttention, LatentAttention
from penstock.config.presets.debug import debug
from penstock.config.presets.registry import PRESETS, preset
from penstock.config.run import Run
from penstock.config.schema import every_field, find, leaves
from penstock.config.versions import REMOVED, RENAMED, VERSION, VERSION_KEY, check_version, new_path
from tests.examples import examples


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def message_of(target: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_run(target, overrides)
    return str(raised.value)


def test_overrides_change_only_what_they_name() -> None:
    run = load_run("debug", ["training.steps=5000", "seed=3"])
    expected = debug().training.model_copy(update={"steps": 5000})
    assert run == debug().model_copy(update={"training": expected, "seed": 3})
    variant = load_run("debug-2l", ["seed=40"])
    assert (variant.model.layers, variant.seed) == (2, 40)


def test_the_folder_of_a_run_is_a_target_and_its_file_says_its_version(tmp_path: Path) -> None:
    text = dump_toml(debug())
    assert text.startswith(f"{VERSION_KEY} = {VERSION}\n")
    write(tmp_path / RUN_FILE, text)
    assert load_run(str(tmp_path)) == debug()


def test_a_model_of_hugging_face_is_no_run(tmp_path: Path) -> None:
    path, model = (
        write(tmp_path / "config.json", "{}"),
        f"{tmp_path} is a Hugging Face model, not a run; fix: import it",
    )
    assert message_of(str(tmp_path)) == f"{model} first: penstock import {tmp_path} --output NAME --config-only"
    assert message_of(str(path)).endswith(f"first: penstock import {path} --output NAME --config-only")
    (tmp_path / "model.safetensors").touch()
    assert message_of(str(tmp_path)) == f"{model} first: penstock import {tmp_path} --output NAME"
    write(tmp_path / RUN_FILE, dump_toml(debug()))
    assert load_run(str(tmp_path)) == debug()


def test_a_preset_wins_over_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "debug").mkdir()
    assert load_run("debug") == debug()
    assert message_of("./debug") == "debug is not the folder of a run; allowed: a folder with a config.toml"


@pytest.mark.parametrize(
    ("file", "text", "values"),
    [
        ("settings", "seed = 30", {"name": "settings", "seed": 30}),  # a file is named after itself
        ("a.toml", 'name = "b"', {"name": "b"}),  # its own name wins
        (
            "a.toml",
            "[model.moe]\nshared_expert_intermediate_size = 96",
            {"model.moe.shared_expert_intermediate_size": 96},
        ),
        ("a.toml", '[model]\nmoe = "none"\nlayers = 2\ndense_layers = 2', {"model.moe": None}),
        (
            "a.toml",
            '[data]\nsource = "text"\nfiles = ["a.txt", "b.txt"]\nvalidation_files = "c.txt"',
            {"data.files": ("a.txt", "b.txt"), "data.validation_files": ("c.txt",)},
        ),
        ("a.toml", '[model.attention]\nkind = "gqa"\nkv_heads = 1\nhead_dim = 32', {"model.attention.kv_heads": 1}),
    ],
)
def test_keys_of_a_file_win_over_its_preset(tmp_path: Path, file: str, text: str, values: dict[str, Any]) -> None:
    found = leaves(load_run(write(tmp_path / file, f'preset = "debug"\n{text}\n')))
    assert {path: found[path] for path in values} == values
    assert (found["training.steps"], found["model.attention.heads"]) == (debug().training.steps, 4)


def test_a_file_may_start_from_a_variant_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "cut.toml"
    path.write_bytes(b'\xef\xbb\xbfpreset = "deepseek-v2-lite-8l"\r\nseed = 3\r\n')  # as Windows writes it
    run = load_run(str(path))
    assert (run.name, run.model.layers, run.seed) == ("cut", 8, 3)


def test_a_target_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    gone, path = tmp_path / "quite/another.toml", write(tmp_path / "a.toml", "")
    assert message_of(str(gone)) == f"there is no file {gone}; fix: check the path, or name a preset"
    assert message_of(str(tmp_path)) == f"{tmp_path} is not the folder of a run; allowed: a folder with a config.toml"
    assert message_of(f"{path}/b.toml") == f"cannot read {path}/b.toml: Not a directory"
    assert "no preset is called" in message_of("x" * 5000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = 1\n\n[training\nsteps = 3\n", "{}:3: this is not TOML: Expected ']'"),
        ("seed =\n", "{}:1: this is not TOML: Invalid value"),
        ("seed = 1\nseed = 2\n", "{}:2: this is not TOML: Cannot overwrite a value"),
        ("name = 'a", "{}:1: this is not TOML: Expected"),
        ('preset = "debug"\nname = "caf\xe9"\n', "{}:2: the file is not UTF-8 text; fix: save it as UTF-8"),
        ('preset = "debgu"\n', "no preset is called 'debgu'; allowed: debug, "),
        ("preset = 3\n", "{}: preset must be the name of a preset; got 3"),
        ('presett = "debug"\n', "{}: presett is an unknown key; fix: did you mean preset?"),
        (
            "",
            "model is missing (also wrong: training, optimizer); allowed: section; "
            'fix: write its fields, or start the file with preset = "debug"',
        ),
        (f"a = {'[' * 100_000}", "{} is not TOML: it is nested too deeply"),  # deeper than Python recurses
        (f"preset = 'debug'\nseed = {'9' * 10_000}", "{} is not TOML: Exceeds the limit"),
        ("preset = 'debug'\nseed = 99999999999999999999", "seed is more than 64 bits can hold"),
    ],
    ids=lambda text: text[:20],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))  # one text has a letter that is not UTF-8 then
    told = message_of(str(path))
    assert told.startswith(message.format(path)), told
    assert "\n" not in told


def test_a_preset_is_no_override_and_a_deep_one_is_refused() -> None:
    assert message_of("debug", "preset=deepseek-v3").startswith("preset is an unknown key; allowed: name, seed")
    assert "nested too deeply" in message_of("debug", f"data.files={'[' * 100_000}")


@pytest.mark.parametrize("name", [*PRESETS, "debug-1l", "deepseek-v3-4l"])
def test_a_preset_is_loaded_by_name_and_read_back_the_same(name: str, tmp_path: Path) -> None:
    run = load_run(name)
    assert run == preset(name)
    assert load_run(write(tmp_path / "other-name.toml", dump_toml(run))) == run


def test_a_written_run_says_every_field_that_is_not_none() -> None:
    written = set(paths_of(tomllib.loads(dump_toml(debug()))))
    expected = {field.path for field in every_field(Run)}
    assert written <= expected | {"version"}
    none = ("model.attention.rope.yarn", "model.attention.rope.llama3", "model.moe.clamped", "data.mixture.NAME")
    none += ("model.linear_attention", "model.attention.indexer", "model.hyper_connections")
    left_out = {path.removeprefix("model.attention.") for path in expected - written if not path.startswith(none)}
    grouped = {"kv_heads", "head_dim", "qk_norm", "bias", "qkv_bias", "partial_rotary_factor", "output_gate"}
    grouped |= {"softmax_scale", "nope_every", "gate_proj"}
    others = {*GroupedQueryAttention.model_fields, *LatentAttention.model_fields}
    compressed = tuple(name for name in CompressedAttention.model_fields if name not in others)
    left_out = {path for path in left_out if not path.startswith(("local", *compressed))}
    assert left_out == grouped, "debug has latent attention"


def paths_of(table: dict[str, Any], prefix: str = "") -> list[str]:
    paths = []
    for key, value in table.items():
        paths.append(prefix + key)
        if isinstance(value, dict):
            paths += paths_of(value, f"{prefix}{key}.")
    return paths


# All that UTF-8 writes but the null character, which is refused. Hypothesis has them by itself too, but tries every one
# first, in 3 s.
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")


@examples(40, deadline=None)
@given(
    text=st.text(CHARACTERS, max_size=20),
    files=st.lists(st.text(CHARACTERS, min_size=1, max_size=10), max_size=3, unique=True),
    number=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    seed=st.integers(min_value=0, max_value=2**32 - 1),
)
def test_any_values_survive_the_way_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, files: list[str], number: float, seed: int
) -> None:
    base = debug()
    data = base.data.model_copy(update={"text_field": text, "source": "text", "files": ("a", *files)})
    optimizer = base.optimizer.model_copy(update={"learning_rate": number})
    run = base.model_copy(update={"data": data, "optimizer": optimizer, "seed": seed})
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(dump_toml(run), encoding="utf-8")
    assert load_run(str(path)) == run


def test_a_field_that_is_none_against_its_default_is_written() -> None:
    text = dump_toml(debug().model_copy(update={"seed": None}))
    assert text.startswith('version = 1\nname = "debug"\nseed = "none"\n')


PATHS = sorted({field.path for field in every_field(Run)})
JUNK = st.one_of(  # values that TOML, the schema or nothing takes
    st.text(CHARACTERS, max_size=8),
    st.sampled_from(["none", "[]", "[1]", "{}", "{a=1}", "{kind=1}", "[[1]]", "1", "-1", "1e9", "nan", "inf", "true"]),
    st.sampled_from(["1979-05-27", '"', "''", "{", "gqa", "mla", "[{}]", "99999999999999999999"]),
)


@examples(300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*PATHS, "x", "model.x.y", "model.moe.x"]), JUNK), max_size=3))
def test_whatever_is_typed_gives_a_run_or_one_clear_line(typed: list[tuple[str, str]]) -> None:
    overrides = [f"{path}={value}" for path, value in typed]
    try:
        line = load_run("debug", overrides).name
    except ConfigError as error:
        line = str(error)
    assert len(line.splitlines()) == 1


@examples(100, deadline=None)
@given(content=st.one_of(st.binary(max_size=40), st.text(CHARACTERS, max_size=40).map(lambda text: text.encode())))
def test_whatever_a_file_holds_gives_a_run_or_one_clear_line(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_run(str(path))
    assert len(str(raised.value).splitlines()) == 1


def test_a_file_of_any_size_is_read_only_up_to_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    with file.open("wb") as opened:
        opened.truncate(10**12)  # a sparse file takes no room
    with pytest.raises(ConfigError, match="larger than 4 MiB"):
        load_run(str(file))


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (
            "2",
            "the file is of a newer version than this Penstock reads; got version = 2; allowed: 1; "
            "fix: update Penstock",
        ),
        ("0", "version is not a version; got 0; allowed: 1"),
        ('"1"', "version is not a version; got '1'; allowed: 1"),
        ("true", "version is not a version; got True; allowed: 1"),
    ],
)
def test_a_file_of_another_version_is_refused(tmp_path: Path, version: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'version = {version}\npreset = "debug"\n')
    with pytest.raises(ConfigError) as refusal:
        load_run(str(path))
    assert str(refusal.value) == f"{path}: {message}"


def test_a_file_of_an_older_version_is_told_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.config.versions.VERSION", 3)  # there is no older version yet
    with pytest.raises(
        ConfigError, match=r"an older version .* fix: write version = 3; errors name the keys to rename"
    ):
        check_version({VERSION_KEY: 2}, "mine.toml")


def test_renamed_keys_are_gone_and_their_new_keys_exist() -> None:
    for old in RENAMED:
        assert not find(Run, old)
        assert find(Run, str(new_path(old))), f"{old} has no successor"
    for old in REMOVED:
        path, _, value = old.partition("=")
        assert not any(value == "" or value in field.choices for field in find(Run, path)), f"{old} is still there"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dispatch.bound=2", "dispatch.bound is dispatch.row_capacity_factor now; fix: rename the key"),
        (
            "model.moe.router.score=softmax",
            "model.moe.router.score is model.moe.router.scoring_func now; fix: rename the key",
        ),
        (
            "graphs.capture=passes",
            'graphs.capture has an unknown value; got "passes"; allowed: none, full, partial, auto; '
            "fix: write full, as passes is called now",
        ),
        (
            "kernels.attention=hopper",
            'kernels.attention has an unknown value; got "hopper"; allowed: auto, default, math, flash, efficient, '
            "cudnn, flash-4, triton; fix: write auto, which takes cuDNN or flash-attn-4; ours for Hopper are gone",
        ),
    ],
)
def test_an_old_key_or_value_is_refused_with_its_new_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_run("debug", [override])
    assert str(refusal.value) == message
