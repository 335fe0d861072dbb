"""An operation whose values come from our kernels and whose gradient comes from torch.

The values must equal those of the sampler to the bit; the gradient only has to be that of the same function, so torch computes it
from the inputs, with its own kernels. That costs one more forward of the operation and keeps nothing but its inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

Operation = Callable[..., Tensor]


class _TorchGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Operation, plain: Operation, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.plain = plain
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        inputs = [t.detach().requires_grad_(is_needed) for t, is_needed in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            value = ctx.plain(*inputs)
        with _one_order():
            found = iter(torch.autograd.grad(value, [t for t in inputs if t.requires_grad], gradient))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


@contextmanager
def _one_order() -> Iterator[None]:
    """Gradients of attention are summed in a fixed order: a replay must compute the same bits."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    was_filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = was_filled


def with_torch_gradient(exact: Operation, plain: Operation, *inputs: Tensor) -> Tensor:
    """`exact(*inputs)`, with the gradient of `plain(*inputs)`."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return exact(*inputs)
    value: Tensor = _TorchGradient.apply(exact, plain, *inputs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return value
