"""Compare a compiled model with the reference and with its own full cache, step by step, on given prompts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...config import DEFAULT_RATIO, Config
from ...errors import InputError
from ...huggingface.model import uncompiled
from ...optional import require
from ...settings import refuse_unknown, settings_of, takes
from ..reference import Observation, Reference
from .clauses import findings
from .driver import Driver, decided_momentum, runtime_of
from .metrics import NEVER, divergence, finite, jaccard, relative_error
from .record import RowRecord, RunRecord, StepRecord
from .report import Report
from .report_data import RowReport
from .score_log import ScoreLog
from .tokens import token_rows

Progress = Callable[[str], None]
"""Told the name of each stage as it begins."""


class _ModelsOwn:
    """The default of every setting: the compiled model's own."""

    def __repr__(self) -> str:
        return "the compiled model's own"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments(Config):
    """Join what `check` takes. Never made: its constructor types the function."""

    model: Any = dataclasses.field(kw_only=False)
    inputs: Any = dataclasses.field(kw_only=False)
    steps: int = 64
    on_progress: Progress = lambda stage: None


@takes(_Arguments, default=_ModelsOwn())
def check(
    model: Any,
    inputs: Any,
    *,
    steps: int = 64,
    on_progress: Progress = lambda stage: None,
    **settings: Any,
) -> Report:
    """Compare a compiled model with the reference and with its full cache, and report where they agree.

    Three decoders see every prompt: the full cache (nothing is evicted), the compiled model (once freely, once forced
    to the full cache's tokens, the two in turns on one compiled step), and the literal reference of SPEC.md, which
    follows each of its two sequences. In each step the reference says what it would have kept, from the same history; it
    then goes on with what the compiled model kept.

    Args:
        model: what :func:`inertia_fx.compile` returned, in evaluation mode. Its compiler (`backend`) is what is checked.
        inputs: token ids: a list of ints, a list of such lists (of any lengths), a tensor [B, P], or a tokenizer's
            output (input_ids, and attention_mask [B, P] where rows are padded).
        steps: decode steps per row, at least 1.
        on_progress: told each stage as it begins.
        **settings: of :class:`inertia_fx.Config`, where they shall differ from the compiled model's own, whatever
            default an editor shows. `budget` and `ratio` replace each other.

    Returns:
        The report; its `ok` is false if a clause of the contract does not hold.

    Raises:
        NotCompiledError: the model is not what `inertia_fx.compile` returned.
        InputError: unusable inputs: no tokens, unequal shapes, ids outside the vocabulary, a text longer than the model
            allows, steps < 1, training mode, a model whose own logits or scores are not finite.
        UnsupportedModelError: the model's eager attention hands out no probabilities, which the reference reads.
        ConfigError: a setting is out of range or contradicts another, or scipy is missing.
    """
    refuse_unknown("check", settings, ("steps", "on_progress", *settings_of(Config)))
    model = getattr(model, "_orig_mod", model)
    runtime = runtime_of(model)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps={steps!r}: check() needs at least 1 decode step, as a whole number.")
    if model.training:
        raise InputError("The model is in training mode, where dropout makes every run differ: call model.eval().")
    require("scipy", extra="verify", purpose="check()")
    config = changed(runtime.config, settings)
    text = model.config.get_text_config(decoder=True)
    rows = token_rows(inputs, text.vocab_size)
    longest, room = max(map(len, rows)) + steps, getattr(text, "max_position_embeddings", None)
    if room is not None and longest > room:
        raise InputError(
            f"A prompt of {longest - steps} tokens and {steps} steps are more than the model's {room} positions:"
            " shorten one of them."
        )
    comparison = _Comparison(model, rows, steps, config, on_progress)
    with torch.no_grad():
        comparison.run_full_cache()
        comparison.run_compiled_model()
        comparison.run_reference()
    record = RunRecord(
        config, model.dtype, comparison.records, comparison.slots, comparison.nbytes, comparison.slot_bytes
    )
    return Report(
        model=f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters",
        dtype=str(model.dtype).removeprefix("torch."),
        backend=runtime.compiler.backend if isinstance(runtime.compiler.backend, str) else "custom",
        settings=repr(config),
        steps=steps,
        findings=findings(record),
        rows=[comparison.report(row, record) for row in range(len(rows))],
        seconds={stage: round(seconds, 3) for stage, seconds in comparison.seconds.items()},
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "inertia_fx")},
    )


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the config with some settings replaced; `budget` and `ratio` replace each other.

    Raises:
        ConfigError: a setting is out of range or contradicts another.
    """
    exclusive: dict[str, Any] = {}
    if settings.get("budget") is not None:
        exclusive = {"ratio": DEFAULT_RATIO}
    elif "ratio" in settings:
        exclusive = {"budget": None}
    return dataclasses.replace(config, **(exclusive | dict(settings)))


class _Comparison:
    """The three decoders over the same prompts. Rows that differ in length are left-padded for the compiled model."""

    def __init__(self, model: Any, rows: list[list[int]], steps: int, config: Config, on_progress: Progress) -> None:
        self.model, self.rows, self.steps, self.config, self.on_progress = model, rows, steps, config, on_progress
        self.records: list[RowRecord] = []
        self.logs: list[ScoreLog] = []
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self.on_progress(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def _of(self, row: int) -> str:
        return f" (row {row + 1} of {len(self.rows)})" if len(self.rows) > 1 else ""

    def run_full_cache(self) -> None:
        """Decode greedily with nothing evicted, and log its attention step by step."""
        self.references = []
        empty = Reference(uncompiled(self.model), **vars(self.config))
        for index, row in enumerate(self.rows):
            with self._stage(f"full cache: prompt of {len(row):,} tokens{self._of(index)}"):
                reference = empty.fork()
                logits = [_checked(reference.prompt(row))]
            log = ScoreLog(self.config, len(row), reference.budget())
            full = reference.fork()
            full.row.absolute, full.observe = NEVER, log.add
            with self._stage(f"full cache: {_steps(self.steps)}{self._of(index)}"):
                for _ in range(self.steps):
                    logits.append(_checked(full.step(int(logits[-1].argmax()))))
            self.references.append(reference)
            self.logs.append(log)
            self.records.append(
                RowRecord(len(row), reference.budget(), [int(step.argmax()) for step in logits], logits)
            )

    def run_compiled_model(self) -> None:
        """Run the compiled model on all rows at once, free and teacher-forced, in turns."""
        free = Driver(self.model, self.config)
        with self._stage("compiled model: prompt"):
            first = free.prompt(self.rows)
        forced = free.fork()
        for row, logits in zip(self.records, first, strict=True):
            row.tokens.append(int(logits.argmax()))
            row.first_logits = logits
        self.slots: list[int] = []
        self.nbytes: list[int] = []
        with self._stage("compiled model: first step (compiles)"):
            self._step(free, forced)
        if self.steps > 1:
            with self._stage(f"compiled model: the other {_steps(self.steps - 1)}"):
                for _ in range(1, self.steps):
                    self._step(free, forced)
        buffers = [buffer for layer in free.cache.layers for buffer in (layer.keys, layer.values)]
        self.slot_bytes = sum(buffer[:, :, :1].numel() * buffer.element_size() for buffer in buffers)

    def _step(self, free: Driver, forced: Driver) -> None:
        number = len(self.slots)
        free.step([row.tokens[number] for row in self.records])
        for row, logits in zip(self.records, free.logits, strict=True):
            row.tokens.append(int(logits.argmax()))
        self.slots.append(free.cache.slots)
        self.nbytes.append(free.cache.nbytes)
        self._take(free, [row.steps for row in self.records])
        forced.step([row.full_tokens[number] for row in self.records])
        self._take(forced, [row.forced for row in self.records])

    def _take(self, driver: Driver, sequences: list[list[StepRecord]]) -> None:
        seen = zip(driver.retained, driver.momentum, decided_momentum(driver.cache), driver.logits, strict=True)
        for sequence, of_row in zip(sequences, seen, strict=True):
            sequence.append(StepRecord(*of_row, refreshes=self.config.refreshes_at(len(sequence) + 1)))

    def run_reference(self) -> None:
        """Run the reference on each sequence's tokens; in each step it says what it would keep, and follows."""
        for index, (prompted, row) in enumerate(zip(self.references, self.records, strict=True)):
            with self._stage(f"reference: twice {_steps(self.steps)}{self._of(index)}"):
                for tokens, steps in ((row.tokens, row.steps), (row.full_tokens, row.forced)):
                    reference = prompted.fork()
                    seen: list[Observation] = []
                    reference.observe = seen.append
                    for token, step in zip(tokens, steps, strict=False):  # the last token is fed to nobody
                        step.reference_logits = reference.step(token, follow=step.retained).float().cpu()
                        _compare(step, seen.pop(), reference)

    def report(self, index: int, record: RunRecord) -> RowReport:
        """Return one row's measures."""
        row, log = self.records[index], self.logs[index]
        stability, why = log.stability()
        disagreement, disagreements = [], 0
        for step, full in zip(row.forced, row.full_logits[1:], strict=True):
            disagreements += int(step.logits.argmax()) != int(full.argmax())
            disagreement.append(disagreements)
        # A compiled step whose output is not finite is a violation; its measures are then those of zeros.
        forced = [torch.nan_to_num(step.logits, 0.0, 0.0, 0.0) for step in row.forced]
        pairs = list(zip(row.full_logits[1:], forced, strict=True))
        first = row.first_eviction(self.config)
        return RowReport(
            prompt_tokens=row.prompt,
            budget=row.budget,
            tokens=row.tokens,
            full_tokens=row.full_tokens,
            first_divergence=row.first_divergence,
            first_set_difference=next((t for t, step in enumerate(row.steps, 1) if step.retained != step.chosen), None),
            set_jaccard=[jaccard(step.retained, step.chosen) for step in row.steps],
            ties=[t for t, step in enumerate(row.steps, 1) if record.is_tie(step, t == first)],
            momentum_error=max(step.momentum_error for step in row.steps),
            logits_error=max(step.logits_error for step in row.steps),
            disagreement=disagreement,
            kl=[divergence(full, forced) for full, forced in pairs],
            output_error=[relative_error(full, forced) for full, forced in pairs],
            retained=[step.retained for step in row.steps],
            evicted_mass=[step.evicted_mass for step in row.steps],
            churn=row.churn(self.config),
            churn_ceiling=2 / (row.budget + 1),
            scorer_spearman=log.mean(log.spearman),
            scorer_jaccard=log.mean(log.jaccard),
            raw_churn=log.churn(log.raw),
            smoothed_churn=log.churn(log.smoothed),
            ranking=log.ranking(),
            stability=stability,
            why_no_stability=why,
        )


def _compare(step: StepRecord, seen: Observation, reference: Reference) -> None:
    """Write the reference's side into a step's record."""
    step.attended = seen.momentum
    step.chosen = list(reference.chosen)
    step.reference_momentum = reference.row.by_position
    mass, kept = seen.attention.mean(dim=(0, 1)).tolist(), set(step.retained)
    pairs = zip(seen.momentum, mass, strict=True)
    step.evicted_mass = math.fsum(share for position, share in pairs if position not in kept)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _checked(logits: Tensor) -> Tensor:
    logits = logits.float().cpu()
    finite("the logits", logits)
    return logits
