"""Share a row of the report, the device, launching and timing between the sections."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import deterministic


@dataclasses.dataclass
class Row:
    """One line of the report.

    Attributes:
        what: was checked or timed.
        figures: by name.
        is_right: False if a result is wrong (not merely slow).
        goal, met: what was hoped for, in words, and whether it is so.
    """

    what: str
    figures: dict[str, Any]
    is_right: bool = True
    goal: str | None = None
    met: bool | None = None

    def __str__(self) -> str:
        figures = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.figures.items()
        )
        wrong = "" if self.is_right else "  <-- WRONG"
        goal = "" if self.goal is None else f"  [{self.goal}: {'met' if self.met else 'missed'}]"
        return f"{self.what}: {figures}{goal}{wrong}"


@dataclasses.dataclass
class Setting:
    """The device, and whether everything is to be tiny."""

    device: torch.device
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def processors(self) -> int:
        return torch.cuda.get_device_properties(self.device).multi_processor_count if self.on_gpu else 4

    @property
    def cache_bytes(self) -> int:
        """Of the last-level cache that timing must not find its data in."""
        return torch.cuda.get_device_properties(self.device).L2_cache_size if self.on_gpu else 0

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def free_memory(self) -> None:
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def peak_gib(self) -> float:
        """Since the last call."""
        if not self.on_gpu:
            return 0.0
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak / 2**30

    def goal(self, words: str, met: bool) -> dict[str, Any]:
        """For a :class:`Row`; a tiny run has no goals."""
        return {} if self.tiny else {"goal": words, "met": met}

    def seconds_per_call(self, calls: Sequence[Callable[[], Any]], repeats: int = 20) -> float:
        """Median time of one of `calls`, which run one after the other, each on buffers of its own.

        On a GPU all of them are captured into one CUDA graph: Python and launches are not what is timed here, and
        their buffers together are larger than the cache, so that each finds its own in memory.
        """
        for call in calls:
            call()  # compiles
        self.synchronize()
        if not self.on_gpu:
            begin = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - begin) / len(calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graph.replay()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3)
        return statistics.median(times) / len(calls)


@contextlib.contextmanager
def launching_directly() -> Iterator[None]:
    """Without the dispatch of a higher-order operator, about a millisecond per launch, that `wrap_triton` is for tracing."""
    from torch._library.triton import set_wrap_triton_enabled

    with set_wrap_triton_enabled(False):
        yield


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every `empty` is full of NaN: a kernel that leaves a hole, or reads what it did not write, is found out."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, True
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before)
