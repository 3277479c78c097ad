"""Which dtypes a model is computed and cached in."""

import pytest

from baton.core.errors import ConfigurationError
from baton.engine.dtypes import activation_dtype


@pytest.mark.parametrize(
    ("device", "kernels", "weights", "activations"),
    [
        ("cpu", "torch", "float16", "float32"),
        ("cpu", "torch", "float32", "float32"),
        ("cuda", "triton", "bfloat16", "bfloat16"),
        ("cuda", "triton", "float16", "float16"),
        ("cuda", "triton", "float32", "float32"),
        ("cuda", "triton", "int8", "bfloat16"),
        ("cpu", "triton", "float32", "float32"),
        ("cpu", "triton", "float16", "float16"),
    ],
)
def test_activations(device: str, kernels: str, weights: str, activations: str) -> None:
    assert activation_dtype(device, kernels, weights) == activations


def test_what_cannot_be_computed_is_named() -> None:
    with pytest.raises(ConfigurationError, match="kernels 'torch' do not run on device 'cuda'"):
        activation_dtype("cuda", "torch", "float16")
    with pytest.raises(ConfigurationError, match=r"dtype 'int8' is not supported .* Use float16 or float32\."):
        activation_dtype("cpu", "torch", "int8")
    with pytest.raises(ConfigurationError, match="dtype 'bfloat16' is not supported on device 'cpu'"):
        activation_dtype("cpu", "triton", "bfloat16")
