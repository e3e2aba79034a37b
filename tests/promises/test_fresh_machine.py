"""A clone on a machine without an environment does what README.md and docs/start.md say (tests/fresh_machine.py)."""

import pytest

from tests import fresh_machine


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_of_the_first_pages_works_after_make_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert fresh_machine.main([]) == 0, capsys.readouterr().out
