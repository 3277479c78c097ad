"""A child and its launcher: config on the pipe, the end with the pipe, exit codes that mean something."""

import os
import subprocess
import sys

import msgspec
import pytest

from baton.core.errors import ConfigurationError, LocalProtocolError
from baton.launch import child
from baton.launch.child import EXIT_CONFIGURATION, EXIT_ORPHANED
from baton.launch.child_process import child_spec


def _child(config, content: bytes, *, close: bool, **environment: str):
    """The real child with `content` on its pipe; `close`: as if the launcher died afterwards."""
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [*child_spec(config).command, str(read_end)],
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    os.close(read_end)
    os.write(write_end, content)
    if close:
        os.close(write_end)
    output, _ = process.communicate(timeout=60)
    if not close:
        os.close(write_end)
    return process.returncode, output


def test_it_ends_when_the_launcher_dies_before_the_config_is_out(builders):
    assert _child(builders.gateway_config(), b'{"gateway_id":', close=True) == (EXIT_ORPHANED, "")


def test_a_configuration_that_cannot_work_has_its_own_exit_code(builders, tmp_path):
    config = msgspec.structs.replace(
        builders.gateway_config(), model_folder=str(tmp_path), key_file=str(tmp_path / "no")
    )
    code, output = _child(config, msgspec.json.encode(config) + b"\n", close=False)
    assert code == EXIT_CONFIGURATION
    assert str(tmp_path) in output
    assert "Traceback" not in output


def test_only_a_wrong_configuration_says_that_a_restart_is_in_vain(builders, monkeypatch):
    def ends_with(error: Exception) -> int:
        def run(config) -> None:
            raise error

        monkeypatch.setattr(child, "run", run)
        return child.main(["worker", "decode-0", "0"])

    monkeypatch.setattr(child, "read_config", lambda kind, descriptor: builders.worker_config("decode-0"))
    monkeypatch.setattr(child, "watch_launcher", lambda descriptor: None)
    assert ends_with(ConfigurationError("no such model")) == EXIT_CONFIGURATION
    with pytest.raises(LocalProtocolError):  # exit code 1, with a traceback
        ends_with(LocalProtocolError("a bug"))


@pytest.mark.slow
def test_it_ends_when_the_launcher_dies_while_it_starts(builders):
    config = builders.worker_config("decode-0")
    code, output = _child(config, msgspec.json.encode(config) + b"\n", close=True)
    assert code == EXIT_ORPHANED, output


def test_configs_survive_the_pipe(builders):
    for config in (builders.gateway_config(), builders.worker_config("decode-0", threads=3)):
        assert msgspec.json.decode(msgspec.json.encode(config), type=type(config)) == config


def test_the_working_directory_cannot_shadow_a_module(builders, tmp_path, monkeypatch):
    (tmp_path / "msgspec.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(tmp_path)
    code, output = _child(builders.gateway_config(), b"", close=True)
    assert (code, output) == (EXIT_ORPHANED, "")
    assert sys.executable == child_spec(builders.gateway_config()).command[0]
