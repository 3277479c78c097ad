import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from baton.core.errors import ConfigurationError
from baton.vocab.gguf_convert import convert_gguf, unpermute_rope_rows
from baton.vocab.model_config import RopeScaling, load_model_config

F32 = gguf.GGMLQuantizationType.F32
F16 = gguf.GGMLQuantizationType.F16
BF16 = gguf.GGMLQuantizationType.BF16
Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    return folder


def test_unpermute_by_literals() -> None:
    # two heads of six rows; GGUF keeps the partners of a rotation side by side
    permuted = np.array([0, 3, 1, 4, 2, 5, 10, 13, 11, 14, 12, 15])
    expected = np.array([0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15])
    np.testing.assert_array_equal(unpermute_rope_rows(permuted, num_heads=2), expected)
    columns = np.stack([permuted, permuted + 100], axis=1)
    np.testing.assert_array_equal(
        unpermute_rope_rows(columns, num_heads=2), np.stack([expected, expected + 100], axis=1)
    )


@given(heads=st.integers(1, 5), half=st.integers(1, 6), columns=st.integers(1, 4))
def test_unpermute_undoes_the_published_permutation(heads: int, half: int, columns: int) -> None:
    rows = heads * half * 2
    weights = np.arange(rows * columns).reshape(rows, columns)
    permuted = weights.reshape(heads, 2, half, columns).swapaxes(1, 2).reshape(weights.shape)
    np.testing.assert_array_equal(unpermute_rope_rows(permuted, heads), weights)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("matrix_type", [F16, F32, BF16])
def test_weights_come_back_as_they_went_in(
    tied: bool,
    matrix_type: gguf.GGMLQuantizationType,
    make_gguf: Callable[..., Path],
    make_weights: Callable[[bool], dict[str, np.ndarray]],
    target: Path,
    progress: Any,
) -> None:
    note = convert_gguf(make_gguf(tied=tied, matrix_type=matrix_type), target, progress)
    expected = make_weights(tied)
    written = load_file(target / "model.safetensors")
    assert note == ""
    assert set(written) == set(expected)
    matrix_dtype = np.float16 if matrix_type == F16 else np.float32
    for name, values in expected.items():
        assert written[name].dtype == (np.float32 if values.ndim == 1 else matrix_dtype)
        tolerance = 2.0**-8 if matrix_type == BF16 and values.ndim > 1 else 0.0
        np.testing.assert_allclose(written[name], values, rtol=tolerance)
    config = load_model_config(target)
    assert config.tie_word_embeddings is tied
    assert config.dtype == np.dtype(matrix_dtype).name
    assert [record[1:] for record in progress.phases] == [[None, 0], [len(expected), len(expected)]]


def test_quantised_weights_are_dequantised_and_said_to_be(
    make_gguf: Callable[..., Path],
    make_weights: Callable[[bool], dict[str, np.ndarray]],
    target: Path,
    progress: Any,
) -> None:
    note = convert_gguf(make_gguf(matrix_type=Q8_0), target, progress)
    assert note == "weights dequantised from Q8_0"
    written = load_file(target / "model.safetensors")
    for name, values in make_weights(True).items():
        if values.ndim > 1:  # a step of Q8_0 is the largest of 32 values / 127; it and the result are float16
            largest = np.abs(values.reshape(-1, 32)).max(axis=1, keepdims=True)
            error = np.abs(written[name].astype(np.float32) - values).reshape(-1, 32)
            assert (error <= largest / 127 * 0.51 + largest * 2.0**-10).all()


def test_config_is_the_one_in_the_file(make_gguf: Callable[..., Path], target: Path, progress: Any) -> None:
    convert_gguf(make_gguf(metadata={"tokenizer.ggml.eot_token_id": 0}), target, progress)
    config = load_model_config(target)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (32, 64, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert (config.vocab_size, config.max_position_embeddings) == (3 + 256 + 8, 512)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 50000.0, None)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 0))


def test_linear_rope_scaling_is_kept(make_gguf: Callable[..., Path], target: Path, progress: Any) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    convert_gguf(make_gguf(metadata=metadata), target, progress)
    scaling = load_model_config(target).rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor) == ("linear", 2.5)


