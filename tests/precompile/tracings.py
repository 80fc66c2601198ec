"""Count how often something is traced."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Tracings:
    count: int = 0
