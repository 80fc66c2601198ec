"""Any course of events leaves InertiaCache where growing Python lists are (tests/common/cache_machine.py).

pytest tests/cache/test_state_machine.py              a few thousand decode steps, counted per row
pytest tests/cache/test_state_machine.py --deep       for an hour, with fresh random events; --deep=5 for five minutes
"""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.common import cache_machine


def test_any_course_of_events_is_that_of_the_lists() -> None:
    before = cache_machine.steps_taken
    run_state_machine_as_test(
        cache_machine.CacheMachine,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert cache_machine.steps_taken - before > 2000


def test_deep(request: pytest.FixtureRequest) -> None:
    """For as many minutes as `--deep` says, each round with events of its own."""
    minutes = request.config.getoption("--deep")
    if minutes is None:
        pytest.skip("runs with --deep")
    started, before = time.monotonic(), cache_machine.steps_taken
    deep = settings(
        max_examples=200,
        stateful_step_count=80,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
    while time.monotonic() - started < 60 * minutes:
        run_state_machine_as_test(cache_machine.CacheMachine, settings=deep)
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(
                f"\n{(time.monotonic() - started) / 60:.1f} min: {cache_machine.steps_taken - before:,} decode steps",
                flush=True,
            )
    assert cache_machine.steps_taken > before
