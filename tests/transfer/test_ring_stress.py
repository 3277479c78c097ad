"""ZQ07: two processes, one ring, many small pieces: a reader never sees a message before the bytes it speaks of."""

import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq
from xxhash import xxh3_64_intdigest

from baton.transfer.backends.shared_memory import SharedMemoryReceiver, SharedMemorySender
from baton.transfer.ring import ReceiverRing, SenderRing

SLOTS, SLOT_BYTES, NUM_PIECES, BOUND_S = 4, 4096, 1_000_000, 45.0
PIECE, CREDIT, STOP = struct.Struct("<IQIQ"), struct.Struct("<IQ"), b"stop"


def send(folder: str, name: str) -> None:
    """The other process: fill slots with bytes that are new each time, as fast as credits come back."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(f"ipc://{folder}/stress.sock")
    backend, ring = SharedMemorySender(folder, name, SLOTS, SLOT_BYTES), SenderRing(SLOTS)
    number = 0
    while True:
        while (taken := ring.take(0.0)) is not None:
            slot, generation = taken
            number += 1
            num_bytes = 8 * (1 + number % 400)
            data = struct.pack("<Q", number * 0x9E3779B97F4A7C15 % 2**64) * (num_bytes // 8)
            backend.write(slot, num_bytes)[:] = data
            socket.send(PIECE.pack(slot, generation, num_bytes, xxh3_64_intdigest(data)))
        answer = socket.recv()
        if answer == STOP:
            break
        ring.credit(*CREDIT.unpack(answer))
    socket.close(linger=0)
    context.term()


@pytest.mark.slow
def test_a_million_pieces_between_two_processes(tmp_path: Path) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.bind(f"ipc://{tmp_path}/stress.sock")
    backend, ring = SharedMemoryReceiver(str(tmp_path), SLOTS, SLOT_BYTES), ReceiverRing(SLOTS)
    child = subprocess.Popen([sys.executable, "-P", __file__, str(tmp_path), backend.name])
    deadline = time.monotonic() + BOUND_S
    num_read = num_wrong = 0
    while num_read < NUM_PIECES and time.monotonic() < deadline:
        assert socket.poll(20_000), "the sender is stuck"
        slot, generation, num_bytes, checksum = PIECE.unpack(socket.recv())
        ring.announced(slot, generation)
        num_wrong += xxh3_64_intdigest(backend.read(slot, num_bytes, None)) != checksum
        socket.send(CREDIT.pack(slot, ring.release(slot)))
        num_read += 1
    socket.send(STOP)
    assert child.wait(20) == 0
    socket.close(linger=0)
    context.term()
    backend.close()
    assert num_wrong == 0
    assert num_read > 20_000, f"only {num_read} pieces in {BOUND_S} s"


if __name__ == "__main__":
    send(*sys.argv[1:])
