"""Scale hypothesis' number of examples by profile: "full", or "quick" for those who wait."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

PROFILES = {"full": 100, "quick": 25}
"""Examples of a test that does not say how many it wants."""


def examples(number: int, **others: Any) -> settings:
    """Return settings for `number` examples in the profile "full", in proportion (at least 4) in another one.

    Args:
        number: of examples.
        others: arguments of :class:`hypothesis.settings`.
    """
    share = settings.default.max_examples / PROFILES["full"]
    return settings(max_examples=max(min(number, 4), round(number * share)), **others)
