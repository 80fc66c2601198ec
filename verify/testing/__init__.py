"""Test a decoder: tiny models, synthetic attention, hypothesis strategies, and the contract as pytest tests.

    from inertia_fx.verify.testing import DecoderContract

pytest and hypothesis are optional packages: what needs them is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .contract import DecoderContract

__all__ = ["DecoderContract"]


def __getattr__(name: str) -> Any:
    """Import :class:`DecoderContract` when it is first asked for.

    Raises:
        ConfigError: pytest is not installed.
    """
    if name != "DecoderContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ...optional import require

    require("pytest", extra="verify", purpose="DecoderContract")
    from .contract import DecoderContract

    return DecoderContract
