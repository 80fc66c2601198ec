"""Compile Hugging Face models: all that knows their classes, their `generate` and the names of their arguments.

model.py      dispatch: prompts go to the original forward, decode steps to the compiled step
step.py       the decode step that is traced, compiled once for each kind of step
cache.py      the slot cache as a transformers cache
checks.py     what is refused: models, attentions, caches, masks
progress.py   what the first step is waiting for, on the terminal
private.py    every private attribute of transformers that is used, and why
"""
