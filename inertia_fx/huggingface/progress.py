"""Show on the terminal what the first decode step is waiting for, as its compile takes a while.

It is one of transformers' progress bars: `transformers.utils.logging.disable_progress_bar()` switches it off, and it
does not show where stderr is not a terminal. The same words go to the logger `inertia_fx`, at level INFO.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from transformers.utils import logging as transformers_logging

from .. import debug


@contextlib.contextmanager
def compiling(first: bool) -> Iterator[None]:
    """Show what the compile inside the block is doing, and for how long. Does nothing unless `first`."""
    if not first:
        yield
        return
    bar = transformers_logging.tqdm(total=0, bar_format="inertia_fx: {desc} [{elapsed}]", leave=False, disable=None)
    done = threading.Event()

    def tick() -> None:
        while not done.wait(1):
            bar.refresh()

    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        with debug.watched(bar.set_description_str):
            debug.stage("tracing the decode step, which is compiled once")
            yield
    finally:
        done.set()
        ticking.join()
        bar.close()
