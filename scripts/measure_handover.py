"""What the hand-over costs: copies and messages as a part of the time to first token, from the request's Timeline.

    python scripts/measure_handover.py [--input-len 1024] [--num-requests 10] [--transport shared_memory]

Prompts are random and sent one at a time, so nothing is cached and nobody waits. `copy` is the time both workers spent
copying and checking pieces, `message` from the commit's sending to its arrival, `exposed` from the last chunk computed
on prefill to everything present on decode.
"""

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from _helpers import load_module

serving = load_module("tests/serving.py")
VOCAB_SIZE = 49_152


def measure(server, prompt: list[int]) -> dict[str, float]:
    """Milliseconds."""
    timing = server.server_timing(prompt)
    ttft = sum(ms for name, ms in timing.items() if "_to_" in name)
    copies, message = timing["handover_copy"], timing["handover_message"]
    exposed = timing["prefill_computed_to_handed_over"]
    return {"TTFT": ttft, "copy": copies, "message": message, "exposed": exposed, "share": (copies + message) / ttft}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--num-requests", type=int, default=10)
    parser.add_argument("--transport", default="shared_memory")
    parser.add_argument("--model", default="smollm2")
    arguments = parser.parse_args()
    generator = random.Random(0)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving.serve(
            Path(folder), arguments.model, "--transport", arguments.transport, "--local-prefill", "never"
        ) as server,
    ):
        rows = []
        for _ in range(arguments.num_requests + 1):
            prompt = [generator.randrange(100, VOCAB_SIZE) for _ in range(arguments.input_len)]
            rows.append(measure(server, prompt))
    rows = rows[1:]  # the first one warms up
    print(f"{arguments.num_requests} prompts of {arguments.input_len} tokens, {arguments.transport}: min, median, max")
    for name in rows[0]:
        values = sorted(row[name] for row in rows)
        unit, scale = (" %", 100) if name == "share" else (" ms", 1)
        print(f"{name:8}", *(f"{scale * v:9.2f}{unit}" for v in (values[0], statistics.median(values), values[-1])))


if __name__ == "__main__":
    main()
