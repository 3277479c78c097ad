from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from baton.vocab.safetensors_stream import TensorSpec, aligned_order, write_safetensors


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    tensors = {
        "odd": np.arange(3, dtype=np.float16),
        "norm": np.linspace(0, 1, 5, dtype=np.float32),
        "transposed": np.arange(6, dtype=np.float16).reshape(2, 3).T,
        "empty": np.zeros((0, 4), dtype=np.float32),
    }
    specs = aligned_order(TensorSpec(name, t.dtype.name, t.shape) for name, t in tensors.items())
    write_safetensors(tmp_path / "x.safetensors", specs, (tensors[spec.name] for spec in specs))
    written = load_file(tmp_path / "x.safetensors")
    assert set(written) == set(tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(written[name], values, strict=True)


def test_every_tensor_starts_at_a_multiple_of_its_item_size() -> None:
    specs = aligned_order([TensorSpec("b", "float16", (3,)), TensorSpec("c", "float32", (3,)),
                           TensorSpec("a", "float16", (1,))])  # fmt: skip
    assert [spec.name for spec in specs] == ["c", "a", "b"]


@pytest.mark.parametrize("tensor", [np.zeros(3, np.float32), np.zeros(2, np.float16)])
def test_a_tensor_that_is_not_as_announced_is_an_error(tmp_path: Path, tensor: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"w is float.*, not float32\(2,\)"):
        write_safetensors(tmp_path / "x.safetensors", [TensorSpec("w", "float32", (2,))], [tensor])
