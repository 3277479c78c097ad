"""Start a real `baton serve`, talk to it, stop it, and see that it left nothing behind: for end-to-end tests."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait for a condition with a bound; `what` says in the failure what did not come true."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout_s} s still not so: {what}"
        pause.wait(0.02)


def is_alive(pid: int) -> bool:
    """Zombies count as dead: their parent has yet to collect them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid: int) -> dict[str, int]:
    """Name |-> pid of the processes a launcher started (`gateway`, `prefill-0`, ...), from /proc."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                command = (stat.parent / "cmdline").read_bytes().decode().split("\0")
                found[command[command.index("baton.launch.child") + 2]] = int(stat.parent.name)
        except (FileNotFoundError, ProcessLookupError, ValueError):
            continue  # it ended while we looked, or is no child of ours
    return found


class Server:
    """One running topology. All calls are bounded."""

    def __init__(self, process: subprocess.Popen[str], log: Path, api_key: str | None = None):
        self.process = process
        self.api_key = api_key  # sent where a call names no other
        self.log_path = log
        self.port = 0
        self.model = ""
        self.was_stopped = False

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, timeout_s: float = 120.0, key: str | None = None
    ) -> tuple[int, Any]:
        """(status, decoded JSON or text). `body` bytes are sent as they are, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            key = self.api_key if key is None else key
            headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        return response.status, json.loads(text) if text.startswith(("{", "[")) else text

    def complete(
        self, prompt: list[int] | str, max_tokens: int, key: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """One greedy completion, as the response object. `key`: the client's API key. Fails on any error."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        status, answer = self.request("POST", "/v1/completions", body, key=key)
        assert status == 200, answer
        return answer

    def server_timing(self, prompt: list[int]) -> dict[str, float]:
        """Stage |-> milliseconds of a one-token completion, from its Server-Timing header."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            stages = response.headers["Server-Timing"].split(", ")
        return {name: float(ms) for name, _, ms in (stage.partition(";dur=") for stage in stages)}

    @contextmanager
    def stream(self, prompt: list[int] | str, max_tokens: int, **fields: Any) -> Iterator[Iterator[str]]:
        """A streamed greedy completion: an iterator over the data of its events. Leaving closes the connection."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body | fields), {"Content-Type": "application/json"}
            )
            yield self._events(connection)
        finally:
            connection.close()

    @staticmethod
    def _events(connection: http.client.HTTPConnection) -> Iterator[str]:
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: "):
                yield line[6:].decode().strip()

    def token_ids(self, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
        answer = self.complete(prompt, max_tokens, ignore_eos=True, return_token_ids=True, **fields)
        return answer["choices"][0]["token_ids"]

    def all_token_ids(self, prompts: list[list[int]], max_tokens: int, at_once: int) -> list[list[int]]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(lambda prompt: self.token_ids(prompt, max_tokens), prompts))

    def ledger(self) -> dict[str, Any]:
        status, answer = self.request("GET", "/ledger")
        assert status == 200, answer
        return answer

    def wait_idle(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """Wait until every worker's ledger and the gateway are idle; the ledger then."""
        wait_until(lambda: self.ledger()["idle"], f"the ledger is idle: {self.ledger()}", timeout_s)
        return self.ledger()

    def flush(self) -> None:
        status, answer = self.request("POST", "/flush_cache")
        assert status == 200, answer

    def metric(self, name: str) -> float:
        """Sum of all series of one metric."""
        _, text = self.request("GET", "/metrics")
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name} in /metrics"
        return sum(map(float, values))

    def routed(self) -> Counter[str]:
        """Way (local, remote, returned) |-> requests whose prompts went it."""
        _, text = self.request("GET", "/metrics")
        assert "# TYPE baton_routed_total counter" in text
        series = re.findall(r'^baton_routed_total{way="(\w+)"} (\S+)$', text, re.MULTILINE)
        return Counter({way: int(float(count)) for way, count in series})

    def require_handed_over(self, num_local: int = 0) -> None:
        """Fails unless every prompt so far was computed by another worker than generated, but for so many."""
        self.wait_idle()
        routed = self.routed()
        assert routed["local"] == num_local < routed.total(), routed
        assert self.metric("baton_worker_kv_sent_bytes_total") > 0

    def children(self) -> dict[str, int]:
        return children_of(self.process.pid)

    def interrupt(self) -> int:
        """Ctrl-C, then the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)


def _wait_ready(server: Server) -> None:
    def ready() -> bool:
        assert server.process.poll() is None, f"the server ended before it was ready:\n{server.log}"
        found = re.search(r"http://127\.0\.0\.1:(\d+)", server.log)
        if found is None:
            return False
        server.port = int(found[1])
        try:
            return server.request("GET", "/ready", timeout_s=5)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    wait_until(ready, f"the server is ready; its log:\n{server.log}", READY_TIMEOUT_S)
    server.model = server.request("GET", "/v1/models")[1]["data"][0]["id"]


@contextmanager
def serve(log_folder: Path, model: Path | str, *flags: str, api_key: str | None = None) -> Iterator[Server]:
    """A server on a free port. At the end: the ledger is idle, it stops when interrupted, and no process is left.

    A test that stops it itself sets `was_stopped`; that no process is left is checked all the same.
    """
    log = log_folder / f"serve-{time.monotonic_ns()}.log"
    device = () if "--device" in flags else ("--device", "cpu")  # where there is a GPU, too
    command = [str(Path(sys.executable).with_name("baton")), "serve", str(model), "--port", "0", *device, *flags]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=log_folder,
            start_new_session=True,
            env={**os.environ, "NO_COLOR": "1"},
        )
    server = Server(process, log, api_key)
    pids: set[int] = set()
    try:
        _wait_ready(server)
        pids = set(server.children().values())
        yield server
        pids |= set(server.children().values())
        if not server.was_stopped:
            server.wait_idle()
            assert server.interrupt() == 0, server.log
        wait_until(lambda: not any(map(is_alive, pids)), f"no process is left of {pids}:\n{server.log}")
    except BaseException:
        print(server.log, file=sys.stderr)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_TIMEOUT_S)
