"""A child without a server: `fake_child.py BEHAVIOUR RECORD FD`. Appends one line per event to RECORD.

serve: drain on SIGTERM. patient: on the second one. stubborn: ignore SIGTERM.
crash: exit 1. misconfigured: exit 2. noisy: long output, then serve.
The pipe handling is the real one of launch/child.py.
"""

import os
import signal
import sys
import threading

from baton.launch.child import EXIT_CONFIGURATION, EXIT_CRASHED, read_config, watch_launcher


def main(behaviour: str, record: str, descriptor: int) -> int:
    is_gateway = "gateway" in behaviour
    config = read_config("gateway" if is_gateway else "worker", descriptor)
    name = config.gateway_id if is_gateway else config.worker_id
    watch_launcher(descriptor)

    def note(event: str) -> None:
        with open(record, "a") as file:
            file.write(f"{name} {event}\n")

    drained = threading.Event()
    stubborn = "stubborn" in behaviour

    def on_signal(*_: object) -> None:
        note("ignored SIGTERM" if stubborn else "was told")
        told.append(True)
        if not stubborn and len(told) >= ("patient" in behaviour) + 1:
            drained.set()

    told: list[bool] = []
    signal.signal(signal.SIGTERM, on_signal)
    note(f"started {os.getpid()} {os.getsid(0)} {os.environ.get('OMP_NUM_THREADS')}")
    if "noisy" in behaviour:
        print("x" * 200_000 + "\nlast line", flush=True)
    if "crash" in behaviour:
        print("the reason of the crash", flush=True)
        return EXIT_CRASHED
    if "misconfigured" in behaviour:
        print("12:00:00 ERROR nothing fits", flush=True)
        return EXIT_CONFIGURATION
    while not drained.wait(0.1):
        pass
    note("drained")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
