"""Hide a number in a long text, and ask for it twice: with the full cache, and of the compiled model.

Nothing is printed here: :func:`run` measures, `picture` draws, `commands` prints.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from .. import api
from ..cache.storage import nbytes
from ..config import CompilerOptions, Config
from ..errors import ConfigError
from ..huggingface.cache import InertiaCache
from .checkpoint import Progress
from .options import given

NUMBER = "48213"
NEEDLE = f"The special magic number is {NUMBER}. Remember it."
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INTRODUCTION = (
    "Some text is given below. A special magic number is hidden in it. Make sure to memorize it."
    " I will ask you about the number afterwards.\n"
)
QUESTION = "\nWhat is the special magic number mentioned in the provided text?"
ANSWER_PREFIX = "The special magic number mentioned in the provided text is"

ANSWER_TOKENS = 12
"""The number has to come within so many tokens."""
WARM_UP, TIMED = 4, 24
"""Decode steps that may compile, and those after them, which are timed."""
SHORTEST = 150


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Hold the text as tokens, and where the sentence with the number stands in it."""

    ids: list[int]
    needle: range


@dataclasses.dataclass(frozen=True)
class Run:
    """Measure one greedy decode.

    Attributes:
        answer: its first tokens as text; right: whether they hold the number.
        tokens: the ids that were generated.
        cached: tokens in the cache at the end, per layer.
        nbytes: K/V storage at the end, as allocated.
        ms: median time of a decode step after warm-up.
        compile_seconds: what the first steps took longer.
        kept: positions in the cache after each step; empty for the full cache.
    """

    answer: str
    right: bool
    tokens: list[int]
    cached: int
    nbytes: int
    ms: float
    compile_seconds: float
    kept: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Result:
    """Hold both runs over one prompt. `words` are all its tokens as text, prompt and generated ones."""

    prompt: Prompt
    config: Config
    full: Run
    inertia: Run
    words: list[str]


def check(*, tokens: int, backend: str, picture: pathlib.Path | None = None, **settings: Any) -> Config:
    """Refuse bad input before anything slow has begun.

    Args:
        tokens, backend, picture: as on the command line.
        **settings: of :class:`Config`, ``None`` where they were not given.

    Raises:
        ConfigError: a value is out of range or unknown, or the picture cannot be written there.
    """
    config = Config(**given(Config, settings))
    CompilerOptions(backend=backend)
    if tokens < SHORTEST:
        raise ConfigError(f"tokens={tokens} is too short a text to hide a number in: pass at least {SHORTEST}.")
    if picture is not None and (picture.is_dir() or not picture.absolute().parent.is_dir()):
        raise ConfigError(f"picture={picture} is not a file in an existing folder: pass a path such as demo.png.")
    return config


def sensible_dtype(device: str) -> torch.dtype:
    """Choose bfloat16 where the hardware multiplies it: without such instructions a CPU is several times slower in it."""
    if device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32
    return torch.bfloat16


def build_prompt(tokenizer: Any, tokens: int) -> Prompt:
    """Build about `tokens` tokens: filler with the needle a third of the way in, the question, the answer's beginning."""
    template = bool(getattr(tokenizer, "chat_template", None))

    def encode(text: str) -> list[int]:
        # A chat template brings its own special tokens.
        return list(tokenizer(text, add_special_tokens=not template).input_ids)

    def render(repeats: int) -> str:
        before = repeats // 3
        parts = [FILLER] * before + [NEEDLE] + [FILLER] * (repeats - before)
        user = INTRODUCTION + " ".join(parts) + QUESTION
        if not template:
            return user + "\n"
        message = [{"role": "user", "content": user}]
        return str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))

    prefix = list(tokenizer(ANSWER_PREFIX, add_special_tokens=False).input_ids)
    base, more = len(encode(render(3))), len(encode(render(13)))
    text = render(max(3, 3 + round((tokens - base - len(prefix)) * 10 / (more - base))))
    start = text.index(NEEDLE)
    # Up to the space before: a tokenizer takes it into the word that follows.
    needle = range(len(encode(text[:start].rstrip(" "))), len(encode(text[: start + len(NEEDLE)])))
    return Prompt(encode(text) + prefix, needle)


