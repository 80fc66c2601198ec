"""`check`: a compiled model beside the reference and beside its own full cache, step by step, on prompts of yours."""

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

from ..config import DEFAULT_RATIO, Config
from ..errors import ConfigError, InputError, NotCompiledError
from ..huggingface import uncompiled
from .clauses import Evidence, RowEvidence, Step, findings
from .driver import Driver, decided_momentum
from .inputs import token_rows
from .metrics import NEVER, ScoreLog, divergence, finite, jaccard, relative_error
from .reference import Observation, Reference
from .report import Report, RowReport

Progress = Callable[[str], None]
"""Told the name of each stage as it begins."""


def check(
    model: Any, inputs: Any, *, steps: int = 64, on_progress: Progress = lambda stage: None, **settings: Any
) -> Report:
    """Run a compiled model beside the reference and beside its full cache, and report what they have in common.

    Three decoders see every prompt: the full cache (nothing is evicted), the compiled model (once freely, once forced
    to the full cache's tokens, the two in turns on one compiled step), and the literal reference of SPEC.md, which
    follows the compiled model's tokens. In each step the reference says what it would have kept, from the same
    history; it then goes on with what the compiled model kept.

    Args:
        model: what :func:`inertia_fx.compile` returned, in evaluation mode. Its compiler (`backend`) is what is checked.
        inputs: token ids: a list of ints, a list of such lists (of any lengths), a tensor [B, P], or a tokenizer's
            output (input_ids, and attention_mask [B, P] where rows are padded).
        steps: decode steps per row, at least 1.
        on_progress: told each stage as it begins.
        settings: ratio, alpha, refresh_every, budget, ...: those of :class:`inertia_fx.Config` that shall differ from
            the compiled model's own.

    Returns:
        The report; its `ok` is false if a clause of the contract does not hold.

    Raises:
        NotCompiledError: the model is not what `inertia_fx.compile` returned.
        InputError: unusable inputs: no tokens, unequal shapes, ids outside the vocabulary, steps < 1, training mode, a
            model whose logits or scores are not finite.
        ConfigError: a setting is unknown, out of range or contradicts another.
    """
    runtime = getattr(model, "_inertia", None)
    if runtime is None:
        raise NotCompiledError(
            f"check() was given a {type(model).__name__} that inertia_fx.compile did not return: pass"
            " inertia_fx.compile(model, ...), it is the compiled model that is checked."
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps={steps!r}: check() needs at least 1 decode step, as a whole number.")
    if model.training:
        raise InputError("The model is in training mode, where dropout makes every run differ: call model.eval().")
    config = changed(runtime.config, settings)
    rows = token_rows(inputs, model.config.get_text_config(decoder=True).vocab_size)
    run = _Run(model, rows, steps, config, on_progress)
    with torch.no_grad():
        run.with_full_cache()
        run.compiled()
        run.by_reference()
    evidence = Evidence(config, model.dtype, run.evidence, run.slots, run.nbytes, run.slot_bytes)
    return Report(
        model=f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()) / 1e6:,.1f} M parameters",
        dtype=str(model.dtype).removeprefix("torch."),
        backend=str(runtime.compiler["backend"]),
        settings=repr(config),
        steps=steps,
        findings=findings(evidence),
        rows=[run.report(row, evidence) for row in range(len(rows))],
        seconds={stage: round(seconds, 3) for stage, seconds in run.seconds.items()},
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "inertia_fx")},
    )


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """The config with some settings replaced; `budget` and `ratio` replace each other.

    Raises:
        ConfigError: a setting is unknown, out of range or contradicts another.
    """
    known = [field.name for field in dataclasses.fields(Config)]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"{name}={settings[name]!r} is no setting of inertia_fx.Config: it knows {', '.join(known)}."
            )
    exclusive: dict[str, Any] = {}
    if settings.get("budget") is not None:
        exclusive = {"ratio": DEFAULT_RATIO}
    elif "ratio" in settings:
        exclusive = {"budget": None}
    return dataclasses.replace(config, **(exclusive | dict(settings)))


