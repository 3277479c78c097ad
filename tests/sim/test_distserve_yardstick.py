"""The yardstick gives what DistServe's simulator gave, to the microsecond."""

import csv
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "distserve"


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


yardstick = load_script("distserve_yardstick")
compare = load_script("compare_distserve")
SYSTEMS = {  # name |-> (whose kernels, disaggregated)
    "disagg_1p1d": ("distserve", True),
    "coloc_2x_samecost": ("distserve", False),
    "coloc_2x_vllmcost": ("vllm", False),
}


def rows(name: str) -> list[dict[str, str]]:
    with (DATA / name).open() as file:
        return list(csv.DictReader(file))


def simulate(system: str, rate: float, count: int, prompt: int, output: int) -> list:
    kernels, disaggregated = SYSTEMS[system]
    data = msgspec.json.decode((DATA / "opt13b_a100.json").read_bytes())
    found = data[kernels]
    cost = yardstick.Coefficients(
        found["prefill"], found["decoding_smallbs"], found["decoding_largebs"], 95, data["max_num_tokens"]
    )
    arrivals = [at / rate for at in compare.unit_arrivals_ms()[:count]]
    return yardstick.Yardstick(cost, disaggregated).run(arrivals, prompt, output)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_request_ends_when_the_original_ends_it(system: str) -> None:
    expected = [row for row in rows("oracle_requests.csv") if row["system"] == system]
    found = simulate(system, 8.0, 200, 512, 64)
    assert len(expected) == 200
    assert [r.first_token for r in found] == pytest.approx([float(r["first_token_ms"]) for r in expected], abs=1e-3)
    assert [r.finish for r in found] == pytest.approx([float(r["finish_ms"]) for r in expected], abs=1e-3)


def test_the_grid_is_that_of_the_original() -> None:
    for row in rows("oracle_grid.csv")[::7]:
        found = simulate(row["system"], float(row["rate"]), int(row["n"]), int(row["prompt"]), int(row["output"]))
        for name, values in (("ttft", [r.ttft for r in found]), ("tpot", [r.tpot for r in found])):
            for percent in (50, 90, 99):
                assert np.percentile(values, percent) == pytest.approx(float(row[f"{name}_p{percent}"]), abs=6e-5)


def test_a_goodput_is_that_of_the_original() -> None:
    expected = rows("oracle_goodput.csv")[0]

    def passes(rate: float) -> bool:
        found = simulate(expected["system"], rate, 500, 512, 64)
        return compare.p90_keep([r.ttft for r in found], [r.tpot for r in found], (200, 100))

    assert (expected["ttft_slo_ms"], expected["tpot_slo_ms"]) == ("200", "100")
    assert compare.goodput(passes) == pytest.approx(float(expected["goodput_rps_total"]), abs=1e-3)
