"""Versions of configuration files, by a table of changes that were never made."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import ConfigError
from penstock.config.load import RUN_FILE, dump_toml, load_run
from penstock.config.presets.debug import debug
from penstock.config.run import Run
from penstock.config.schema import every_field, fields_of
from penstock.config.versions import CHANGES, VERSION, VERSION_KEY, Change, brought_up_to_date, pop_version, refuse_old

TABLE = (
    Change(since=2, old="moe.dispatcher", new="dispatch.kind", values={"a2a": "all-to-all"}),
    Change(since=2, old="training.tied", default=False, instead="set model.tie_word_embeddings"),
    Change(since=3, old="dispatch.kind", new="dispatch.method"),
    Change(since=3, old="schedule.decay", new="schedule.decay", values={"cos": "cosine"}),
    Change(since=3, old="saving", new="checkpoint"),
)
KNOWN = ("dispatch.method", "schedule.decay", "checkpoint", "checkpoint.every", "training.steps", "seed")


def message_of(tree: dict[str, Any], version: int, known: Sequence[str] = KNOWN) -> str:
    with pytest.raises(ConfigError) as refusal:
        refuse_old(tree, version, "mine.toml", known, TABLE)
    return str(refusal.value)


# A file that a person wrote


def test_a_field_that_moved_is_refused_with_the_line_to_write_instead() -> None:
    assert message_of({"dispatch": {"kind": "symmetric"}}, 2) == (
        "mine.toml: `dispatch.kind` is called `dispatch.method` since version 3: "
        'write dispatch.method = "symmetric"; fix: write that, and version = 3'
    )


def test_a_field_that_moved_twice_is_told_where_it_is_now_with_its_value_of_now() -> None:
    assert 'is called `dispatch.method` since version 3: write dispatch.method = "all-to-all"' in message_of(
        {"moe": {"dispatcher": "a2a"}}, 1
    )


def test_a_field_that_is_gone_is_told_with_what_to_do() -> None:
    assert message_of({"training": {"tied": True}}, 1) == (
        "mine.toml: `training.tied` is gone since version 2, leave it out: set model.tie_word_embeddings; "
        "fix: write that, and version = 3"
    )


def test_a_value_that_is_called_otherwise_is_told() -> None:
    assert 'a value of `schedule.decay` is called otherwise since version 3: write schedule.decay = "cosine"' in (
        message_of({"schedule": {"decay": "cos"}}, 2)
    )
    refuse_old({"schedule": {"decay": "linear"}}, 2, "mine.toml", KNOWN, TABLE)


def test_a_section_that_moved_is_told_as_one() -> None:
    assert "section `saving` is called `checkpoint` since version 3: write [checkpoint]" in message_of(
        {"saving": {"every": 5, "keep": 2}}, 1
    )


def test_everything_is_told_at_once() -> None:
    text = message_of({"moe": {"dispatcher": "deep-ep"}, "training": {"tied": False, "steps": 3}}, 1)
    assert text.count("since version") == 2
    assert "\n" not in text


def test_a_name_that_is_not_known_any_more_is_told_whatever_version_the_file_claims() -> None:
    assert message_of({"dispatch": {"kind": "symmetric"}}, 3).endswith("fix: write that")


def test_a_name_that_means_something_else_today_is_left_to_files_of_today() -> None:
    refuse_old({"saving": {"every": 5}}, 3, "mine.toml", (*KNOWN, "saving"), TABLE)
    assert "section `saving`" in message_of({"saving": {"every": 5}}, 2, (*KNOWN, "saving"))


def test_a_file_that_says_nothing_old_passes() -> None:
    refuse_old({"seed": 1, "training": {"steps": 3}, "checkpoint": 3}, 1, "mine.toml", KNOWN, TABLE)


# The configuration of a run


def test_the_configuration_of_an_old_run_is_brought_up_to_date() -> None:
    old = {
        "seed": 3,
        "moe": {"dispatcher": "a2a"},
        "training": {"steps": 9, "tied": False},
        "schedule": {"decay": "cos"},
        "saving": {"every": 5},
    }
    assert brought_up_to_date(old, 1, "config.toml", TABLE) == {
        "seed": 3,
        "dispatch": {"method": "all-to-all"},
        "training": {"steps": 9},
        "schedule": {"decay": "cosine"},
        "checkpoint": {"every": 5},
    }
    assert old["moe"] == {"dispatcher": "a2a"}, "the tree that was given is left as it was"


def test_only_changes_since_its_version_are_made() -> None:
    assert brought_up_to_date({"training": {"tied": True}}, 2, "config.toml", TABLE) == {"training": {"tied": True}}


def test_a_moved_section_leaves_what_is_there_already() -> None:
    tree = {"saving": {"every": 5, "keep": 1}, "checkpoint": {"keep": 2}}
    assert brought_up_to_date(tree, 1, "config.toml", TABLE) == {"checkpoint": {"every": 5, "keep": 2}}


def test_a_run_that_needs_what_is_gone_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        brought_up_to_date({"training": {"tied": True}}, 1, "runs/a/config.toml", TABLE)
    assert str(refusal.value) == (
        "runs/a/config.toml: this run has training.tied, which is gone since version 2; got true; allowed: false; "
        "fix: set model.tie_word_embeddings"
    )


# Files as they are read


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `seed` had been called `random` before a version 2."""
    table = (Change(since=2, old="random", new="seed"),)
    monkeypatch.setattr(refuse_old, "__defaults__", (table,))
    monkeypatch.setattr(brought_up_to_date, "__defaults__", (table,))


