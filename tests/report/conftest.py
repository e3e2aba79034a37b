"""A browser for the tests that look at what is drawn, and a plan to draw."""

import pytest

from penstock.base.errors import PicturesError
from penstock.plan.projection import Plan
from penstock.report.frame import find_browser
from tests.report.plans import small_plan


@pytest.fixture(scope="session")
def browser() -> str:
    """A Chromium; without one the test is skipped."""
    try:
        return find_browser()
    except PicturesError as error:
        pytest.skip(f"{error}")


@pytest.fixture(scope="session")
def plan() -> Plan:
    return small_plan()
