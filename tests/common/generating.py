"""Greedy generation with a small budget, as most tests of `generate` want it."""

from __future__ import annotations

from typing import Any

SETTINGS: dict[str, Any] = {"ratio": 0.7, "min_budget": 5}


def generate(model: Any, inputs: dict[str, Any], tokens: int = 16, **settings: Any) -> Any:
    """Call `generate` for so many tokens, greedily unless told otherwise."""
    return model.generate(**inputs, **{"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0} | settings)
