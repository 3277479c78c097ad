"""What a user sees when the server is ready: who runs where, the URL, and three lines to copy."""

import json
import shlex
import shutil
import sys
from typing import TextIO

import msgspec

from ..core.credentials import KEY_VARIABLES
from .options import HostPort

HEADER = ("role", "pid", "device", "threads", "KV tokens", "transport")


class TableRow(msgspec.Struct, frozen=True):
    name: str
    pid: int
    device: str = "-"
    threads: str = "-"
    kv_tokens: str = "-"
    transport: str = "-"

    @property
    def cells(self) -> tuple[str, ...]:
        return (self.name, str(self.pid), self.device, self.threads, self.kv_tokens, self.transport)


def write_start_table(rows: list[TableRow], hints: list[str], out: TextIO) -> None:
    """A drawn table on a terminal, aligned columns elsewhere; then the hints, one a line, never wrapped."""
    if out.isatty():
        _write_rich(rows, out)
    else:
        out.write("\n".join(plain_table(rows)) + "\n")
    out.write("\n".join(hints) + "\n")
    out.flush()


def plain_table(rows: list[TableRow]) -> list[str]:
    lines = [HEADER, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _write_rich(rows: list[TableRow], out: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEADER, box=box.ROUNDED, header_style="bold")
    for row in rows:
        table.add_row(*row.cells)
    Console(file=out).print(table)


def url_of(address: HostPort) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    return f"http://{HostPort(host, address.port).text}"


def curl_line(address: HostPort, model: str, *, needs_key: bool = False) -> str:
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    )
    headers = "-H 'Content-Type: application/json'"
    if needs_key:
        headers += f' -H "Authorization: Bearer ${KEY_VARIABLES[0]}"'
    return f"curl {url_of(address)}/v1/chat/completions {headers} -d {shlex.quote(body)}"


def join_line(role: str, address: HostPort, key_file: str, model: str | None) -> str:
    """The command that adds a worker: `role` is prefill or decode."""
    words = [command_name(), role, *([model] if model else [])]
    return shlex.join([*words, "--join", f"tcp://{address.text}", "--key-file", key_file])


def command_name() -> str:
    """How to call this program from where the user is: by its path when it is not on PATH."""
    own = sys.argv[0]
    return "baton" if shutil.which("baton") or not own.endswith("/baton") else own
