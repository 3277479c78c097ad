"""Sizes and durations as people write them: `512M`, `2GiB`, `1.5g`, plain bytes, `50ms`, `0.5s`; sizes also back."""

import re

from ..core.errors import ConfigurationError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """Bytes; every unit is a power of 1024. Raises ConfigurationError naming `option`."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"{option} {text!r} is not a size. Write a number with K, M or G behind it, for example 2G."
        )
    return int(float(match[1]) * 1024 ** _UNITS[match[2].upper()])


def parse_duration(text: str, option: str) -> float:
    """Seconds, more than 0. Raises ConfigurationError naming `option`."""
    match = _DURATION.fullmatch(text)
    seconds = float(match[1]) * (0.001 if match[2].lower() == "ms" else 1.0) if match else 0.0
    if seconds <= 0:
        raise ConfigurationError(
            f"{option} {text!r} is not a duration of more than 0. Write a number with ms or s behind it, for example "
            "500ms or 0.5s."
        )
    return seconds


def format_size(num_bytes: int) -> str:
    """Three digits at least: `45.0 KiB`, `2.00 GiB`."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{num_bytes} B"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"
