"""A capture that works without a GPU: it records the operations of a step and repeats exactly those, on the same tensors.

As with a CUDA graph, Python does not run again, numbers of the host are those of the capture, and nothing is computed while
recording. Other than there, results of a repetition are in new memory, except those that were written in place.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rollbook.inference.engines.embedded.model.capture import HostWaits

Call = tuple[Any, Any, Any, Any]


class RecordingCapture:
    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, operation: Callable[[], None]) -> Callable[[], None]:
        recorder = _Recorder()
        with ExitStack() as stack:
            # As while a stream is captured.
            stack.enter_context(
                mock.patch("transformers.utils.import_utils.is_cuda_stream_capturing", return_value=True)
            )
            stack.enter_context(recorder)
            stack.enter_context(HostWaits())
            operation()
        recorder.undo()

        def replay() -> None:
            self.replays += 1
            recorder.replay()

        return replay


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._calls: list[Call] = []
        self._made: dict[int, Tensor] = {}
        """Tensors of the recorded step. They are kept, so that no other tensor gets their identity."""
        self._storages: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Memory that existed before and was written, and its content then."""
        self._pointers: dict[int, tuple[Tensor, int]] = {}
        """Tensors that a repetition reads or writes, and where they were."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._keep_content(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and id(tensor) not in self._made:
                self._pointers[id(tensor)] = (tensor, tensor.data_ptr())
        given = {id(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) not in given:
                self._made[id(tensor)] = tensor
                if tensor.untyped_storage()._cdata not in known:
                    self._storages.add(tensor.untyped_storage()._cdata)
        self._calls.append((func, args, kwargs, result))
        return result

    def _keep_content(self, func: Any, args: Any, kwargs: Any) -> None:
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self._storages and storage._cdata not in self._before:
                        self._before[storage._cdata] = (storage, storage.clone())  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def undo(self) -> None:
        for storage, content in self._before.values():
            storage.copy_(content)

    def replay(self) -> None:
        for tensor, pointer in self._pointers.values():
            assert tensor.data_ptr() == pointer, f"a tensor {tuple(tensor.shape)} of a captured step has moved"
        made = dict(self._made)
        for func, args, kwargs, recorded in self._calls:

            def now(tensor: Tensor) -> Tensor:
                return made.get(id(tensor), tensor)

            result = func(*tree_map_only(Tensor, now, args), **tree_map_only(Tensor, now, kwargs))
            for old, new in zip(tree_leaves(recorded), tree_leaves(result), strict=True):
                if isinstance(old, Tensor) and id(old) in made:
                    made[id(old)] = new
        self._last = made
