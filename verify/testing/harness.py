"""Share a compiled model, settings, prompts and decoding loops between the tests of :class:`.contract.DecoderContract`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from ...api import compile
from ...config import Config
from ...errors import ConfigError
from ..check.compare import changed, check
from ..check.driver import Driver
from ..check.record import Tolerance, tolerance_of
from ..check.report import Report


class DecoderHarness:
    """Model, settings, prompts and decoding loops that the tests of a contract share.

    Attributes:
        model: the original Hugging Face model in evaluation mode, or a function without arguments that makes it. It is
            compiled once per class. In half precision, where rounding decides what float32 does not, some tests are skipped.
        settings: of :class:`inertia_fx.Config`, for every test. The defaults make short prompts evict. A test of a setting
            that contradicts them is skipped.
        backend: inner compiler; "inductor" tests the compiled kernels too and takes its compile time per graph (about
            ten of them).
        lengths: prompt tokens of the rows of a batch, unequal so that rows are padded.
        steps: decode steps per test, at least 4.
        prompts: token ids of the rows instead of random ones; `lengths` is then theirs.
    """

    model: Any = None
    settings: Mapping[str, Any] = {"ratio": 0.7, "min_budget": 5}
    backend: str | Callable[..., Any] = "eager"
    lengths: Sequence[int] = (40, 23)
    steps: int = 12
    prompts: Sequence[Sequence[int]] | None = None

    _made: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.steps < 4:
            raise ConfigError(f"{cls.__name__}.steps={cls.steps}: the contract needs at least 4 decode steps.")
        cls._made = {}

    @property
    def original(self) -> Any:
        """Return the model as given."""
        if "original" not in self._made:
            given = type(self).model
            if given is None:
                raise ConfigError(f"{type(self).__name__}.model is not set: give it a model in evaluation mode.")
            self._made["original"] = given if isinstance(given, torch.nn.Module) else given()
        return self._made["original"]

    @property
    def compiled(self) -> Any:
        """Return the model, compiled with the default settings."""
        if "compiled" not in self._made:
            self._made["compiled"] = compile(self.original, backend=self.backend)
        return self._made["compiled"]

    def config(self, **settings: Any) -> Config:
        """Return the class's `settings` with some replaced; the test is skipped if they contradict each other."""
        own = Config(**self.settings)
        try:
            return changed(own, settings)
        except ConfigError as contradiction:
            pytest.skip(f"the class's settings exclude it: {contradiction}")

    @property
    def tolerance(self) -> Tolerance:
        """Return what rounding alone may do."""
        return tolerance_of(self.original.dtype)

    def need_float32(self) -> None:
        """Skip a test whose two sides add up in another order, which half precision shows."""
        if self.original.dtype.itemsize < 4:
            pytest.skip(f"{self.original.dtype} rounds the two sides apart: run the contract in float32 too")

    def rows(self, lengths: Sequence[int] | None = None, seed: int = 0) -> list[list[int]]:
        """Return prompts: `prompts` (turned round for another seed), or random tokens of the given (or the class's) lengths."""
        if lengths is None and self.prompts is not None:
            return [list(row)[:: -1 if seed else 1] for row in self.prompts]
        text = self.original.config.get_text_config(decoder=True)
        generator = torch.Generator().manual_seed(1000 + seed)
        chosen = self.lengths if lengths is None else lengths
        room = getattr(text, "max_position_embeddings", None)
        if room is not None and max(chosen) + self.steps > room:
            pytest.skip(
                f"a prompt of {max(chosen)} tokens and {self.steps} steps do not fit the model's {room} positions"
            )
        return [torch.randint(1, text.vocab_size, (length,), generator=generator).tolist() for length in chosen]

    def report(self, rows: Sequence[Sequence[int]] | None = None, **settings: Any) -> Report:
        """Run `inertia_fx.verify.check` on these rows; the test fails with the clauses that do not hold."""
        rows = self.rows() if rows is None else rows
        given = vars(self.config(**settings))
        report = check(self.compiled, [list(row) for row in rows], steps=self.steps, **given)
        broken = [f"{finding.name}: {finding.detail}" for finding in report.findings if finding.passed is False]
        assert not broken, "\n".join(broken)
        return report

    def run(self, rows: Sequence[Sequence[int]], steps: int | None = None, **settings: Any) -> list[Any]:
        """Decode greedily. Returns per step (tokens, kept positions), each per row."""
        driver = Driver(self.compiled, self.config(**settings))
        driver.prompt(rows)
        return self.go_on(driver, self.steps if steps is None else steps)

    def go_on(self, driver: Driver, steps: int) -> list[Any]:
        """Decode on from where a driver stands. Returns as :meth:`run`."""
        seen = []
        for _ in range(steps):
            tokens = driver.greedy
            driver.step()
            seen.append((tokens, driver.retained))
        return seen
