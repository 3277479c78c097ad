"""Small pure parts: sizes, flags, machine facts, the restart policy."""

import dataclasses

import pytest

from baton.core.errors import ConfigurationError
from baton.launch.cli import main
from baton.launch.machine import available_memory, usable_cores
from baton.launch.options import EngineFlags, HostPort, parse_engine_options, parse_host_port
from baton.launch.restart_policy import RestartPolicy
from baton.launch.sizes import format_size, parse_size

MIB, GIB = 1024**2, 1024**3


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("1k", 1024),
        ("2G", 2 * GIB),
        ("2GiB", 2 * GIB),
        ("1.5 mb", 3 * MIB // 2),
        (" 3 T ", 3 << 40),
    ],
)
def test_parse_size(text, num_bytes):
    assert parse_size(text, "--kv-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "1e9", "1 000", "nan"])
def test_a_wrong_size_names_the_option(text):
    with pytest.raises(ConfigurationError, match=r"--kv-memory .* is not a size"):
        parse_size(text, "--kv-memory")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (46_080, "45.0 KiB"),
        (2 * GIB, "2.00 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_format_size(num_bytes, text):
    assert format_size(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:80", "127.0.0.1", 80), ("tcp://h:1", "h", 1), ("[::1]:9", "::1", 9), ("h:0", "h", 0)],
)
def test_parse_host_port(text, host, port):
    assert parse_host_port("--join", text) == HostPort(host, port)


@pytest.mark.parametrize("text", ["", "host", ":80", "host:", "host:x", "host:70000", "host:-1"])
def test_a_wrong_address_names_the_option(text):
    with pytest.raises(ConfigurationError, match="--join"):
        parse_host_port("--join", text)


def test_an_ipv6_address_is_written_in_brackets():
    assert HostPort("::1", 9).text == "[::1]:9"
    assert HostPort("::1", 9).is_loopback
    assert not HostPort("10.0.0.1", 9).is_loopback


def test_default_flags_are_all_auto():
    options = parse_engine_options(EngineFlags())
    assert (options.device, options.dtype, options.transport) == ("auto", "auto", "auto")
    assert options.kv_memory is options.threads is options.context_length is options.max_running is None


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("device", "cuda:0,1", "--device 'cuda:0,1'.*cuda:0"),
        ("device", "cpu:0", "--device 'cpu:0'"),
        ("kernels", "cublas", "--kernels 'cublas'.*torch, triton"),
        ("device", "tpu", "--device 'tpu'.*auto, cpu, cuda"),
        ("dtype", "bf16", "--dtype 'bf16'.*float16, float32"),
        ("transport", "rdma", "--transport 'rdma'.*shared_memory, tcp"),
        ("block_size", 24, "--block-size 24.*16, 32"),
        ("threads", "0", "--threads '0'"),
        ("threads", "two", "--threads 'two'"),
        ("context_length", "-5", "--context-length '-5'"),
        ("max_running", "1.5", "--max-running '1.5'"),
        ("max_running", "1025", "--max-running 1025.*1024"),
        ("token_budget", "", "--token-budget ''"),
        ("ttft_target", "500", "--ttft-target '500'.*500ms"),
        ("ttft_target", "0ms", "--ttft-target '0ms'"),
        ("tpot_target", "-1s", "--tpot-target '-1s'"),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_right(flag, value, words):
    with pytest.raises(ConfigurationError, match=words):
        parse_engine_options(dataclasses.replace(EngineFlags(), **{flag: value}))


@pytest.mark.parametrize("flag", ["--ttft-target", "--tpot-target"])
@pytest.mark.parametrize("value", ["-5ms", "0s", "fast"])
def test_a_target_that_cannot_be_is_named_with_what_can(flag, value, capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", flag, value])
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert f"{flag} '{value}' is not a duration of more than 0" in message
    assert "500ms or 0.5s" in message


def test_targets_are_durations_and_off_by_default():
    assert parse_engine_options(EngineFlags()).ttft_target_s is None
    options = parse_engine_options(EngineFlags(ttft_target="500ms", tpot_target="0.05 s"))
    assert (options.ttft_target_s, options.tpot_target_s) == (0.5, 0.05)


def test_memory_is_bounded_by_the_container(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 32000000 kB\nMemAvailable: 16777216 kB\n")
    assert available_memory(meminfo, tmp_path) == 16 * GIB
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    assert available_memory(meminfo, tmp_path) == 3 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 16 * GIB


def test_cores_are_bounded_by_the_quota(tmp_path):
    unbounded = usable_cores(tmp_path)
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == unbounded


def test_restart_delays_double_up_to_a_bound():
    policy = RestartPolicy()
    policy.on_ready()
    delays = []
    for _ in range(8):
        policy.on_start(100.0)
        delays.append(policy.on_death(101.0))
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    policy.on_start(200.0)
    assert policy.on_death(230.0) == 0.5  # a long life forgets


def test_three_deaths_before_readiness_give_up():
    policy = RestartPolicy()
    assert [policy.on_death(0.0), policy.on_death(0.0), policy.on_death(0.0)] == [0.5, 1.0, None]
