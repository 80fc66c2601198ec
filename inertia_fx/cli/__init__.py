"""Run the command `inertia-fx`."""

from __future__ import annotations

import sys

from ..errors import MissingPackageError
from ..optional import require

__all__ = ["main"]


def main() -> None:
    """Enter through the script `inertia-fx`, or say which packages are missing for it."""
    try:
        require("typer", "rich", "matplotlib", extra="demo", purpose="inertia-fx")
    except MissingPackageError as missing:
        print(missing, file=sys.stderr)
        raise SystemExit(1) from None
    from .commands import app

    app()
