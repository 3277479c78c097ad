"""What a user reads: the start table, the lines to copy, the doctor's report, the chat."""

import io
import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from baton.core.errors import BatonError, ConfigurationError
from baton.launch import doctor
from baton.launch.chat import ChatClient, chat
from baton.launch.doctor import Finding
from baton.launch.gpus import GpuListing
from baton.launch.options import HostPort
from baton.launch.start_table import TableRow, curl_line, join_line, plain_table, url_of, write_start_table


def test_the_plain_table_is_aligned():
    rows = [TableRow("gateway", 7), TableRow("prefill-0", 12345, "cpu", "1", "1,024", "shared memory")]
    assert plain_table(rows) == [
        "role       pid    device  threads  KV tokens  transport",
        "gateway    7      -       -        -          -",
        "prefill-0  12345  cpu     1        1,024      shared memory",
    ]


def test_hints_are_not_wrapped():
    out = io.StringIO()
    write_start_table([TableRow("gateway", 7)], ["x" * 300, "y"], out)
    assert out.getvalue().splitlines()[2:] == ["x" * 300, "y"]


def test_the_curl_line_is_a_command_with_valid_json():
    words = shlex.split(curl_line(HostPort("0.0.0.0", 8000), "my 'model'"))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "my 'model'"


def test_the_join_line_is_a_command():
    words = shlex.split(join_line("decode", HostPort("10.0.0.5", 7000), "/a b/key", "./model"))
    assert words[1:] == ["decode", "./model", "--join", "tcp://10.0.0.5:7000", "--key-file", "/a b/key"]
    assert url_of(HostPort("::", 80)) == "http://[::1]:80"


# ---- doctor ----------------------------------------------------------------------------------------------------


def test_the_report_counts_problems_and_shows_their_fixes():
    out = io.StringIO()
    assert doctor.write_report([Finding("python", "3.11"), Finding("port", "in use", "use port 0")], out) == 1
    assert out.getvalue().splitlines() == [
        "  python  3.11",
        "! port    in use",
        "          -> use port 0",
        "1 problem(s) found",
    ]
    assert doctor.write_report([Finding("python", "3.11")], io.StringIO()) == 0


def test_findings_of_problems(builders, monkeypatch, tmp_path):
    assert doctor.python_finding((3, 10)).fix
    assert not doctor.python_finding((3, 12)).fix
    assert doctor.package_finding("no-such-package-here").fix == "pip install no-such-package-here"
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-package-here": "only for tests"})
    assert not doctor.package_finding("no-such-package-here").fix
    monkeypatch.setattr(doctor, "ring_size", lambda: 1 << 60)
    assert "--shm-size" in doctor.shared_memory_finding(tmp_path).fix
    assert not doctor.shared_memory_finding(tmp_path / "absent").fix
    facts = {finding.topic: finding.fact for finding in doctor.machine_findings(builders.MACHINE)}
    assert facts["memory"] == "8.00 GiB available"


def test_gpu_findings(builders):
    def fixes(machine) -> dict[str, str]:
        return {finding.topic: finding.fix for finding in doctor.gpu_findings(machine)}

    without = doctor.gpu_findings(msgspec.structs.replace(builders.MACHINE, cards=GpuListing(problem="no driver")))
    assert without == [Finding("gpu", "none: no driver")]
    good = {"gpu": "", "gpu driver": "", "gpu torch": "", "gpu triton": "", "gpu compiler": ""}
    assert fixes(builders.gpu_machine(2)) == good
    bad = builders.gpu_machine(
        1, torch_cuda="", has_triton=False, missing_for_triton=("Python's headers", "python3-dev")
    )
    assert [topic for topic, fix in fixes(bad).items() if fix] == ["gpu torch", "gpu triton", "gpu compiler"]
    assert fixes(bad)["gpu compiler"] == "apt install python3-dev"
    old = builders.gpu_machine(cards=GpuListing(builders.cards(1), "470.1"))
    assert fixes(old)["gpu driver"].startswith("install driver 580")


def test_the_cache_finding_lists_models(tmp_path: Path):
    assert "no model yet" in doctor.cache_finding(tmp_path / "absent" / "baton").fact
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    assert doctor.cache_finding(tmp_path).fact.startswith(f"{tmp_path}: tiny;")


# ---- chat ------------------------------------------------------------------------------------------------------


class _FakeServer(BaseHTTPRequestHandler):
    """Streams the number of messages so far; "fail" in the last one ends the stream with an error, "cut" early."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last = body["messages"][-1]["content"]
        if "refuse" in last:
            self._answer(400, b'{"error": {"message": "messages: no"}}')
            return
        pieces = [{"content": "turn "}, {"content": str(len(body["messages"]))}, {}]
        events = [json.dumps({"choices": [{"delta": piece}]}) for piece in pieces]
        if "fail" in last:
            events.append('{"error": {"message": "the worker is gone"}}')
        elif "cut" not in last:
            events.append("[DONE]")
        self._answer(200, "".join(f": keep-alive\n\ndata: {event}\n\n" for event in events).encode())

    def _answer(self, status: int, content: bytes):
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        """Silent."""


@pytest.fixture
def chat_url():
    server = HTTPServer(("127.0.0.1", 0), _FakeServer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_conversation_grows_and_starts_over(chat_url):
    out = io.StringIO()
    assert chat(chat_url, 16, io.StringIO("hello\n\nmore\n/new\nagain"), out) == 0
    assert out.getvalue().splitlines() == [
        "tiny (a line to ask, /new to start over, Ctrl-D to leave)",
        "> turn 1",
        "> > turn 3",
        "> > turn 1",
        "> ",
    ]


def test_a_failed_turn_is_told_and_forgotten(chat_url):
    out = io.StringIO()
    chat(chat_url, 16, io.StringIO("fail\ncut\nrefuse\nfine\n"), out)
    text = out.getvalue()
    assert "error: the worker is gone" in text
    assert "error: the server ended the answer early" in text
    assert "error: messages: no" in text
    assert text.rstrip("> \n").endswith("turn 1")


def test_no_server_is_said_with_the_next_step():
    with pytest.raises(BatonError, match="`baton serve` starts one"):
        ChatClient("http://127.0.0.1:9", 16)
    with pytest.raises(ConfigurationError, match="is not a server"):
        ChatClient("ftp://x", 16)
