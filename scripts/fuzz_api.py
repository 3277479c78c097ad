"""Random requests made from Baton's own /openapi.json: none may give a 5xx, or an answer that is not described there.

    python scripts/fuzz_api.py [--requests 2000] [--seed 1] [--prefill 1] [--decode 1]

A server of a tiny random model is started for it (--url: asks one of yours); tests/e2e/fuzz.py makes the requests.
"""

import argparse
import tempfile
from pathlib import Path

from _helpers import load_module

fuzzing = load_module("tests/e2e/fuzz.py")


def main() -> None:
    parser = argparse.ArgumentParser(description="Random requests made from /openapi.json.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefill", default="1")
    parser.add_argument("--decode", default="1")
    parser.add_argument("--url", help="a server of yours, instead of one that is started")
    asked = parser.parse_args()
    if asked.url:
        fuzz = fuzzing.Fuzz(asked.url)
        fuzz.run(asked.requests, asked.seed)
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            model = load_module("tests/tiny_model.py").write_tiny_model(folder / "tiny-llama")
            flags = ("--prefill", asked.prefill, "--decode", asked.decode)
            with load_module("tests/serving.py").serve(folder, model, *flags) as server:
                fuzz = fuzzing.Fuzz(server.url)
                fuzz.run(asked.requests, asked.seed)
    print("\n".join(fuzzing.report(fuzz)))
    raise SystemExit(1 if fuzz.faults else 0)


if __name__ == "__main__":
    main()
