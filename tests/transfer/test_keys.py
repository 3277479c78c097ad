"""The key file: who may read it, what it holds, what is said when it is wrong."""

import stat
from pathlib import Path

import pytest
import zmq

from baton.core.errors import ConfigurationError
from baton.transfer.keys import ClusterKeys


def test_created_keys_are_private_and_load_again(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = ClusterKeys.create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ClusterKeys.load(path) == keys
    assert zmq.curve_public(keys.secret.encode()).decode() == keys.public
    assert keys.secret not in repr(keys)


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = ClusterKeys.create(path)
    with pytest.raises(ConfigurationError, match="remove it"):
        ClusterKeys.create(path)
    assert ClusterKeys.load(path) == keys


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o660])
def test_a_file_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    ClusterKeys.create(path)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        ClusterKeys.load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\x80", b'{"public":"a","secret":"b"}', b'{"public":1,"secret":2}', b"x" * 10_000],
)
def test_what_is_no_key_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="not a key file"):
        ClusterKeys.load(path)


def test_halves_of_two_pairs_are_refused(tmp_path: Path) -> None:
    one, two = ClusterKeys.create(tmp_path / "one"), ClusterKeys.create(tmp_path / "two")
    path = tmp_path / "mixed"
    path.write_text(f'{{"public":"{one.public}","secret":"{two.secret}"}}')
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="not a key file"):
        ClusterKeys.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        ClusterKeys.load(tmp_path / "nowhere")
