"""Generate with a model, as the tests of this process do and those that start another one."""

from __future__ import annotations

from typing import Any

import torch

import inertia_fx
from tests.common import models


def generate(model: Any, **settings: Any) -> tuple[list[int], Any]:
    cache = inertia_fx.InertiaCache(inertia_fx.Config(ratio=0.5, min_budget=8, **settings))
    ids = torch.tensor([models.prompt(40)])
    tokens = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokens[0, 40:].tolist(), [kept.tolist() for kept in cache.retained_positions()]
