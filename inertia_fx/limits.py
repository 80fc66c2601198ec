"""Check single settings against their limits: each refusal is a `ConfigError` that names the setting and its value."""

from __future__ import annotations

from .errors import ConfigError


def check_int(name: str, value: object, least: int, hint: str = "") -> None:
    """Refuse all but whole numbers from `least` on; `hint` says what the least one means."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} is not a whole number.")
    if value < least:
        raise ConfigError(f"{name}={value} is below {least}" + (f" ({hint})." if hint else "."))


def check_bool(name: str, value: object) -> None:
    """Refuse all but True and False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is neither True nor False.")


def check_weight(name: str, value: object, *, one_allowed: bool) -> None:
    """Refuse all but numbers from 0 to 1; 1 itself only if it is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r} is not a number.")
    if not (0 <= value < 1 or (one_allowed and value == 1)):
        interval = "[0, 1]" if one_allowed else "[0, 1)"
        raise ConfigError(f"{name}={value} is outside {interval}: it is the weight given to what is older.")


def check_name(name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse all but the known names."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, known))}.")
