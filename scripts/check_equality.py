"""The full equality check on SmolLM2 in float32: every pair of choices, 20 prompts x 64 tokens, against the oracle.

    python scripts/check_equality.py

Ten settings cover every pair of {colocated, 1P1D, 2P2D} x {block 1, 16, 64} x {shared memory, tcp} x {alone, 8 at
once}; each runs cold and then warm. It takes about half an hour on two cores; the tests run two of the settings.
"""

import json
import tempfile
import time
from pathlib import Path

from _helpers import ROOT, load_module

serving = load_module("tests/serving.py")
equality = load_module("tests/e2e/test_equality.py")

# (topology, block size, transport, at once): an orthogonal array of topology and block size, and what it leaves open.
SETTINGS = [
    ("colocated", 1, "shared_memory", 8),
    ("colocated", 16, "tcp", 8),
    ("colocated", 64, "shared_memory", 1),
    ("1P1D", 1, "tcp", 8),
    ("1P1D", 16, "shared_memory", 1),
    ("1P1D", 64, "shared_memory", 8),
    ("2P2D", 1, "shared_memory", 1),
    ("2P2D", 16, "shared_memory", 8),
    ("2P2D", 64, "tcp", 8),
    ("2P2D", 16, "tcp", 1),
]


def main() -> None:
    rows = json.loads((ROOT / "tests" / "data" / "oracle_smollm2.json").read_text())
    prompts = [row["prompt"] for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        for topology, block_size, transport, at_once in SETTINGS:
            flags = equality.flags(topology, block_size, transport)
            with serving.serve(Path(folder), "smollm2", *flags) as server:
                for cache in ("cold", "warm"):
                    where = f"{topology}, block {block_size}, {transport}, {at_once} at once, {cache}"
                    start = time.monotonic()
                    outputs = server.all_token_ids(prompts, 64, at_once)
                    equality.check(rows, outputs, where)
                    same = sum(output == row["output"] for output, row in zip(outputs, rows, strict=True))
                    seconds = time.monotonic() - start
                    print(
                        f"{where}: {same} of {len(rows)} identical, the others within the rule ({seconds:.0f} s)",
                        flush=True,
                    )
                if topology != "colocated":
                    server.require_handed_over()


if __name__ == "__main__":
    main()
