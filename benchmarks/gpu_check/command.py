"""Check on a GPU, in under four minutes, whether the kernels are right, how fast they are, and whether it decodes.

    python benchmarks/gpu_check [--out gpu_check.json] [--budget-seconds 230] [--only kernels,attention]
    python benchmarks/gpu_check --tiny        # seconds, on a CPU: shows that the script itself works

Needs torch, triton, transformers and this checkout, nothing installed from it. Sections run in order of value until the
budget is spent (compiling is most of it; what was skipped is named, for a second run with `--only`); one that fails is
reported and does not stop the others, though a device that failed will fail them too. Prints one table last; exit status
1 if anything failed or was wrong, or if a section that compares results did not come to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default up to 3.9, which asks to have it written down
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from . import attention, bookkeeping, checkout, decode, kernels, steps
from .report import Row, Setting


@dataclasses.dataclass
class Section:
    """Rows of the report.

    Attributes:
        needs: seconds that must be left for it to begin.
        most: seconds after which it is stopped.
        proves: it compares results with what they should be, and has not done so before it comes to its end.
    """

    name: str
    rows: Callable[[Setting], Iterator[Row]]
    needs: float
    most: float = 600.0
    proves: bool = False
    status: str = "not run"
    seconds: float = 0.0
    results: list[Row] = dataclasses.field(default_factory=list)
    error: str | None = None
    reason: str | None = None


def sections(setting: Setting) -> list[Section]:
    """In order of value: is it right, is it fast, does it decode, and then what could be better."""
    decoding = decode.Decoding(setting)
    long, short = (160, 96) if setting.tiny else (65536, 16384)
    many = 2 if setting.tiny else 8
    return [
        Section("kernels", kernels.attention, 15, most=90, proves=True),  # forty kernels to compile
        Section("bookkeeping", bookkeeping.bookkeeping, 5, most=20, proves=True),
        Section("steps", steps.compiled_steps, 20, most=60, proves=True),
        Section("attention", attention.against_copy_and_sdpa, 15),
        Section("times of bookkeeping", bookkeeping.bookkeeping_times, 5),
        Section(f"decode {long} x 1", lambda _: decoding.compare(long, 1), 60),
        Section(f"decode {short} x 1", lambda _: decoding.compare(short, 1, baseline=False), 10),
        Section(f"reduce-overhead {long} x 1", lambda _: decoding.cuda_graphs(long, 1), 40),
        Section(f"decode {long} x {many}", lambda _: decoding.compare(long, many), 50),
        Section(f"decode {short} x {many}", lambda _: decoding.compare(short, many, baseline=False), 10),
        Section("splits", attention.splits, 15),
        Section("tiles", attention.tiles, 25),
        Section(f"DynamicCache {long} x 1", lambda _: decoding.dynamic_cache(long, 1), 50),
        Section("flex", attention.flex, 25),
    ]


class OutOfTime(BaseException):
    """A section's time is up. No `Exception`, since compilers catch those and make something else of them."""


def run(chosen: list[Section], setting: Setting, deadline: float, after_each: Callable[[], None]) -> None:
    """Run what fits before `deadline` (of `time.monotonic`)."""

    def interrupt(*_: Any) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, interrupt)
    for section in chosen:
        left = deadline - time.monotonic()
        if left < (0.5 if setting.tiny else section.needs):
            section.status = f"skipped: {left:.0f} s left, wants {section.needs:.0f} s"
            continue
        begin = time.monotonic()
        # Again every second, should somebody on the way catch the first one all the same.
        signal.setitimer(signal.ITIMER_REAL, min(left, section.most), 1.0)
        try:
            try:
                for row in section.rows(setting):
                    section.results.append(row)
                    print(f"[{time.monotonic() - begin:6.1f} s] {section.name}: {row}", file=sys.stderr, flush=True)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            section.status = "ok"
        except OutOfTime:
            section.status = "out of time"
        except Exception as error:  # a report of what went wrong is what the run is for
            section.status, section.error, section.reason = "failed", traceback.format_exc(), _reason(error)
            print(section.error, file=sys.stderr, flush=True)
        if not all(row.is_right for row in section.results):
            section.status = "wrong" if section.status == "ok" else f"wrong, and {section.status}"
        section.seconds = time.monotonic() - begin
        after_each()
        with contextlib.suppress(Exception):  # after a fault of the device even this fails
            setting.free_memory()


def _reason(error: BaseException) -> str:
    """The innermost error in a line: compilers wrap what stopped them, and add advice at the end."""
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def is_proven(section: Section) -> bool:
    """Whether nothing speaks against it. To be skipped does not, but a proof that was begun must come to its end."""
    if section.proves:
        return section.status == "ok" or section.status.startswith("skipped")
    return not section.status.startswith(("failed", "wrong"))


def as_json(chosen: list[Section], setting: Setting) -> dict[str, Any]:
    triton = sys.modules.get("triton")
    return {
        "device": torch.cuda.get_device_name() if setting.on_gpu else platform.machine(),
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", None),
        "transformers": sys.modules["transformers"].__version__,
        "tiny": setting.tiny,
        "sections": [dataclasses.asdict(section) | {"rows": None} for section in chosen],
    }


def print_table(chosen: list[Section], report: dict[str, Any]) -> None:
    print(f"\n{report['device']}, torch {report['torch']}, triton {report['triton']}")
    for section in chosen:
        print(f"\n{section.name}: {section.status} ({section.seconds:.1f} s)")
        if section.reason is not None:
            print(f"    {section.reason}")
        for row in section.results:
            print(f"    {row}")
    goals = [(section.name, row) for section in chosen for row in section.results if row.goal is not None]
    print("\ngoals")
    for name, row in goals:
        print(f"    {'met   ' if row.met else 'MISSED'} {row.goal:<28} {name}: {row.what}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu_check.json"))
    parser.add_argument("--budget-seconds", type=float, default=230.0)
    parser.add_argument("--only", default=None, help="comma separated beginnings of section names")
    parser.add_argument("--tiny", action="store_true", help="few slots, a tiny model, on a CPU if there is no GPU")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("no GPU is visible to torch; --tiny runs the script on a CPU")
    deadline = checkout.BEGAN + arguments.budget_seconds
    setting = Setting(torch.device("cuda" if torch.cuda.is_available() else "cpu"), arguments.tiny)
    chosen = sections(setting)
    if arguments.only is not None:
        chosen = [section for section in chosen if section.name.startswith(tuple(arguments.only.split(",")))]

    def write() -> None:
        arguments.out.write_text(json.dumps(as_json(chosen, setting), indent=2) + "\n")

    with torch.no_grad():
        run(chosen, setting, deadline, write)
    write()
    print_table(chosen, as_json(chosen, setting))
    return int(not all(is_proven(section) for section in chosen))


if __name__ == "__main__":
    sys.exit(main())
