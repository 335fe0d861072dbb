"""A user's own loss: its errors stop the run and name its line."""

from pathlib import Path

import pytest
import torch

from rollbook.contracts.errors import RunError
from rollbook.contracts.plugin import extend_search_path
from rollbook.trainer.losses.inputs import LossInputs, LossSettings
from rollbook.trainer.losses.registry import loss_named

CODE = """
from rollbook import LossTerms


def right(inputs, settings):
    return LossTerms(loss_N=-inputs.current_N, is_clipped_N=inputs.current_N > 0)


def raises(inputs, settings):
    return inputs.log_probs


def scalar(inputs, settings):
    return LossTerms(loss_N=inputs.current_N.mean(), is_clipped_N=inputs.current_N > 0)


def tensor(inputs, settings):
    return -inputs.current_N
"""


@pytest.fixture
def inputs(tmp_path: Path) -> LossInputs:
    (tmp_path / "own_losses.py").write_text(CODE)
    extend_search_path([tmp_path])
    values = torch.zeros(3)
    return LossInputs(
        current_N=values,
        old_N=values,
        sampled_N=values,
        advantages_N=values,
        row_of_N=torch.zeros(3, dtype=torch.long),
        num_rows=1,
    )


def test_a_loss_of_the_right_shape_is_used_as_it_is(inputs: LossInputs) -> None:
    assert loss_named("own_losses:right")(inputs, LossSettings()).loss_N.shape == (3,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"(?s)raised AttributeError: .*log_probs.*own_losses\.py\", line \d+, in raises"),
        ("scalar", r"returned loss_N of shape \(\); it must be \(3,\)"),
        ("tensor", r"returned a Tensor; it must return LossTerms"),
    ],
)
def test_a_broken_loss_stops_the_run_with_the_cause(inputs: LossInputs, name: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        loss_named(f"own_losses:{name}")(inputs, LossSettings())
