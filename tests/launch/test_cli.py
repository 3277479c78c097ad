"""The command line as a user meets it: real processes, exit codes, no traceback, words that lead on."""

import os
import socket
import subprocess
import sys
import time

import pytest


def baton(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", "from baton.launch.cli import main; main()", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "1"], ["--prot", "Did you mean --port?", "--help"]),
        (["serv"], ["serv", "serve"]),
        (["serve", "--port", "eighty"], ["--port", "eighty"]),
        (["serve", "--port", "70000"], ["--port 70000", "0 for any free one"]),
        (["serve", "--port", "0", "--prefill", "two"], ["--prefill", "two"]),
        (["serve", "--port", "0", "--decode", "0"], ["--decode 0", "at least one"]),
        (["serve", "--port", "0", "--device", "cuda"], ["--device cuda", "--device cpu"]),
        (["serve", "--port", "0", "--dtype", "int3"], ["--dtype", "float32"]),
        (["serve", "--port", "0", "--block-size", "24"], ["--block-size 24", "16, 32"]),
        (["serve", "--port", "0", "--kv-memory", "much"], ["--kv-memory", "2G"]),
        (["serve", "--port", "0", "--threads", "none"], ["--threads", "auto"]),
        (["serve", "--port", "0", "--log-level", "loud"], ["--log-level", "warning"]),
        (["serve", "--port", "0", "--host", "no.such.host.invalid"], ["--port", "127.0.0.1"]),
        (["serve", "--port", "0", "--join-address", "0.0.0.0:0"], ["--join-address", "address of this machine"]),
        (["serve", "--port", "0", "--join-address", "here"], ["--join-address", "HOST:PORT"]),
        (["serve", "/no/such/model", "--port", "0"], ["/no/such/model"]),
        (["pull", "smolm2"], ["smolm2", "Did you mean"]),
        (["decode", "--join", "127.0.0.1:1"], ["--key-file"]),
        (["decode", "--join", "nowhere", "--key-file", "/no/key"], ["--join", "HOST:PORT"]),
        (["prefill", "--join", "127.0.0.1:1", "--key-file", "/no/key"], ["/no/key", "--key-file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gets_a_short_answer(arguments, words):
    result = baton(*arguments)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert 1 <= len(result.stderr.splitlines()) <= 3
    assert all(word in result.stderr for word in words), result.stderr


def test_a_port_in_use_is_said_with_the_way_out():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = baton("serve", "--port", str(port))
    assert result.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in result.stderr
    assert "port 0" in result.stderr


def test_debug_shows_the_traceback():
    result = baton("serve", "/no/such/model", "--port", "0", "--debug")
    assert result.returncode != 0
    assert "Traceback" in result.stderr


def test_version_and_help_are_fast_and_load_no_torch():
    import baton as package

    assert baton("--version").stdout.strip() == package.__version__
    started = time.monotonic()
    help_text = baton("--help").stdout
    assert time.monotonic() - started < 5.0  # 0.3 s on a quiet machine; importing torch takes 2.7
    for command in ("serve", "gateway", "prefill", "decode", "pull", "bench", "chat", "doctor"):
        assert command in help_text


@pytest.mark.parametrize("module", ["cli", "serve", "join", "supervisor", "doctor", "chat"])
def test_the_launcher_loads_no_torch(module):
    code = f"import sys, baton.launch.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


SERVE_FLAGS = """
    --prefill --decode --host --port --device --dtype --block-size --kv-memory --threads --context-length
    --max-model-len --max-running --token-budget --transport --served-model-name --join-address --log-level --debug
"""


def test_every_flag_of_serve_is_explained():
    help_text = baton("serve", "--help").stdout
    assert [flag for flag in SERVE_FLAGS.split() if flag not in help_text] == []
