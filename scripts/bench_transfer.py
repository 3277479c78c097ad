"""How fast KV travels between two processes: pieces of 2 MiB over shared memory and over TCP (CURVE), beside memcpy.

    python scripts/bench_transfer.py [--mib 1024]

One process hands prompts over to another through the real channels, rings and checksums; the pool is plain memory, so
what is measured is transfer alone. A token has the 46,080 bytes of SmolLM2-135M's in float32, so 45 make a piece.
"""

import argparse
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.core.config import NetworkConfig, TransferConfig
from baton.core.layout import BlockLayout
from baton.core.messages import NodeRef, Role, WorkerInfo
from baton.core.timeline import Timeline
from baton.transfer.backends.ring_backend import DeviceBuffer, PieceBuffer
from baton.transfer.channels import WorkerChannels
from baton.transfer.keys import ClusterKeys
from baton.transfer.link import HandedOver, KVLink, ReceiveFailed, SendDone, SendFailed

LAYOUT = BlockLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")
TOKENS = 1024  # a prompt
SENDER = NodeRef("prefill-0", 1)
RECEIVER = NodeRef("decode-0", 2)


class MemoryStore:
    """A pool of one prompt, pieces in the order of tokens: gather and scatter are one memcpy each."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(secrets.token_bytes(LAYOUT.bytes_per_token) * TOKENS))

    def gather(
        self, block_table: Sequence[int], start: int, stop: int, out: PieceBuffer, *, first_layer: int, last_layer: int
    ) -> int:
        assert isinstance(out, memoryview)
        piece = self._memory[start * LAYOUT.bytes_per_token : stop * LAYOUT.bytes_per_token]
        out[:] = piece
        return len(piece)

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        stop: int,
        piece: PieceBuffer,
        *,
        first_layer: int,
        last_layer: int,
    ) -> None:
        assert isinstance(piece, memoryview)
        self._memory[start * LAYOUT.bytes_per_token : stop * LAYOUT.bytes_per_token] = piece

    def checksum(self, piece: DeviceBuffer) -> int:
        raise AssertionError("nothing of this benchmark is on a device")


def make_link(ref: NodeRef, run_dir: str, key_file: str, transport: str) -> tuple[WorkerChannels, KVLink, WorkerInfo]:
    # Over TCP the two must not find each other's unix socket, so they share no run directory then.
    shared = run_dir if transport == "shared_memory" else ""
    channels = WorkerChannels(NetworkConfig(shared, "127.0.0.1", (), key_file), ref, ClusterKeys.load(key_file))
    info = WorkerInfo(
        ref=ref,
        roles=(Role.DECODE,),
        pid=0,
        device="cpu",
        model="",
        model_digest="",
        wire_digest=LAYOUT.wire_digest,
        host_digest=channels.host_digest,
        endpoints=channels.endpoints,
        block_size=LAYOUT.block_size,
        num_blocks=0,
        context_length=TOKENS,
        max_running=1,
        threads=1,
    )
    return channels, KVLink(channels, MemoryStore(), LAYOUT, TransferConfig(transport), shared, info), info


def introduce(info: WorkerInfo, folder: Path, other: NodeRef) -> WorkerInfo:
    """Exchange WorkerInfo through two files, in place of a gateway."""
    (folder / f"{info.ref.node_id}.tmp").write_bytes(msgspec.json.encode(info))
    (folder / f"{info.ref.node_id}.tmp").rename(folder / f"{info.ref.node_id}.json")
    theirs = folder / f"{other.node_id}.json"
    deadline = time.monotonic() + 30
    while not theirs.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{other.node_id} did not come up within 30 s")
    return msgspec.json.decode(theirs.read_bytes(), type=WorkerInfo)


def send(folder: Path, transport: str, num_prompts: int) -> None:
    channels, link, info = make_link(SENDER, str(folder), str(folder / "keys"), transport)
    channels.add_peer(introduce(info, folder, RECEIVER))
    for number in range(num_prompts):
        now = time.monotonic()
        link.open_sender(str(number), RECEIVER, [], TOKENS, now)
        link.computed(str(number), TOKENS, now)
        link.finish(str(number), b"hidden", 0, Timeline(), now)
    done = 0
    while done < num_prompts or link.counts().ring_slots_in_use:
        events = link.pump(time.monotonic())
        for incoming in channels.poll(0.01):
            events += link.handle(incoming, time.monotonic())
        if failed := [e for e in events if isinstance(e, SendFailed)]:
            raise SystemExit(f"sender: {failed[0].reason}")
        done += sum(isinstance(e, SendDone) for e in events)
    link.close()
    channels.close()


def receive(folder: Path, transport: str, num_prompts: int) -> tuple[float, int]:
    """(seconds, nanoseconds both sides spent copying and checking) for all prompts, one after the other."""
    channels, link, info = make_link(RECEIVER, str(folder), str(folder / "keys"), transport)
    channels.add_peer(introduce(info, folder, SENDER))
    copy_ns, began = 0, 0.0
    for number in range(num_prompts):
        if number == 1:  # the first one also starts the other process and makes the ring
            began = time.perf_counter()
        link.open_receiver(str(number), SENDER, [], 0, TOKENS, time.monotonic())
        is_done = False
        while not is_done:
            events = link.pump(time.monotonic())
            for incoming in channels.poll(0.01):
                events += link.handle(incoming, time.monotonic())
            for event in events:
                if isinstance(event, ReceiveFailed):
                    raise SystemExit(f"receiver: {event.reason}")
                if isinstance(event, HandedOver):
                    is_done = True
                    copy_ns += event.timeline.copy_ns if number else 0
    seconds = time.perf_counter() - began
    for incoming in channels.poll(0.5):  # the sender's last words, while it takes its last credits
        link.handle(incoming, time.monotonic())
    link.close()
    channels.close()
    return seconds, copy_ns


def memcpy_gb_s() -> float:
    """One thread copying 2 MiB pieces out of a 64 MiB buffer into another."""
    source, target = memoryview(bytearray(b"x" * (64 << 20))), memoryview(bytearray(64 << 20))
    step = 2 << 20
    best = 0.0
    for _ in range(10):
        began = time.perf_counter()
        for start in range(0, len(source), step):
            target[start : start + step] = source[start : start + step]
        best = max(best, len(source) / (time.perf_counter() - began) / 1e9)
    return best


def measure(transport: str, mib: int) -> None:
    prompt_bytes = TOKENS * LAYOUT.bytes_per_token
    num_prompts = max(2, (mib << 20) // prompt_bytes + 1)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        folder = Path(name)
        ClusterKeys.create(folder / "keys")
        command = [sys.executable, "-P", __file__, "--send", name, "--transport", transport]
        sender = subprocess.Popen([*command, "--prompts", str(num_prompts)])
        seconds, copy_ns = receive(folder, transport, num_prompts)
        if sender.wait(30):
            raise SystemExit("the sender failed")
    num_bytes = (num_prompts - 1) * prompt_bytes
    per_prompt_ms, copies_ms = seconds / (num_prompts - 1) * 1e3, copy_ns / (num_prompts - 1) / 1e6
    print(
        f"{transport:14} {num_bytes / seconds / 1e9:6.2f} GB/s   {per_prompt_ms:.1f} ms a prompt of {TOKENS} tokens "
        f"({prompt_bytes / 1e6:.1f} MB); both sides together copy and check for {copies_ms:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="how much to send over each transport")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--transport", help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send:
        send(Path(arguments.send), arguments.transport, arguments.prompts)
        return
    print(f"{'memcpy':14} {memcpy_gb_s():6.2f} GB/s   one thread, pieces of 2 MiB")
    for transport in ("shared_memory", "tcp", "gloo"):
        measure(transport, arguments.mib)


if __name__ == "__main__":
    main()
