"""Run the Triton kernels under Triton's interpreter, which runs them on CPU tensors.

Triton decides when it is imported whether its functions are interpreted, and other tests compile the same kernels: so
the interpreter lives in a process of its own, one per test session.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing  # (its import teaches processes to hand tensors on, strides and all)


@functools.cache
def _process() -> concurrent.futures.ProcessPoolExecutor:
    process = concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}):
        process.submit(torch.tensor, 0).result()  # it starts with the first job, and keeps its environment
    atexit.register(process.shutdown)
    return process


def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` where the kernels are interpreted; returns its result and `args` as it left them.

    Memory that torch allocates without filling it is NaN (or the largest integer) there: what is read was written.
    """
    return _process().submit(_call, function, args, kwargs).result()


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    from inertia_fx.kernels.triton import attention, state

    _mend_bf16_products()
    _mend_indices()
    with contextlib.ExitStack() as stack:
        for module in (state, attention):  # torch 2.11 does not wrap what is interpreted; there is no graph here
            stack.enter_context(mock.patch.object(module, "wrap_triton", lambda kernel: kernel))
        return function(*args, **kwargs), args


@functools.cache
def _mend_bf16_products() -> None:
    """The interpreter (of Triton 3.6 to 3.9 at least) multiplies the bit patterns of bf16 matrices as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    real = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return real(self, a, b, *rest)

    InterpreterBuilder.create_dot = create_dot


@functools.cache
def _mend_indices() -> None:
    """Scalars are arrays of one element there, which numpy 2.4 does not turn into numbers for Triton 3.6."""
    from triton.runtime import interpreter

    real = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        real(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch


def attention_with_a_program_missing(*args: Any, **kwargs: Any) -> Any:
    """Scored attention whose merge is launched without its last program."""
    from inertia_fx.kernels.triton import attention

    def launcher(kernel: Any) -> Any:
        class Launcher:
            def __getitem__(self, grid: Any) -> Any:
                return kernel[(grid[0], grid[1] - 1)]

        return Launcher() if kernel is attention.merge_kernel else kernel

    with mock.patch.object(attention, "wrap_triton", launcher):
        return attention.scored_attention(*args, **kwargs)
