"""triton is optional: without it the CPU path works, and who asks for its kernels is told what to install."""

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
sys.modules["triton"] = None  # as if it were not installed
from baton.core.config import EngineConfig
from baton.core.errors import ConfigurationError
from baton.engine.engine import load_engine
for kernels in ("torch", "triton"):
    try:
        print(load_engine(EngineConfig(sys.argv[1], "cpu", kernels, "float32", 16, 4, 1)).num_blocks)
    except ConfigurationError as error:
        print(error)
"""


def test_the_cpu_path_needs_no_triton(tiny_model: Path) -> None:
    command = [sys.executable, "-P", "-c", CODE, str(tiny_model)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = result.stdout.splitlines()
    assert first == "4"
    assert second.startswith("kernels 'triton' need triton: ")
    assert second.endswith("Run `pip install triton`.")
