"""Where a gateway keeps files and batches: `--batch-dir`."""

import re
from pathlib import Path

from ..vocab.source import default_cache_dir

_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 80


def batch_folder(batch_dir: str, served_model: str, port: int) -> str:
    """A whole path, or "" for none. It is made when somebody uses it.

    "auto" is the same for each start with this model and port, and no other: servers that run beside each other have
    different ports, and lines that ask for one model wait until that one is served again.
    """
    if batch_dir == "none":
        return ""
    if batch_dir != "auto":
        return str(Path(batch_dir).expanduser().absolute())
    name = _NO_NAME.sub("-", served_model)[:_LONGEST_NAME]
    return str(default_cache_dir() / "batches" / f"{name}-{port}")
