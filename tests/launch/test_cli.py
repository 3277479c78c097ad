"""The command line as a user meets it: real processes, exit codes, no traceback, words that lead on."""

import os
import re
import socket
import subprocess
import sys
import time

import pytest

from baton.transfer.keys import ClusterKeys


def baton(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As on a machine without a GPU, whatever there is."""
    command = [sys.executable, "-P", "-c", "from baton.launch.cli import main; main()", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.fixture(scope="session")
def key_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("keys") / "cluster.key"
    ClusterKeys.create(path)
    return str(path)


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
        (["serve", "--port", "0", "--device", "cuda:1"], ["--device cuda", "--device cpu"]),
        (["serve", "--port", "0", "--device", "rocm"], ["--device", "auto, cpu, cuda"]),
        (["serve", "--port", "0", "--decode-devices", "0"], ["--decode-devices 0", "CPU"]),
        (["serve", "--port", "0", "--dtype", "int8"], ["--dtype int8", "--device cuda"]),
        (["serve", "--port", "0", "--kernels", "triton"], ["--kernels triton", "--kernels torch"]),
        (["serve", "--port", "0", "--deterministic"], ["--deterministic"]),
        (["serve", "--port", "0", "--transport", "nccl"], ["--transport nccl", "gloo"]),
        (
            ["decode", "--join", "127.0.0.1:1", "--key-file", "KEY", "--device", "cuda"],
            ["--device cuda", "--device cpu"],
        ),
        (["serve", "--port", "0", "--dtype", "int3"], ["--dtype", "float32"]),
        (["serve", "--port", "0", "--block-size", "24"], ["--block-size 24", "16, 32"]),
        (["serve", "--port", "0", "--kv-memory", "much"], ["--kv-memory", "2G"]),
        (["serve", "--port", "0", "--threads", "none"], ["--threads", "auto"]),
        (["serve", "--port", "0", "--log-level", "loud"], ["--log-level", "warning"]),
        (["serve", "--port", "0", "--host", "no.such.host.invalid"], ["--port", "127.0.0.1"]),
        (["serve", "--port", "0", "--join-address", "0.0.0.0:0"], ["--join-address", "address of this machine"]),
        (["serve", "--port", "0", "--join-address", "here"], ["--join-address", "HOST:PORT"]),
        (["serve", "/no/such/model", "--port", "0"], ["/no/such/model"]),
        (["serve", "--port", "0", "--policy", "lifo"], ["--policy 'lifo'", "fcfs, priority, fair, shortest"]),
        (["roles", "decode-0", "cook"], ["'cook' is not a role", "baton roles decode-0 prefill+decode"]),
        (["roles", "decode-0"], ["which roles", "baton roles decode-0 prefill+decode"]),
        (["pull", "smolm2"], ["smolm2", "Did you mean"]),
        (["decode", "--join", "127.0.0.1:1"], ["--key-file"]),
        (["decode", "--join", "nowhere", "--key-file", "/no/key"], ["--join", "HOST:PORT"]),
        (["prefill", "--join", "127.0.0.1:1", "--key-file", "/no/key"], ["/no/key", "--key-file"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gets_a_short_answer(arguments, words, key_file):
    result = baton(*(key_file if argument == "KEY" else argument for argument in arguments))
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


def test_a_card_is_found_and_the_first_thing_in_its_way_is_said(tmp_path):
    """With a fake nvidia-smi: on a development machine it is torch, on one with a GPU the driver."""
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho '0, GPU-1a2b, NVIDIA Fake, 9.0, 1000, 1000, 1.0'\n")
    script.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = baton("serve", "--port", "0", "--device", "cuda", PATH=path, CUDA_VISIBLE_DEVICES="0")
    assert result.returncode == 2
    assert re.search("torch installed here is a CPU build|driver 1.0 is too old", result.stderr), result.stderr
    report = baton("doctor", PATH=path, CUDA_VISIBLE_DEVICES="0").stdout
    assert "cuda:0 (NVIDIA Fake), sm_90, 1000 MiB of 1000 MiB free" in report
    assert re.search("^! gpu (torch|driver) ", report, re.MULTILINE)


SERVE_FLAGS = """
    --prefill --decode --host --port --device --dtype --block-size --kv-memory --threads --context-length
    --max-model-len --max-running --token-budget --transport --served-model-name --join-address --log-level --debug
    --kernels --deterministic --prefill-devices --decode-devices
"""


def test_every_flag_of_serve_is_explained():
    help_text = baton("serve", "--help").stdout
    assert [flag for flag in SERVE_FLAGS.split() if flag not in help_text] == []
