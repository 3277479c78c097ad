"""WeightReader and load_model: what is wrong with a folder is named, and nothing but safetensors is read."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigurationError
from baton.kernels.cpu import CpuKernels
from baton.models.load_memory import mapped_ranges
from baton.models.registry import load_model
from baton.models.weights import WeightReader
from baton.vocab.model_config import load_model_config

CPU = torch.device("cpu")


def write(folder: Path, **tensors: torch.Tensor) -> None:
    save_file(tensors, folder / "model.safetensors")


def test_hands_out_what_is_in_the_file(tmp_path: Path) -> None:
    write(tmp_path, a=torch.arange(6.0).view(2, 3), b=torch.ones(4, dtype=torch.float16))
    with WeightReader(tmp_path, CPU) as weights:
        a, b = weights.take("a", 2, 3), weights.take("b", 4)
    assert a.tolist() == [[0, 1, 2], [3, 4, 5]]  # valid after the reader is closed
    assert b.dtype == torch.float16


def test_missing_tensor(tmp_path: Path) -> None:
    write(tmp_path, a=torch.ones(1))
    with (
        pytest.raises(ConfigurationError, match=r"lack the tensor model\.norm\.weight"),
        WeightReader(tmp_path, CPU) as w,
    ):
        w.take("model.norm.weight", 1)


def test_wrong_shape(tmp_path: Path) -> None:
    write(tmp_path, a=torch.ones(2, 3))
    with pytest.raises(ConfigurationError, match=r"a has shape \[2, 3\], config.json asks for \[3, 2\]"):
        WeightReader(tmp_path, CPU).take("a", 3, 2)


def test_stacks_matrices_in_the_wanted_dtype(tmp_path: Path) -> None:
    write(tmp_path, a=torch.arange(6.0).view(2, 3), b=torch.ones(1, 3, dtype=torch.float16))
    with WeightReader(tmp_path, CPU) as weights:
        stacked = weights.take_stacked({"b": (1, 3), "a": (2, 3)}, torch.float32)
    assert stacked.dtype == torch.float32
    assert stacked.tolist() == [[1, 1, 1], [0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigurationError, match="a has shape"):
        WeightReader(tmp_path, CPU).take_stacked({"b": (1, 3), "a": (3, 3)}, torch.float32)


def test_what_is_released_can_still_be_read(tmp_path: Path) -> None:
    """Pages are dropped and come back from the file; tensors that are copies were never in it."""
    values = torch.arange(3 * 10**5, dtype=torch.float32).view(3, -1)
    write(tmp_path, a=values, b=values + 1)
    with WeightReader(tmp_path, CPU) as weights:
        taken = [weights.take("a", *values.shape), weights.take("b", *values.shape)]
        copy = taken[0].clone()
        weights.release()
        assert torch.equal(taken[0], values)
        weights.release()
    assert torch.equal(taken[1], values + 1)
    assert torch.equal(copy, values)


@pytest.mark.skipif(sys.platform != "linux", reason="knows mappings on Linux only")
def test_only_memory_of_the_file_is_ever_dropped(tmp_path: Path) -> None:
    write(tmp_path, a=torch.ones(10**5))
    path = tmp_path / "model.safetensors"
    assert mapped_ranges(path) == []
    weights = WeightReader(tmp_path, CPU)
    assert any(weights.take("a", 10**5).data_ptr() in mapped for mapped in mapped_ranges(path))
    assert not any(torch.ones(10**5).data_ptr() in mapped for mapped in mapped_ranges(path))


def test_unexpected_tensors_are_named_but_not_all_of_a_thousand(tmp_path: Path) -> None:
    write(tmp_path, **{f"t{i}": torch.ones(1) for i in range(9)})
    with (
        pytest.raises(ConfigurationError, match=r"t1, t2, t3, t4, t5 and 3 more"),
        WeightReader(tmp_path, CPU) as weights,
    ):
        weights.take("t0", 1)


def test_ignored_tensors_are_not_unexpected(tmp_path: Path) -> None:
    write(tmp_path, **{"layers.0.rotary_emb.inv_freq": torch.ones(1)})
    with WeightReader(tmp_path, CPU) as weights:
        weights.ignore("rotary_emb.inv_freq")


def test_an_error_inside_is_not_covered_by_left_over_tensors(tmp_path: Path) -> None:
    write(tmp_path, a=torch.ones(1))
    with pytest.raises(KeyError), WeightReader(tmp_path, CPU):
        raise KeyError


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ConfigurationError, match="are never read, because loading them can run code"):
        WeightReader(tmp_path, CPU)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        WeightReader(tmp_path, CPU)


def test_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        WeightReader(tmp_path, CPU)


def test_a_file_cut_short(tmp_path: Path) -> None:
    write(tmp_path, a=torch.ones(100))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        WeightReader(tmp_path, CPU)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {"a": 3}}', "{}"])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(
        ConfigurationError, match=r"index\.json (is not valid JSON|holds no JSON object|does not map tensors)"
    ):
        WeightReader(tmp_path, CPU)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors"])
def test_an_index_must_stay_in_its_folder(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ConfigurationError, match="does not map tensors to files of its folder"):
        WeightReader(tmp_path, CPU)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    with pytest.raises(ConfigurationError, match=r"one\.safetensors cannot be read"):
        WeightReader(tmp_path, CPU)


def test_shards_give_the_model_of_the_single_file(save_model: Callable[..., Path], tmp_path: Path) -> None:
    sharded = save_model("llama", max_shard_size="20KB")
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 2
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    save_file(tensors, tmp_path / "model.safetensors")
    config = load_model_config(sharded)
    one, many = (load_model(config, folder, CpuKernels(), "float32") for folder in (tmp_path, sharded))
    assert torch.equal(one.embedding.weight, many.embedding.weight)
    x = torch.ones(1, config.hidden_size)
    for a, b in zip(one.layers, many.layers, strict=True):
        assert torch.equal(a.attention.qkv(x), b.attention.qkv(x))
        assert torch.equal(a.mlp(x, CpuKernels()), b.mlp(x, CpuKernels()))


def test_a_tied_model_may_store_its_head_twice(save_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = save_model("llama", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    load_model(load_model_config(folder), tmp_path, CpuKernels(), "float32")


def test_unknown_family(tiny_model: Path) -> None:
    config = msgspec.structs.replace(load_model_config(tiny_model), family="mamba")
    with pytest.raises(ConfigurationError, match=r"'mamba' is not supported\. Supported are llama, mistral"):
        load_model(config, tiny_model, CpuKernels(), "float32")
