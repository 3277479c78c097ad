"""Facts of a model folder, without loading it."""

import shutil

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from baton.core.errors import ConfigurationError
from baton.launch.model_facts import read_model_facts


def test_facts_of_the_tiny_model(tiny_model):
    facts = read_model_facts("tiny", tiny_model, "")
    assert (facts.num_layers, facts.num_kv_heads, facts.head_dim) == (2, 2, 16)
    assert facts.max_position_embeddings == 1024
    assert facts.num_parameters == sum(array.size for array in load_file(tiny_model / "model.safetensors").values())


def test_half_precision_counts_the_same_weights(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "half")
    weights = load_file(folder / "model.safetensors")
    halved = {name: array.astype(np.float16) for name, array in weights.items()}
    save_file(halved, folder / "model.safetensors")
    assert read_model_facts("a", folder, "").num_parameters == read_model_facts("b", tiny_model, "").num_parameters


def _digest(folder):
    return read_model_facts("m", folder, "").digest("float32")


def test_equal_folders_have_equal_digests_whatever_their_name(tiny_model, tmp_path):
    assert _digest(shutil.copytree(tiny_model, tmp_path / "elsewhere")) == _digest(tiny_model)


@pytest.mark.parametrize("changed", ["weights", "tokenizer.json", "config.json"])
def test_the_digest_sees_every_part(tiny_model, tmp_path, changed):
    folder = shutil.copytree(tiny_model, tmp_path / "changed")
    if changed == "weights":
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path = folder / changed
        path.write_text(path.read_text() + "\n")
    assert _digest(folder) != _digest(tiny_model)


def test_a_copy_of_the_weights_in_another_format_does_not_count(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "two")
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    assert read_model_facts("m", folder, "") == msgspec.structs.replace(
        read_model_facts("m", tiny_model, ""), folder=str(folder)
    )


def test_the_digest_sees_a_change_of_one_layer_in_the_middle_of_large_weights(tiny_model, tmp_path):
    weights = load_file(tiny_model / "model.safetensors")
    digests = set()
    for value in (0.0, 1.0):
        folder = shutil.copytree(tiny_model, tmp_path / str(value))
        changed = {"a": np.full(1 << 19, value, np.float32), "z": np.zeros(1 << 20, np.float32)}
        save_file(weights | changed, folder / "model.safetensors")
        digests.add(_digest(folder))
    assert len(digests) == 2


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_broken_weight_file_is_named(tiny_model, tmp_path, content):
    folder = shutil.copytree(tiny_model, tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"model\.safetensors .*Fetch it again"):
        read_model_facts("m", folder, "")


def test_a_folder_without_weights_is_refused(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"neither model\.safetensors nor"):
        read_model_facts("m", folder, "")
