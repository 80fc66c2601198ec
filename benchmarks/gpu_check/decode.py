"""Time whole decode steps of a Llama-3.1-8B-shaped model, bounded cache against full cache."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch._dynamo.utils import counters

import inertia_fx
from inertia_fx.backend import own_code

from .report import Row, Setting

LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}  # fmt: skip
TINY = LLAMA | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
}  # fmt: skip


def random_llama(shape: dict[str, Any], dtype: torch.dtype) -> Any:
    """A Llama of random weights, on torch's current default device."""
    config = transformers.LlamaConfig(**shape)
    config._attn_implementation = "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@dataclasses.dataclass
class Timing:
    """Of one decode step. `tokens_per_second` counts all rows."""

    seconds: float
    tokens_per_second: float
    first_seconds: float
    kv_gib: float
    peak_gib: float

    def figures(self) -> dict[str, Any]:
        return {
            "tokens/s": self.tokens_per_second, "ms": self.seconds * 1e3, "K/V GiB": self.kv_gib,
            "peak GiB": self.peak_gib, "first steps s": self.first_seconds,
        }  # fmt: skip


class Decoding:
    """The model, made when first needed, and what is compiled from it: graphs are shared by all prompt lengths."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.backend = "inductor" if setting.on_gpu else "eager"
        self._model: Any = None
        self._compiled: dict[int, Any] = {}

    @property
    def model(self) -> Any:
        if self._model is None:
            with torch.device(self.setting.device):
                self._model = random_llama(TINY if self.setting.tiny else LLAMA, torch.bfloat16)
        return self._model

    def compiled(self, rows: int) -> Any:
        """One per batch size: what is compiled first for another would be compiled again with a symbolic batch."""
        if rows not in self._compiled:
            self._compiled[rows] = inertia_fx.compile(self.model, ratio=0.9, backend=self.backend)
        return self._compiled[rows]

    def compare(self, tokens: int, rows: int, baseline: bool = True) -> Iterator[Row]:
        """Full refresh, Lazy4 and Score-Free at this prompt length, and the full cache under torch.compile."""
        full = self.bounded(self.compiled(rows), tokens, rows, refresh_every=1)
        yield Row("full refresh", full.figures(), **self._speed_goal(full, tokens, rows))
        free = self.bounded(self.compiled(rows), tokens, rows, refresh_every=None)
        yield Row("Score-Free", free.figures())
        share = (full.seconds - free.seconds) / full.seconds
        goal = self.setting.goal("at most 3 % of a step", share <= 0.03)
        yield Row("scoring, of a full-refresh step", {"share": share}, **goal)
        lazy = self.bounded(self.compiled(rows), tokens, rows, refresh_every=4)
        yield Row("Lazy4", lazy.figures())
        if baseline:
            whole = self.full_cache(tokens, rows)
            figures = whole.figures() | {"speed-up of full refresh": whole.seconds / full.seconds}
            yield Row("full cache, compiled (StaticCache)", figures)

    def cuda_graphs(self, tokens: int, rows: int) -> Iterator[Row]:
        """Full refresh with mode="reduce-overhead", and how often Inductor refused to capture a CUDA graph."""
        mode = "reduce-overhead" if self.setting.on_gpu else None
        skipped = counters["inductor"]["cudagraph_skips"]
        compiled = inertia_fx.compile(self.model, ratio=0.9, backend=self.backend, mode=mode)
        timing = self.bounded(compiled, tokens, rows, refresh_every=1)
        figures = timing.figures() | {"CUDA graphs skipped": counters["inductor"]["cudagraph_skips"] - skipped}
        yield Row("full refresh, reduce-overhead", figures, **self._speed_goal(timing, tokens, rows))

    def _speed_goal(self, timing: Timing, tokens: int, rows: int) -> dict[str, Any]:
        if (tokens, rows) != (65536, 1):
            return {}
        return self.setting.goal("at least 200 tokens/s", timing.tokens_per_second >= 200)

    # ------------------------------------------------------------------ candidate and baselines

    def bounded(self, model: Any, tokens: int, rows: int, **settings: Any) -> Timing:
        """Time the candidate: our step, the cache filled with random keys and values in place of a prompt's."""
        cache = inertia_fx.InertiaCache(inertia_fx.Config(ratio=0.9, **settings))
        with cache.prompt(rows, tokens):
            for layer in range(self.model.config.num_hidden_layers):
                cache.update(*self._random(tokens, rows), layer)
        token = torch.full((rows, 1), 5, device=self.setting.device)
        timing = self._time(lambda: model(token, past_key_values=cache).logits, rows, lambda: cache.nbytes)
        kept = len(cache.retained_positions()[0])
        budget = cache.budget[0]
        assert kept == budget, f"{kept} tokens kept, not {budget}"
        return timing

    def dynamic_cache(self, tokens: int, rows: int) -> Iterator[Row]:
        """Time the full cache in transformers' DynamicCache: no mask, so SDPA's fastest kernels, but steps copy it."""
        timing = self.full_cache(tokens, rows, static=False)
        yield Row("full cache, compiled (DynamicCache)", timing.figures())

    def full_cache(self, tokens: int, rows: int, static: bool = True) -> Timing:
        """Time the baseline: the model's own step under torch.compile, every token kept."""
        if static:
            room = self._first + self._steps
            cache = transformers.StaticCache(config=self.model.config, max_cache_len=tokens + room)
        else:
            cache = transformers.DynamicCache(config=self.model.config)
        for layer in range(self.model.config.num_hidden_layers):
            cache.update(*self._random(tokens, rows), layer)
            if not static:  # it grows: without the mark the second step would compile anew
                torch._dynamo.mark_dynamic(cache.layers[layer].keys, 2)
                torch._dynamo.mark_dynamic(cache.layers[layer].values, 2)
        position = torch.full((1, 1), tokens, device=self.setting.device)
        token = torch.full((rows, 1), 5, device=self.setting.device)

        def forward(token: Any, position: Any, cache: Any) -> Any:
            return self.model(token, position_ids=position, past_key_values=cache, use_cache=True).logits

        compiled = torch.compile(own_code(forward), backend=self.backend)

        def step() -> Any:
            logits = compiled(token, position, cache)
            position.add_(1)
            return logits

        def nbytes() -> int:
            return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))

        return self._time(step, rows, nbytes)

    # ------------------------------------------------------------------ measuring

    @property
    def _first(self) -> int:
        """Steps before the clock runs. Step 1 scores and evicts; Lazy4 and Score-Free compile another graph at step 2."""
        return 6

    @property
    def _steps(self) -> int:
        return 4 if self.setting.tiny else 48

    def _random(self, tokens: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.model.config
        shape = (rows, config.num_key_value_heads, tokens, config.head_dim)
        key, value = (torch.randn(shape, dtype=torch.bfloat16, device=self.setting.device) for _ in range(2))
        return key, value

    def _time(self, step: Callable[[], Any], rows: int, nbytes: Callable[[], int]) -> Timing:
        """Wall clock over many steps that follow each other without waiting, as `generate` runs them but for sampling."""
        self.setting.synchronize()
        begin = time.perf_counter()
        for _ in range(self._first):
            logits = step()
        assert bool(logits.isfinite().all()), "logits are not finite"
        self.setting.synchronize()
        first = time.perf_counter() - begin
        self.setting.peak_gib()
        begin = time.perf_counter()
        for _ in range(self._steps):
            step()
        self.setting.synchronize()
        seconds = (time.perf_counter() - begin) / self._steps
        timing = Timing(seconds, rows / seconds, first, nbytes() / 2**30, self.setting.peak_gib())
        self.setting.free_memory()
        return timing
