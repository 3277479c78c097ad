"""`baton roles`: what each worker of a running server does, and changing it."""

import sys
import time
from typing import TextIO

import msgspec

from ..core.errors import ConfigurationError
from ..core.messages import Role
from .server_client import ServerClient, decode_answer

_SHOWN_CHANGES = 5


class _Change(msgspec.Struct):
    at: float  # Unix seconds
    worker: str
    old: str
    new: str
    reason: str


class _Roles(msgspec.Struct):
    workers: dict[str, list[str]]
    elastic: bool
    changes: list[_Change]


def roles(url: str, worker: str | None, wanted: str | None, out: TextIO | None = None) -> int:
    """Print the table, after the change if one is asked for. Raises BatonError with the server's own words."""
    out = out or sys.stdout
    client = ServerClient(url)
    if worker is None:
        response = client.request("GET", "/roles")
    else:
        response = client.request("POST", "/roles", {"worker": worker, "roles": parse_roles(worker, wanted)})
    with response:
        table = decode_answer(response.read(), _Roles, "a Baton server")
    out.write("\n".join(describe(table)) + "\n")
    return 0


def parse_roles(worker: str, text: str | None) -> list[str]:
    """`prefill+decode` -> both. Raises ConfigurationError."""
    names = (text or "").split("+")
    if any(name not in tuple(Role) for name in names):
        what = f"{text!r} is not a role" if text else "which roles"
        raise ConfigurationError(
            f"{what}: write `baton roles {worker} prefill`, `baton roles {worker} decode` or "
            f"`baton roles {worker} prefill+decode`."
        )
    return names


def describe(table: _Roles) -> list[str]:
    """One line a worker, then the last changes."""
    width = max(map(len, table.workers), default=0)
    lines = [f"{worker.ljust(width)}  {'+'.join(names)}" for worker, names in table.workers.items()]
    lines += [] if lines else ["no worker has joined"]
    lines += ["elastic: roles follow the load"] if table.elastic else []
    for change in table.changes[-_SHOWN_CHANGES:]:
        at = time.strftime("%H:%M:%S", time.localtime(change.at))
        lines.append(f"{at} {change.worker}: {change.old} -> {change.new}: {change.reason}")
    return lines
