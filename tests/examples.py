"""How many examples Hypothesis draws for a test."""

from typing import Any

from hypothesis import settings


def examples(most: int, **more: Any) -> settings:
    """Settings for `@given`: `most` examples in `make test-all`, a third of them where slow tests are left out."""
    share = settings.get_current_profile_name() == "often"
    return settings(max_examples=max(4, most // 3) if share else most, **more)
