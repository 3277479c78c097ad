"""In which numbers a model is kept, computed and cached. Pure: no torch, so that a launcher can ask too."""

from ..core.errors import ConfigurationError
from ..core.layout import BlockLayout
from ..vocab.model_config import ModelConfig

# (device, kernels) |-> weights' dtype |-> activations' dtype. Keys and values are kept in the activations' dtype.
_ACTIVATIONS = {
    ("cpu", "torch"): {"float16": "float32", "float32": "float32"},
    ("cuda", "triton"): {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "int8": "bfloat16"},
    # Triton's interpreter computes bfloat16 wrongly.
    ("cpu", "triton"): {"float16": "float16", "float32": "float32", "int8": "float32"},
}


def activation_dtype(device: str, kernels: str, weights_dtype: str) -> str:
    """The dtype between the layers and in the cache. Raises ConfigurationError for what cannot be computed."""
    by_weights = _ACTIVATIONS.get((device, kernels))
    if by_weights is None:
        pairs = ", ".join(f"{k} on {d}" for d, k in _ACTIVATIONS)
        raise ConfigurationError(f"kernels {kernels!r} do not run on device {device!r}. There are: {pairs}.")
    if weights_dtype not in by_weights:
        raise ConfigurationError(
            f"dtype {weights_dtype!r} is not supported on device {device!r} with kernels {kernels!r}. "
            f"Use {' or '.join(by_weights)}."
        )
    return by_weights[weights_dtype]


def kv_layout(model_config: ModelConfig, block_size: int, dtype: str) -> BlockLayout:
    """The block layout of a model whose activations are `dtype`."""
    return BlockLayout(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=block_size,
        dtype=dtype,
    )
