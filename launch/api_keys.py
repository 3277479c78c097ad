"""API keys from the command line: `--api-key KEY` or `--api-key @FILE`, several times."""

import re
from collections.abc import Iterable
from pathlib import Path

from ..core.errors import ConfigurationError

_KEY = re.compile(r"[!-~]{1,512}")  # what a header can carry
_MAX_FILE_BYTES = 1024 * 1024


def read_api_keys(values: Iterable[str]) -> tuple[str, ...]:
    """The keys, those of files included: one a line; empty lines and lines that start with # do not count.

    Raises ConfigurationError for a file that cannot be read or holds no key, and for what cannot be a key. The text
    of a wrong key is not repeated: it may be a good one with a typing error.
    """
    keys: list[str] = []
    for value in values:
        if value.startswith("@"):
            keys += _keys_of(Path(value[1:]))
        elif _KEY.fullmatch(value):
            keys.append(value)
        else:
            raise ConfigurationError(
                "--api-key: a key is 1 to 512 visible ASCII characters without spaces. Use such a one, or @FILE."
            )
    return tuple(dict.fromkeys(keys))


def _keys_of(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            lines = file.read(_MAX_FILE_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        what = f"--api-key @{path}: cannot read the file: {reason}"
        raise ConfigurationError(f"{what}. Name one with a key a line.") from error
    found = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [(number, line) for number, line in found if line and not line.startswith("#")]
    for number, line in keys:
        if not _KEY.fullmatch(line):
            raise ConfigurationError(
                f"--api-key @{path}: line {number} is no key: 1 to 512 visible ASCII characters without spaces."
            )
    if not keys:
        raise ConfigurationError(f"--api-key @{path}: the file holds no key. Write one a line, or leave the flag out.")
    return [line for _, line in keys]
