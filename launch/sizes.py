"""Sizes as people write them: `512M`, `2GiB`, `1.5g`, plain bytes; and back."""

import re

from ..core.errors import ConfigurationError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)


def parse_size(text: str, option: str) -> int:
    """Bytes; every unit is a power of 1024. Raises ConfigurationError naming `option`."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"{option} {text!r} is not a size. Write a number with K, M or G behind it, for example 2G."
        )
    return int(float(match[1]) * 1024 ** _UNITS[match[2].upper()])


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
