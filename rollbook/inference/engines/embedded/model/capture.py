"""Captures a decode step, so that the host launches it with one call.

A captured step repeats the same operations on the same addresses; Python does not run again. So a step must not wait for the
device: what the host decides from a number of the device would be decided once, at the capture. `HostWaits` finds such operations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Operation = Callable[[], None]
Capture = Callable[[Operation], Operation]
"""Returns a function that repeats the operation, faster. May be the identity."""

aten = torch.ops.aten
WAITING = frozenset(
    (
        aten._local_scalar_dense,
        aten.nonzero,
        aten.masked_select,
        aten._unique2,
        aten.unique_dim,
        aten.unique_consecutive,
        aten.bincount,
        aten.equal,
        aten.is_nonzero,
    )
)
"""Operations whose result, or its size, the host reads from the device."""
INDEXING = frozenset((aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_))
COPYING = frozenset((aten._to_copy, aten.copy_))


class HostWaitError(RuntimeError):
    """The operation makes the host wait for the device."""


class CudaCapture:
    """Captures into one memory pool: graphs are replayed one after the other, never concurrently."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, operation: Operation) -> Operation:
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may stage weights at the same time, which must not break the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            operation()
        replay: Operation = graph.replay
        return replay


class HostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Within the context, raises `HostWaitError` for an operation that no graph can contain. Works on every device; copies between
    host and device are found on a GPU only. Not found: what reads the memory of a tensor in main memory without an operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in WAITING or _has_mask_index(packet, args) or _has_open_size(func, kwargs):
            raise HostWaitError(f"{func} makes the host wait for the device")
        with self:
            # In inference mode, operations that consist of others arrive whole.
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        if packet in COPYING and {"cpu", "cuda"} <= {t.device.type for t in (args[0], *args[1:2], result) if _is(t)}:
            raise HostWaitError(f"{func} copies between main memory and the device")
        return result


def _is(value: Any) -> bool:
    return isinstance(value, Tensor)


def _has_mask_index(packet: Any, args: tuple[Any, ...]) -> bool:
    """An index by a mask counts its elements first, unless a single number is written."""
    if packet not in INDEXING:
        return False
    if packet is not aten.index and _is(args[2]) and args[2].numel() == 1:
        return False
    return any(_is(index) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _has_open_size(func: Any, kwargs: dict[str, Any]) -> bool:
    return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
