"""Verbs that are imported when they are called."""

import os
import sys
from types import ModuleType

import pytest
import typer

from penstock.cli.verbs import Verb, group_of
from tests.cli import answers


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """A group whose verbs are a function, another group, one that cannot be imported, and one of its own."""

    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    inner = typer.Typer()

    @inner.callback()
    def tools() -> None:
        """Tools."""

    @inner.command("triple")
    def triple(number: int) -> int:
        return 3 * number

    module = ModuleType("some_verbs")
    vars(module).update(double=double, inner=inner)
    monkeypatch.setitem(sys.modules, "some_verbs", module)
    verbs = (
        Verb("double", "some_verbs", "double", "Twice a number."),
        Verb("inner", "some_verbs", "inner", "More verbs."),
        Verb("broken", "no_such_module", "broken", "Cannot be imported."),  # listed all the same
    )
    group = typer.Typer(cls=group_of(*verbs), add_completion=False)

    @group.callback()
    def top() -> None:
        """All verbs."""

    @group.command("own")
    def own() -> int:
        """A verb that is always there."""
        return 7  # known without an import

    return group


def call(app: typer.Typer, *arguments: str) -> object:
    return typer.main.get_command(app).main(arguments, prog_name="test", standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "answer"),
    [(("double", "4"), 8), (("inner", "triple", "4"), 12), (("own",), 7)],
    ids=lambda value: f"{value}",
)
def test_a_verb_is_a_function_a_group_or_one_of_the_groups_own(
    app: typer.Typer, words: tuple[str, ...], answer: int
) -> None:
    assert call(app, *words) == answer


def test_the_list_imports_nothing(app: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    call(app, "--help")
    text = capsys.readouterr().out
    names = ("double", "inner", "broken", "own")
    assert sorted(names, key=text.index) == list(names)  # lazy verbs first
    assert "Cannot be imported." in text


def test_help_is_that_of_the_verb_at_every_level(app: typer.Typer) -> None:
    for words in ((), ("double",), ("inner",), ("inner", "triple"), ("own",)):
        text = answers.written(call, app, *words, "--help")
        assert "Show this message and exit." in text
    text = answers.written(call, app, "double", "--help")
    assert "Double a number." in text and "test double" in text


def test_verbs_and_their_options_are_completed(app: typer.Typer) -> None:
    command = typer.main.get_command(app)
    with command.make_context("test", ["double"], resilient_parsing=True) as context:
        assert {one.value for one in command.shell_complete(context, "")} == {"double", "inner", "broken", "own"}
        assert [one.value for one in command.shell_complete(context, "--he")] == ["--help"]


def test_a_verb_that_cannot_be_imported_fails_when_called(app: typer.Typer) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        call(app, "broken")


def test_a_verb_that_computes_nothing_starts_no_threads_for_it(
    app: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {})  # the tests' own settings would stand
    light = Verb("own", "some_verbs", "double", "Reads.", computes=False)
    light.load()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"


def test_a_wrong_argument_is_told_by_the_verb(app: typer.Typer) -> None:
    with pytest.raises(typer.TyperException) as raised:
        call(app, "double", "four")
    assert "'number'" in raised.value.format_message()
