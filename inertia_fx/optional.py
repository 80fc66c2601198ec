"""Require optional packages, with an error that says how to install them."""

from __future__ import annotations

import importlib.util

from .errors import MissingPackageError


def require(*packages: str, extra: str, purpose: str, otherwise: str = "") -> None:
    """Check that optional packages are installed, without importing them.

    Args:
        packages: top-level names.
        extra: the extra of `inertia_fx` that installs them.
        purpose: what needs them, as the subject of "needs".
        otherwise: what to do instead of installing them, if there is something.

    Raises:
        MissingPackageError: one of them is missing.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        install = f'pip install "inertia_fx[{extra}]"' + (f", {otherwise}" if otherwise else "")
        raise MissingPackageError(f"{purpose} needs {' and '.join(missing)}: {install}")