@pytest.mark.usefixtures("renamed")
def test_a_file_is_refused_and_a_run_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.toml", 'preset = "debug"\nrandom = 7\n')
    with pytest.raises(ConfigError, match="`random` is called `seed` since version 2: write seed = 7"):
        load_run(path)
    (tmp_path / "run").mkdir()
    write(tmp_path / "run" / RUN_FILE, dump_toml(debug()).replace("seed = 0", "random = 7"))
    assert load_run(str(tmp_path / "run")).seed == 7


@pytest.mark.usefixtures("renamed")
def test_an_override_is_refused_in_the_same_words() -> None:
    with pytest.raises(ConfigError, match="override: `random` is called `seed` since version 2: write seed = 7"):
        load_run("debug", ["random=7"])


def test_a_file_may_say_its_version(tmp_path: Path) -> None:
    assert load_run(write(tmp_path / "a.toml", f'version = {VERSION}\npreset = "debug"\n')).name == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 99", "later version than this Penstock; got version = 99; allowed: 1 to 1; fix: update Penstock"),
        ("version = 0", "version is no version; got 0; allowed: 1 to 1"),
        ("version = true", "version is no version; got true; allowed: 1 to 1"),
        ('version = "1"', 'version is no version; got "1"; allowed: 1 to 1'),
    ],
)
def test_a_version_that_is_none_of_ours_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_run(write(tmp_path / "a.toml", f'{text}\npreset = "debug"\n'))
    assert str(refusal.value).endswith(message)
    assert str(refusal.value).startswith(f"{tmp_path}/a.toml: ")


def test_a_version_is_taken_out_of_the_table() -> None:
    table = {"version": 1, "seed": 2}
    assert (pop_version(table, "a.toml"), table) == (1, {"seed": 2})


def test_no_field_is_called_like_the_version() -> None:
    assert VERSION_KEY not in fields_of(Run)


def test_the_table_ends_in_todays_names() -> None:
    today = {field.path for field in every_field(Run)}
    gone = {change.old for change in CHANGES}
    assert [change.new for change in CHANGES if change.new and change.new not in today | gone] == []
    assert max((change.since for change in CHANGES), default=1) == VERSION
    assert [change.since for change in CHANGES] == sorted(change.since for change in CHANGES)
