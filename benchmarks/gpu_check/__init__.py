"""Check the kernels and decode steps on a GPU, and time them."""

from . import checkout as checkout  # first: it makes `inertia_fx` importable, and starts the clock
