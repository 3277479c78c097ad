"""scripts/write_kernel_tables.py: how its numbers read. Compiling takes minutes and is not tested here."""

from importlib import import_module
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(877.4e-9, "877 ns"), (6.83e-9, "6.83 ns"), (999.7e-9, "1 us"), (999.7e-6, "1 ms"), (1.75e-6, "1.75 us")],
)
def test_durations_have_no_exponent(monkeypatch, seconds, text):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    assert import_module("write_kernel_tables").duration(seconds) == text


def test_amounts_have_no_exponent(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    amount = import_module("write_kernel_tables").amount
    assert [amount(number) for number in (999, 4210, 999_700, 989 * 10**12)] == ["999 ", "4.21 k", "1 M", "989 T"]
