"""A device with little memory: passes above a number of tokens fail as on a full GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rollbook.trainer.data.minibatches import Microbatch
from rollbook.trainer.model.policy_model import PolicyModel


@contextmanager
def small_device(
    max_tokens: int, *, fits_first: int = 0, before_pass: Callable[[Microbatch], None] = lambda micro: None
) -> Iterator[list[int]]:
    """Passes of more than `max_tokens` tokens run out of memory, after `fits_first` that fit. Yields the sizes of all passes.

    `before_pass` is called before each pass that fits.
    """
    sizes: list[int] = []
    compute = PolicyModel.token_logprobs

    def token_logprobs(model: PolicyModel, micro: Microbatch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(micro.inputs_BT.size)
        if micro.inputs_BT.size > max_tokens and len(sizes) > fits_first:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {micro.inputs_BT.size}.00 MiB")
        before_pass(micro)
        return compute(model, micro, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyModel, "token_logprobs", token_logprobs)
        yield sizes
