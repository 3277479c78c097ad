"""`baton roles`: what it asks a server for, and what it prints."""

import io
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from baton.core.errors import BatonError
from baton.launch.roles import roles

AT = 1_000_000.0
TABLE = {"workers": {"decode-0": ["decode"], "prefill-10": ["prefill"]}, "elastic": False, "changes": []}


class _FakeServer(BaseHTTPRequestHandler):
    """Gives decode-0 what is posted; refuses any other worker."""

    def do_GET(self):
        self._answer(200, TABLE)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["worker"] != "decode-0":
            self._answer(404, {"error": {"message": "there is no worker 'x'; there are: decode-0"}})
            return
        change = {"at": AT, "worker": "decode-0", "old": "decode", "new": "prefill+decode", "reason": "by hand"}
        workers = TABLE["workers"] | {"decode-0": body["roles"]}
        self._answer(200, {"workers": workers, "elastic": True, "changes": [change] * 9})

    def _answer(self, status: int, body: object):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        """Silent."""


@pytest.fixture
def url():
    server = HTTPServer(("127.0.0.1", 0), _FakeServer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_without_arguments_the_table_is_shown(url):
    out = io.StringIO()
    assert roles(url, None, None, out) == 0
    assert out.getvalue() == "decode-0    decode\nprefill-10  prefill\n"


def test_a_change_is_asked_for_and_the_last_ones_are_shown(url):
    out = io.StringIO()
    roles(url, "decode-0", "prefill+decode", out)
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["decode-0    prefill+decode", "prefill-10  prefill", "elastic: roles follow the load"]
    at = time.strftime("%H:%M:%S", time.localtime(AT))
    assert lines[3:] == [f"{at} decode-0: decode -> prefill+decode: by hand"] * 5


def test_the_server_s_own_words_are_shown(url):
    with pytest.raises(BatonError, match="there are: decode-0"):
        roles(url, "x", "decode")
