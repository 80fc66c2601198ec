"""Require optional packages, with an error that says how to install them."""

from __future__ import annotations

import importlib.util

from ..errors import ConfigError


def require(package: str, purpose: str) -> None:
    """Check that an optional package is installed, without importing it.

    Args:
        package: top-level name of the package.
        purpose: what needs it, as the subject of "needs".

    Raises:
        ConfigError: the package is missing.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f'{purpose} needs {package}: pip install "inertia_fx[verify]"')