def test_the_tokenizer_is_the_one_in_the_file(
    make_gguf: Callable[..., Path], byte_level: Tokenizer, target: Path, progress: Any
) -> None:
    convert_gguf(make_gguf(), target, progress)
    converted = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert converted.get_vocab() == byte_level.get_vocab()
    for text in ("hello world 1212é", "<|im_start|>hello<|im_end|>", "日本 \n\t\0", " hello", ""):
        assert converted.encode(text).ids == byte_level.encode(text).ids
    assert converted.decode([1, 100, 2]) == byte_level.decode([1, 100, 2])
    config = json.loads((target / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["chat_template"].startswith("{% for m in messages %}")


def test_a_beginning_token_is_added_when_the_file_says_so(
    make_gguf: Callable[..., Path], target: Path, progress: Any
) -> None:
    convert_gguf(make_gguf(metadata={"tokenizer.ggml.add_bos_token": True}), target, progress)
    converted = Tokenizer.from_file(str(target / "tokenizer.json"))
    plain = converted.encode("hello", add_special_tokens=False).ids
    assert converted.encode("hello").ids == [1, *plain]


def test_pre_tokenizers_split_as_their_models_do(make_gguf: Callable[..., Path], target: Path, progress: Any) -> None:
    merged = {}
    for name in ("smollm", "gpt-2", "llama-bpe"):
        convert_gguf(make_gguf(metadata={"tokenizer.ggml.pre": name}), target, progress)
        converted = Tokenizer.from_file(str(target / "tokenizer.json"))
        merged[name] = [converted.encode(text).tokens for text in ("1212", "hello", " wo")]
    assert merged["smollm"] == [["1", "2", "1", "2"], ["hello"], ["Ġwo"]]  # digits stand alone
    assert merged["gpt-2"] == [["12", "12"], ["hello"], ["Ġwo"]]
    assert merged["llama-bpe"] == [["12", "1", "2"], ["hello"], ["Ġwo"]]  # digits in groups of three


def llama3_factors(factor: float, head_dim: int, theta: float) -> np.ndarray:
    """The definition of Llama 3.1's scaling, one frequency at a time, with the constants that Meta trained with."""
    low, high, original = 1.0, 4.0, 8192
    factors = []
    for i in range(0, head_dim, 2):
        turns = original / (2 * np.pi * theta ** (i / head_dim))  # rotations within the original context
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(factor)
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_become_their_parameters(
    factor: float,
    make_gguf: Callable[..., Path],
    make_weights: Callable[[bool], dict[str, np.ndarray]],
    target: Path,
    progress: Any,
) -> None:
    factors = llama3_factors(factor, head_dim=8, theta=500000.0)
    assert len(set(factors)) > 2  # a smoothed one among them
    path = make_gguf(
        weights=make_weights(True) | {"rope_freqs.weight": factors},
        metadata={"llama.rope.freq_base": 500000.0},
    )
    convert_gguf(path, target, progress)
    assert load_model_config(target).rope_scaling == RopeScaling("llama3", factor, 1.0, 4.0, 8192)


def test_other_rope_factors_are_refused(
    make_gguf: Callable[..., Path],
    make_weights: Callable[[bool], dict[str, np.ndarray]],
    target: Path,
    progress: Any,
) -> None:
    factors = llama3_factors(8.0, head_dim=8, theta=500000.0)
    factors[1] += 0.01
    path = make_gguf(
        weights=make_weights(True) | {"rope_freqs.weight": factors},
        metadata={"llama.rope.freq_base": 500000.0},
    )
    with pytest.raises(ConfigurationError, match=r"rope_freqs\.weight"):
        convert_gguf(path, target, progress)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mamba", "metadata": {}}, "architecture 'mamba'"),
        ({"metadata": {"tokenizer.ggml.model": "t5"}}, "kind 't5'"),
        ({"metadata": {"tokenizer.ggml.model": "llama"}}, "lacks the scores"),
        ({"metadata": {"tokenizer.ggml.pre": "deepseek-llm"}}, "'deepseek-llm'"),
        ({"metadata": {"tokenizer.ggml.pre": None}}, "pre-tokenizer None"),
        ({"metadata": {"llama.expert_count": 8}}, "lacks the metadata llama.expert_used_count"),
        ({"metadata": {"llama.expert_count": 8, "llama.expert_used_count": 2}}, "lacks the tensor blk.0.ffn_down_exps"),
        ({"metadata": {"llama.attention.sliding_window": 9}}, "llama.attention.sliding_window is 9"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type is 'yarn'"),
        ({"metadata": {"llama.rope.dimension_count": 4}}, "llama.rope.dimension_count is 4"),
        ({"metadata": {"llama.block_count": 3}}, "lacks the tensor blk.2."),
        ({"metadata": {"llama.block_count": 1}}, "has a tensor blk.1."),
        ({"metadata": {"llama.feed_forward_length": None}}, "lacks the metadata llama.feed_forward_length"),
        ({"metadata": {"split.count": 3}}, "one part of a split GGUF"),
        ({"metadata": {"tokenizer.ggml.tokens": ["a", "b"]}}, "a merge of unknown tokens"),
        ({"metadata": {"tokenizer.ggml.tokens": ["h", "e", "he", "h"]}}, "a token twice"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused(
    options: dict[str, Any], message: str, make_gguf: Callable[..., Path], target: Path, progress: Any
) -> None:
    if "tokenizer.ggml.tokens" in options["metadata"]:
        options["metadata"] |= {"tokenizer.ggml.merges": ["h e"]}
    with pytest.raises(ConfigurationError) as caught:
        convert_gguf(make_gguf(**options), target, progress)
    assert message in str(caught.value)


def test_values_beyond_float16_are_refused(
    make_gguf: Callable[..., Path],
    make_weights: Callable[[bool], dict[str, np.ndarray]],
    target: Path,
    progress: Any,
) -> None:
    weights = make_weights(True)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 70000.0
    path = make_gguf(weights=weights, matrix_type=Q8_0)
    with pytest.raises(ConfigurationError, match=r"blk\.1\.ffn_up\.weight has values that float16 cannot hold"):
        convert_gguf(path, target, progress)


@pytest.mark.parametrize("keep", [0, 3, 40, 5000, -100])
def test_a_cut_file_is_refused(keep: int, make_gguf: Callable[..., Path], target: Path, progress: Any) -> None:
    path = make_gguf()
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigurationError, match="not a complete GGUF file"):
        convert_gguf(path, target, progress)


def test_another_kind_of_file_is_refused(tmp_path: Path, target: Path, progress: Any) -> None:
    path = tmp_path / "picture.gguf"
    path.write_bytes(b"\x89PNG" * 1000)
    with pytest.raises(ConfigurationError, match="not a complete GGUF file"):
        convert_gguf(path, target, progress)
