"""The start table's facts from GET /workers."""

import json

import msgspec
import pytest

from baton.launch.child_process import child_spec
from baton.launch.start_table import TableRow
from baton.launch.worker_report import WorkerReport, memory_lines, read_reports, table_row


def report(**fields: object) -> WorkerReport:
    usual = {"id": "decode-0", "kv_tokens": 1_234_567, "context_length": 8192, "transports": {}, "memory_note": ""}
    return WorkerReport(**{**usual, **fields})


def test_the_answer_of_the_gateway():
    fields = {"kv_tokens": 64, "context_length": 32, "transports": {"decode-0": "tcp"}, "memory_note": "", "pid": 7}
    reports = read_reports(json.dumps({"workers": [{"id": "prefill-0", **fields}]}))
    assert reports == {"prefill-0": WorkerReport("prefill-0", 64, 32, {"decode-0": "tcp"}, "")}
    for wrong in ("", "{}", '{"workers": [{}]}', '{"error": "no"}'):
        with pytest.raises(msgspec.DecodeError):
            read_reports(wrong)


def test_a_row_shows_what_is_real(builders):
    on_cpu = builders.worker_config("decode-0", threads=3)
    on_gpu = msgspec.structs.replace(on_cpu, device_name="NVIDIA H200", device_uuid="GPU-1a2b3c4d-5e6f-7788")
    ipc = report(transports={"prefill-0": "cuda_ipc", "prefill-1": "cuda_ipc"})
    assert table_row(child_spec(on_gpu), 5, ipc) == TableRow(
        "decode-0", 5, "NVIDIA H200 GPU-1a2b3c4d", "3", "1,234,567", "CUDA IPC"
    )
    mixed = report(transports={"prefill-0": "shared_memory", "prefill-1": "tcp"})
    assert table_row(child_spec(on_cpu), 5, mixed).transport == "shared memory, tcp"
    assert table_row(child_spec(on_cpu), 5, report()) == TableRow("decode-0", 5, "cpu", "3", "1,234,567", "-")
    assert table_row(child_spec(on_cpu), 5, None) == TableRow("decode-0", 5, "cpu", "3", "-", "-")
    assert table_row(child_spec(builders.gateway_config()), 6, None) == TableRow("gateway", 6)


def test_the_arithmetic_of_measured_pools():
    reports = {"prefill-0": report(id="prefill-0"), "decode-0": report(memory_note="90% of 140 GiB\n- 15 GiB weights")}
    assert memory_lines(reports) == ["decode-0 (context 8,192 tokens): 90% of 140 GiB", "  - 15 GiB weights"]