class _Run:
    """The three decoders over the same prompts. Rows that differ in length are left-padded for the compiled model."""

    def __init__(self, model: Any, rows: list[list[int]], steps: int, config: Config, on_progress: Progress) -> None:
        self.model, self.rows, self.steps, self.config, self.on_progress = model, rows, steps, config, on_progress
        self.settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        self.original = uncompiled(model)
        self.evidence: list[RowEvidence] = []
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

    def with_full_cache(self) -> None:
        """Greedy decoding with nothing evicted; its attention, step by step."""
        self.references = []
        for index, row in enumerate(self.rows):
            with self._stage(f"full cache: prompt of {len(row):,} tokens{self._of(index)}"):
                reference = Reference(self.original, **self.settings)
                logits = [_checked(reference.prompt(row))]
            log = ScoreLog(self.config, self.settings, len(row), reference.budget())
            full = reference.fork()
            full.row.absolute, full.observe = NEVER, log.add
            with self._stage(f"full cache: {_steps(self.steps)}{self._of(index)}"):
                for _ in range(self.steps):
                    logits.append(_checked(full.step(int(logits[-1].argmax()))))
            self.references.append(reference)
            self.logs.append(log)
            self.evidence.append(
                RowEvidence(len(row), reference.budget(), [int(step.argmax()) for step in logits], logits)
            )

    def compiled(self) -> None:
        """The compiled model on all rows at once, free and forced, in turns."""
        free = Driver(self.model, self.config)
        with self._stage("compiled model: prompt"):
            first = free.prompt(self.rows)
        forced = free.fork()
        for row, logits in zip(self.evidence, first, strict=True):
            row.tokens.append(int(logits.argmax()))
            row.first_logits = _checked(logits)
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
        step = len(self.slots)
        free.step([row.tokens[step] for row in self.evidence])
        forced.step([row.full_tokens[step] for row in self.evidence])
        self.slots.append(free.cache.slots)
        self.nbytes.append(free.cache.nbytes)
        refreshes = self.config.refreshes_at(step + 1)
        ours = zip(free.retained, free.momentum, decided_momentum(free.cache), map(_checked, free.logits), strict=True)
        theirs = zip(forced.retained, map(_checked, forced.logits), strict=True)
        for row, of_free, of_forced in zip(self.evidence, ours, theirs, strict=True):
            row.tokens.append(int(of_free[-1].argmax()))
            row.steps.append(Step(*of_free, *of_forced, refreshes))

    def by_reference(self) -> None:
        """The reference on the compiled model's tokens; in each step it says what it would keep, and follows."""
        for index, (reference, row) in enumerate(zip(self.references, self.evidence, strict=True)):
            seen: list[Observation] = []
            reference.observe = seen.append
            with self._stage(f"reference: {_steps(self.steps)}{self._of(index)}"):
                for token, step in zip(row.tokens, row.steps, strict=False):
                    logits = reference.step(token, follow=step.retained)
                    before = seen.pop()
                    step.reference_logits = logits.float().cpu()
                    step.attended, step.attended_momentum = before.positions, before.momentum
                    step.chosen = list(reference.chosen)
                    step.reference_momentum = dict(zip(reference.positions, reference.momentum, strict=True))
                    mass = before.attention.mean(dim=(0, 1))
                    kept = set(step.retained)
                    step.evicted_mass = math.fsum(
                        float(share)
                        for position, share in zip(before.positions, mass, strict=True)
                        if position not in kept
                    )

    def report(self, index: int, evidence: Evidence) -> RowReport:
        """One row's measures."""
        row, log = self.evidence[index], self.logs[index]
        stability, why = log.stability()
        disagreement, disagreements = [], 0
        for step, full in zip(row.steps, row.full_logits[1:], strict=True):
            disagreements += int(step.forced_logits.argmax()) != int(full.argmax())
            disagreement.append(disagreements)
        pairs = list(zip(row.full_logits[1:], (step.forced_logits for step in row.steps), strict=True))
        return RowReport(
            prompt_tokens=row.prompt,
            budget=row.budget,
            tokens=row.tokens,
            full_tokens=row.full_tokens,
            first_divergence=row.first_divergence,
            first_set_difference=next((t for t, step in enumerate(row.steps, 1) if step.retained != step.chosen), None),
            set_jaccard=[jaccard(step.retained, step.chosen) for step in row.steps],
            ties=[t for t, step in enumerate(row.steps, 1) if evidence.is_tie(step)],
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


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _checked(logits: Tensor) -> Tensor:
    logits = logits.float().cpu()
    finite("the logits", logits)
    return logits
