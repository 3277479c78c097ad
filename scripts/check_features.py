"""The full equality check of features: all of them, in every topology and way of asking, against the colocated server.

    python scripts/check_features.py [MODEL] [--topology 1P1D]

Without MODEL a tiny random model is used (two minutes on two cores). Each server is asked whole and streamed, cold and
warm, alone and eight at once; log-probabilities may differ by what float32 sums do. With --topology only that one is
asked in all ways.
"""

import argparse
import tempfile
import time
from itertools import product
from pathlib import Path

from _helpers import load_module

serving = load_module("tests/serving.py")
features = load_module("tests/e2e/features.py")

TOPOLOGIES = {"colocated": (0, 1), "1P1D": (1, 1), "2P2D": (2, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Every feature, in every topology and way of asking.")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--topology", choices=TOPOLOGIES)
    asked = parser.parse_args()
    wrong: list[str] = []
    all_ways = list(product((1, 8), (False, True), ("cold", "warm")))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = asked.model or load_module("tests/tiny_model.py").write_tiny_model(folder / "tiny")
        expected = None
        for topology, (prefill, decode) in TOPOLOGIES.items():
            ways = all_ways if asked.topology in (None, topology) else all_ways[:1]
            if topology != "colocated" and len(ways) == 1:
                continue
            flags = ("--prefill", str(prefill), "--decode", str(decode), "--dtype", "float32", "--token-budget", "32")
            flags += ("--local-prefill", "never")
            with serving.serve(folder, model, *flags) as server:
                for at_once, streamed, cache in ways:
                    start = time.monotonic()
                    if cache == "cold":
                        server.wait_idle()
                        server.flush()
                    found = features.answers(server, streamed=streamed, at_once=at_once)
                    expected = expected or found
                    where = f"{topology}, {at_once} at once, {'streamed' if streamed else 'whole'}, {cache}"
                    lines = features.all_differences(expected, found, where)
                    print(f"{where}: {len(found)} requests, {len(lines)} differences", end=" ")
                    print(f"({time.monotonic() - start:.0f} s)", flush=True)
                    wrong += lines
                if topology != "colocated":
                    server.require_handed_over(num_local=len(ways) * features.num_scored_prompts())
    print("\n".join(wrong))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