def run(
    model: Any,
    tokenizer: Any,
    config: Config,
    *,
    tokens: int = 1200,
    backend: str = "inductor",
    on_progress: Progress = lambda stage: None,
) -> Result:
    """Decode greedily with the full cache, then with `inertia_fx`.

    Raises:
        ConfigError: the model takes no prompt of `tokens` tokens.
        UnsupportedModelError: the model cannot be compiled.
    """
    compiled = api.compile(model, config, backend=backend)
    prompt = build_prompt(tokenizer, tokens)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and len(prompt.ids) + WARM_UP + TIMED > longest:
        raise ConfigError(
            f"tokens={tokens} is more text than the model takes ({longest} tokens): pass a smaller number."
        )
    full = _decode(model, DynamicCache(config=model.config), prompt, tokenizer, backend, "full cache", on_progress)
    inertia = _decode(compiled, InertiaCache(), prompt, tokenizer, backend, "inertia_fx", on_progress)
    words = [tokenizer.decode([token]) for token in prompt.ids + inertia.tokens]
    return Result(prompt, config, full, inertia, words)


@torch.no_grad()
def _decode(
    model: Any, cache: Any, prompt: Prompt, tokenizer: Any, backend: str, label: str, on_progress: Progress
) -> Run:
    ours = isinstance(cache, InertiaCache)
    parameters = inspect.signature(model.forward).parameters
    arguments = {"cache" if "cache" in parameters else "past_key_values": cache, "use_cache": True}
    last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    on_progress(f"{label}: prefill of {len(prompt.ids):,} tokens")
    logits = model(torch.tensor([prompt.ids], device=model.device), **arguments, **last).logits
    # The baseline is compiled likewise: one graph for the whole step, for any length from the first step on.
    step = _next_logits if ours else torch.compile(_next_logits, backend=backend, fullgraph=True)
    if not ours:
        for tensor in _buffers(cache):
            torch._dynamo.mark_dynamic(tensor, 2)
    on_progress(f"{label}: compiling" + (" (takes a minute or two on two cores)" if backend == "inductor" else ""))
    tokens, seconds, kept = [int(logits[0, -1].argmax())], [], []
    for index in range(WARM_UP + TIMED):
        if index == WARM_UP:
            on_progress(f"{label}: decoding")
        started = time.perf_counter()
        logits = step(model, torch.tensor([tokens[-1:]], device=model.device), arguments)
        tokens.append(int(logits[0, -1].argmax()))  # also waits for the device
        seconds.append(time.perf_counter() - started)
        if ours:
            kept.append(cache.retained_positions()[0].tolist())
    steady = statistics.median(seconds[WARM_UP:])
    answer = tokenizer.decode(_until_end(tokens[:ANSWER_TOKENS], tokenizer), skip_special_tokens=True).strip()
    return Run(
        answer=answer,
        right=NUMBER in answer,
        tokens=tokens[:-1],
        cached=len(kept[-1]) if ours else cache.get_seq_length(),
        nbytes=nbytes(_buffers(cache)),
        ms=steady * 1e3,
        compile_seconds=max(0.0, sum(seconds[:WARM_UP]) - WARM_UP * steady),
        kept=kept,
    )


def _next_logits(model: Any, token: Tensor, arguments: dict[str, Any]) -> Any:
    return model(token, **arguments).logits


def _until_end(tokens: list[int], tokenizer: Any) -> list[int]:
    end = tokenizer.eos_token_id
    return tokens[: tokens.index(end)] if end in tokens else tokens


def _buffers(cache: Any) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
