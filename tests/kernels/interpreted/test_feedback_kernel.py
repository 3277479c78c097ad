"""resolve_feedback equals its definition and touches nothing else; so does the CPU's."""

import pytest
import torch

from baton.kernels import reference
from baton.kernels.cpu.feedback import resolve_feedback as on_cpu
from baton.kernels.gpu.feedback import resolve_feedback

FEEDBACK = torch.tensor([11, -1, 33, 44])


@pytest.mark.parametrize("slots", [[], [2], [-1, 3, 1, 0, -1], [3, -1] * 150])
@pytest.mark.parametrize("resolve", [resolve_feedback, on_cpu])
def test_equals_the_definition(resolve, slots: list[int]) -> None:
    ids = torch.arange(100, 100 + len(slots) + 3)
    expected, feedback = ids.clone(), FEEDBACK.clone()
    reference.resolve_feedback(expected, torch.tensor(slots, dtype=torch.int64), FEEDBACK)
    resolve(ids, torch.tensor(slots, dtype=torch.int64), feedback)
    assert ids.tolist() == expected.tolist()
    assert torch.equal(feedback, FEEDBACK)


def test_by_hand() -> None:
    ids = torch.tensor([5, 6, 7, 8])
    resolve_feedback(ids, torch.tensor([2, -1, 1]), FEEDBACK)
    assert ids.tolist() == [33, 6, 0, 8]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="feedback_slots has 3 rows, input_ids only 2"):
        resolve_feedback(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), FEEDBACK)
    with pytest.raises(ValueError, match=r"feedback is torch\.int32"):
        resolve_feedback(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), FEEDBACK.int())
