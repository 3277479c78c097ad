"""Device cost models against the formulas they come from, by numbers."""

import pytest

from baton.core.errors import ConfigurationError
from baton.core.step_cost import StepCost, StepShape, chunk_products
from baton.sim.device import LinearDevice, OptDevice, Overheads, TableDevice, device_model, device_models
from baton.sim.handover import LinkSpeed, Wire


def test_a_prefill_step_is_the_table_at_its_tokens_plus_attention():
    device = TableDevice(device_model("llama3.1-8b-bf16-tp1-h200"))
    # table: 19.6431 ms at 1024 and 40.1959 at 2048; attention 0.476713 + 0.0113866 * chunks + 8.54193e-7 * X
    shape = StepShape(1536, chunk_products(0, 1024) + chunk_products(100, 512))
    products = 1024 * 512 + 512 * (100 + 256)
    expected = (19.6431 + 40.1959) / 2 + 0.476713 + 2 * 0.0113866 + 8.54193e-7 * products
    assert device.step_s(shape, 2) * 1000 == pytest.approx(expected, abs=1e-9)


def test_a_decode_step_reads_the_context_of_all():
    device = TableDevice(device_model("llama3.1-8b-bf16-tp1-h200"))
    expected = 4.985 + 0.42822 + 64 * 0.00399181 + 2.99355e-5 * 64_000  # 64 tokens are a point of the table
    assert device.step_s(StepShape(0, 0.0, 64, 64_000), 0) * 1000 == pytest.approx(expected, abs=1e-9)


def test_a_mixed_step_pays_the_table_once_and_both_kinds_of_attention():
    device = TableDevice(device_model("llama3.1-8b-bf16-tp1-h200"))
    mixed = device.step_s(StepShape(448, 0.0, 64, 64_000), 1) * 1000
    expected = 10.7705 + 0.476713 + 0.0113866 + 0.42822 + 64 * 0.00399181 + 2.99355e-5 * 64_000
    assert mixed == pytest.approx(expected, abs=1e-9)


def test_outside_of_the_table_the_last_line_goes_on():
    model = device_model("llama3.1-8b-bf16-tp1-h200")
    device = TableDevice(model)
    slope = (333.6132 - 168.4388) / 8192
    found = device.step_s(StepShape(20_000), 0) * 1000
    assert found == pytest.approx(333.6132 + slope * (20_000 - 16_384), abs=1e-9)


@pytest.mark.parametrize("name", device_models())
def test_every_model_gets_slower_with_more_work(name: str):
    device = TableDevice(device_model(name))
    steps = [device.step_s(StepShape(n, n * n / 2.0), 1) for n in (256, 1024, 4096, 16384)]
    assert steps == sorted(steps)
    assert 0.0005 < steps[0] < steps[-1] < 20


def test_an_unknown_model_is_answered_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="there are llama3"):
        device_model("gpt-5")


def test_opt_coefficients_give_the_simulators_step_times():
    device = OptDevice((10.0, 0.1, 1e-5), (20.0, 1e-3, 0.05), (5.0, 1e-3, 0.2), large_batch=95)
    whole = StepShape(512, chunk_products(0, 512))
    assert device.step_s(whole, 1) * 1000 == pytest.approx(10 + 51.2 + 1e-5 * 512**2 + 3 + 0.0512)
    halves = [StepShape(256, chunk_products(0, 256)), StepShape(256, chunk_products(256, 256))]
    assert sum(h.prompt_products for h in halves) == whole.prompt_products
    # ten sequences of 100 tokens, the newest included
    assert device.step_s(StepShape(0, 0.0, 10, 1000), 0) * 1000 == pytest.approx(20 + 1 + 0.5 + 2 + 0.099)
    assert device.step_s(StepShape(0, 0.0, 100, 1000), 0) * 1000 == pytest.approx(5 + 1 + 20 + 2 + 0.09)
    mixed = device.step_s(StepShape(512, whole.prompt_products, 10, 1000), 1)
    parts = device.step_s(whole, 1) + device.step_s(StepShape(0, 0.0, 10, 1000), 0)
    assert mixed == pytest.approx(parts - (10 + 2) / 1000)


def test_a_linear_device_is_what_workers_learn():
    cost = StepCost(0.01, 1e-4, 1e-9, 1e-3, 1e-6)
    assert LinearDevice(cost).step_s(StepShape(100, 5000.0, 2, 300), 1) == pytest.approx(
        0.01 + 0.01 + 5e-6 + 0.002 + 3e-4
    )
    assert Overheads(1e-3, 1e-5).host_s(20) == pytest.approx(1.2e-3)


def test_pieces_wait_for_each_other_on_the_wire():
    wire = Wire(LinkSpeed(bytes_per_token=100, bytes_per_s=1e6, latency_s=0.5, num_layers=1))
    assert wire.send(1000, began=1.0, now=1.0) == pytest.approx(1.0 + 0.1 + 0.5)
    assert wire.send(1000, began=1.0, now=1.0) == pytest.approx(1.0 + 0.2 + 0.5)
    assert wire.send(1000, began=9.0, now=9.0) == pytest.approx(9.0 + 0.1 + 0.5)
    assert wire.bytes_sent == 300_000


def test_layers_leave_while_the_step_computes():
    speed = LinkSpeed(bytes_per_token=100, bytes_per_s=1e6, latency_s=0.0, num_layers=10)
    # a step from 0 to 1: the first layer is done at 0.1; a fast wire then only waits for the last layer
    assert Wire(speed).send(1000, began=0.0, now=1.0) == pytest.approx(1.0 + 0.01)
    # a slow wire is busy from the first layer on
    assert Wire(speed).send(20_000, began=0.0, now=1.0) == pytest.approx(0.1 + 2.0)
