"""The version of configuration files, and keys that were renamed."""

from pathlib import Path

import pytest

from penstock.base.errors import ConfigError
from penstock.config.load import RUN_FILE, dump_toml, load_run
from penstock.config.presets.debug import debug
from penstock.config.run import Run
from penstock.config.schema import find
from penstock.config.versions import RENAMED, RENAMED_VALUES, VERSION, VERSION_KEY, check_version, new_path


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
    monkeypatch.setattr("penstock.config.versions.VERSION", 3)
    with pytest.raises(
        ConfigError, match=r"an older version .* fix: write version = 3; errors name the keys to rename"
    ):
        check_version({VERSION_KEY: 2}, "mine.toml")


def test_a_run_is_written_with_its_version_and_read_again(tmp_path: Path) -> None:
    text = dump_toml(debug())
    assert text.startswith(f"{VERSION_KEY} = {VERSION}\n")
    (tmp_path / RUN_FILE).write_text(text)
    assert load_run(str(tmp_path)) == debug()


def test_renamed_keys_are_gone_and_their_new_keys_exist() -> None:
    for old in RENAMED:
        assert not find(Run, old)
        assert find(Run, str(new_path(old))), f"{old} has no successor"
    for path, values in RENAMED_VALUES.items():
        (field,) = find(Run, path)
        assert {*values.values()} <= {*field.choices}
        assert not {*values} & {*field.choices}


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
    ],
)
def test_an_old_key_or_value_is_refused_with_its_new_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_run("debug", [override])
    assert str(refusal.value) == message
