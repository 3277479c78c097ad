"""A real `baton` command in a process of its own, as a user runs it; and small HTTP calls to it."""

import http.client
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

READY_S = 60.0
BARE_COMMAND = (sys.executable, "-P", "-u", "-c", "from baton.launch.cli import main; main()")


class BatonProcess:
    """Starts in a session of its own, as from a terminal of its own. All output lines are kept in `lines`."""

    def __init__(self, *arguments: str):
        self.process = subprocess.Popen(
            [*BARE_COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "BatonProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, pattern: str, bound_s: float = READY_S) -> re.Match[str]:
        """The first line that matches, also one that has come already."""
        found = []

        def search() -> bool:
            found.extend(match for line in list(self.lines) if (match := re.search(pattern, line)))
            return bool(found) or not self._reader.is_alive()

        with self._changed:
            self._changed.wait_for(search, bound_s)
        assert found, f"no line matches {pattern!r}:\n{self.output}"
        return found[0]

    def interrupt(self) -> None:
        """Ctrl-C as the terminal sends it: to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, bound_s: float) -> int:
        return self.process.wait(bound_s)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


class ServerProcess(BatonProcess):
    """`baton serve` or `baton gateway`; ready when constructed."""

    def __init__(self, command: str, *arguments: str):
        super().__init__(command, *arguments, "--port", "0")
        try:
            self._learn_addresses()
        except BaseException:
            self.__exit__()  # a test that fails here must leave no server behind
            raise

    def _learn_addresses(self) -> None:
        url = self.wait_for_line(r"^ready: .* at http://([\d.]+):(\d+)/v1")
        self.address = (url[1], int(url[2]))
        join = self.wait_for_line(r"^add a (?:prefill |decode )?worker: .*--join (\S+) --key-file (\S+)")
        self.join_address, self.key_file = join[1], Path(join[2])
        self.run_dir = self.key_file.parent

    @property
    def pids(self) -> dict[str, int]:
        """As the start table showed them."""
        rows = (re.match(r"(gateway|prefill-\d+|decode-\d+) +(\d+) ", line) for line in self.lines)
        return {row[1]: int(row[2]) for row in rows if row}

    def get(self, path: str) -> tuple[int, Any]:
        return self._call("GET", path, None)

    def complete(self, prompt: str, max_tokens: int = 8, **fields: object) -> tuple[int, Any]:
        body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        return self._call("POST", "/v1/completions", body)

    def wait_ready(self, prefill: int, decode: int, bound_s: float = READY_S) -> None:
        """Until /ready is 200 with exactly so many workers."""
        deadline = time.monotonic() + bound_s
        seen: object = None
        while time.monotonic() < deadline:
            try:
                status, seen = self.get("/ready")
            except OSError as error:
                seen = error
            else:
                present = {role: counts["present"] for role, counts in seen["workers"].items()}
                if status == 200 and present == {"prefill": prefill, "decode": decode}:
                    return
            select.select([], [], [], 0.05)
        raise AssertionError(f"not ready: {seen}\n{self.output}")

    def _call(self, method: str, path: str, body: object) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()
