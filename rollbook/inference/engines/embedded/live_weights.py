"""The weights in use: checks, stages and replaces them in place, and reads them back.

New weights are copied into the memory that the forwards read, between two of them, so addresses never change. On a GPU they are
transferred before that on a separate stream, so that only a copy within the device happens between two forwards. An adapter changes
its own buffers only (`adapters.py`); the base stays as it is.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from rollbook.contracts.errors import is_out_of_memory
from rollbook.contracts.weights import Adapter, RawTensor, TensorSource, WeightsError
from rollbook.inference.engines.embedded.adapters import POLICY, AdapterBank, Factors, LoadedAdapter
from rollbook.inference.weights.lora import checked_settings, low_rank_pairs
from rollbook.inference.weights.safetensors import FileTensor, is_raw
from rollbook.shared_weights.base import SharedBase
from rollbook.shared_weights.packing import DTYPES, NAMES, layout, tensors_digest, unpack_views

log = logging.getLogger(__name__)

WINDOW_BYTES = 16 << 20
"""Size of each of the two windows of pinned memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A checked update: pairs of source and target of equal shapes, and the adapter that is live afterwards."""

    sources: list[Tensor]
    targets: list[Tensor]
    is_new_base: bool = False
    """New weights remove all adapters."""
    slot: int = POLICY
    loaded: LoadedAdapter | None = None
    """The adapter in `slot` afterwards."""
    grown: Mapping[str, Factors] | None = None
    is_staged: bool = True
    """Whether the sources are on the device, with the dtypes of their targets."""
    is_comparable: bool = False
    """Whether the digest of the live weights is then the published one: they have the dtype of the published tensors."""


class LiveWeights:
    """`plan` may be called from any thread, `apply` only from the engine's thread."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        adapters: AdapterBank | None = None,
        *,
        base: SharedBase | None = None,
        on_new_base: Callable[[], None] = lambda: None,
    ) -> None:
        """`base`: holds the weights of the model, which other processes read too. Then only adapters are replaced. `on_new_base`:
        called after weights were replaced, before the next forward."""
        self._matrices = dict(model.state_dict())
        """By the names in the module."""
        self._targets = checkpoint_views(model)
        """By the names of published weights."""
        self._adapters = AdapterBank(model) if adapters is None else adapters
        self._on_new_base = on_new_base
        self._device = device
        self._staging = _stream(device) if device.type == "cuda" else None
        self.is_comparable = False
        """The value in the last applied plan."""
        self._is_shared = base is not None
        self._base_digest = None if base is None else base.digest
        self._upload = Upload(device) if device.type == "cuda" else None
        self._applied: torch.cuda.Event | None = None

    @property
    def adapter(self) -> Adapter | None:
        """The published one."""
        loaded = self._adapters.adapter(POLICY)
        return None if loaded is None else loaded.adapter

    @property
    def num_parameters(self) -> int:
        return sum({target.data_ptr(): target.numel() for target in self._targets.values()}.values())

    @property
    def num_bytes(self) -> int:
        distinct = {target.data_ptr(): target for target in self._targets.values()}
        return sum(target.numel() * target.element_size() for target in distinct.values())

    def plan(self, tensors: Mapping[str, TensorSource]) -> LoadPlan:
        """Tied weights may be named once or by each of their names. On a GPU, the transfer is complete when this returns."""
        if self._is_shared:
            raise WeightsError(
                "this engine shares the memory of its base with the trainer (resources.shared_base): it loads adapters only; "
                "nothing was loaded"
            )
        unknown = sorted(set(tensors) - set(self._targets))
        if unknown:
            raise WeightsError(
                f"the weights have tensors that this model does not have: {_some(unknown)}; nothing was loaded"
            )
        covered = {self._targets[name].data_ptr() for name in tensors}
        missing = sorted(name for name, target in self._targets.items() if target.data_ptr() not in covered)
        if missing:
            raise WeightsError(f"the weights lack tensors of this model: {_some(missing)}; nothing was loaded")
        for name, tensor in tensors.items():
            _require_shape(name, tensor, self._targets[name].shape)
        targets = [self._targets[name] for name in tensors]
        is_staged = False
        if self._upload is None:
            sources = placed = [_host_tensor(tensor) for tensor in tensors.values()]
        else:
            try:
                with self._staged():
                    uploaded = self._upload([tensor for tensor in tensors.values() if is_raw(tensor)])
                    placed = [uploaded[n] if n in uploaded else _host_tensor(tensor) for n, tensor in tensors.items()]
                    sources = [s.to(device=self._device, dtype=t.dtype) for s, t in zip(placed, targets, strict=True)]
                is_staged = True
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                # Without a second copy on the device: decoding waits while the tensors are transferred one by one.
                uploaded = {}
                sources = placed = [_host_tensor(tensor) for tensor in tensors.values()]
                log.warning(
                    "the device has no memory for a second copy of the weights: the update is applied in pieces, and decoding "
                    "waits for it. Lower inference.kv_memory_mb to avoid that"
                )
        is_comparable = all(p.dtype is t.dtype for p, t in zip(placed, targets, strict=True))
        return LoadPlan(
            sources=sources, targets=targets, is_new_base=True, is_comparable=is_comparable, is_staged=is_staged
        )

    def plan_adapter(self, adapter: Adapter, tensors: Mapping[str, TensorSource], *, slot: int = POLICY) -> LoadPlan:
        """The adapter replaces the one in `slot`. Nothing else changes."""
        pairs = low_rank_pairs(checked_settings(adapter.settings), tensors)
        self._require_layers([pair.target for pair in pairs])
        self._require_base(adapter)
        factors: dict[str, Tensor] = {}
        for pair in pairs:
            columns, rows = self._adapters.sizes(pair.target)
            _require_shape(pair.a, tensors[pair.a], torch.Size((pair.rank, columns)))
            _require_shape(pair.b, tensors[pair.b], torch.Size((rows, pair.rank)))
            factors |= {name: _host_tensor(tensors[name]) for name in (pair.a, pair.b)}
        with self._staged():
            loaded = LoadedAdapter(adapter=adapter, pairs=pairs, factors=self._copied_to_device(factors))
            grown = self._adapters.grown(slot, loaded)
            sources, targets = self._adapters.changes(slot, loaded, grown)
        is_comparable = self.is_comparable or slot == POLICY
        return LoadPlan(
            sources=sources, targets=targets, slot=slot, loaded=loaded, grown=grown, is_comparable=is_comparable
        )

    def plan_removal(self, slot: int) -> LoadPlan:
        """Remove the adapter in a slot."""
        with self._staged():
            sources, targets = self._adapters.changes(slot, None)
        return LoadPlan(sources=sources, targets=targets, slot=slot, is_comparable=self.is_comparable)

    def _copied_to_device(self, factors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A copy, because the tensors may be views into the trainer's memory. From the host as one block."""
        if self._upload is None or any(factor.is_cuda for factor in factors.values()):
            return {name: factor.to(device=self._device, copy=True) for name, factor in factors.items()}
        return self._upload([_host_bytes(name, factor) for name, factor in factors.items()])

    def apply(self, plan: LoadPlan) -> None:
        sources, targets = plan.sources, plan.targets
        if plan.is_new_base:
            self._base_digest = None
        self.is_comparable = plan.is_comparable
        with torch.inference_mode():
            if plan.is_new_base:
                self._adapters.forget()
            else:
                self._adapters.replaced(plan.slot, plan.loaded, plan.grown)
            is_copied_on_device = self._staging is not None and bool(targets) and plan.is_staged
            if is_copied_on_device:
                torch._foreach_copy_(targets, sources)
                # Allocated on the staging stream: its memory may be reused only after this copy. Most are views of one block.
                blocks = {source.untyped_storage().data_ptr(): source for source in sources}
                for source in blocks.values():
                    source.record_stream(torch.cuda.current_stream(self._device))
            else:
                for source, target in zip(sources, targets, strict=True):
                    target.copy_(source)
            if plan.is_new_base:
                self._on_new_base()
            if is_copied_on_device:
                self._applied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                self._applied.record()
            elif self._staging is not None:
                torch.cuda.current_stream(self._device).synchronize()

    def digest(self) -> str:
        """Digest of the published adapter, or without one of all weights. If the buffers that forwards read do not hold exactly the
        adapter, the digest of the buffers.

        Call in any thread while nothing replaces the weights. Steps may run, because they only read.
        """
        loaded = self._adapters.adapter(POLICY)
        with self._staged():
            if loaded is None:
                return self._digest_of_base()
            is_exact = self._adapters.is_in_use(POLICY)
            return tensors_digest(dict(loaded.factors) if is_exact else dict(self._adapters.in_use(POLICY)))

    def base_digest(self) -> str:
        """Digest of the weights without an adapter. Call while nothing replaces them; steps may run."""
        if self._base_digest is None:
            with self._staged():
                self._base_digest = self._digest_of_base()
        return self._base_digest

    def _digest_of_base(self) -> str:
        """Under the published names, tied weights once."""
        named = {target.data_ptr(): name for name, target in reversed(self._targets.items())}
        return tensors_digest({name: self._targets[name] for name in named.values()})

    def _require_layers(self, names: Sequence[str]) -> None:
        unknown = sorted(name for name in names if name not in self._matrices)
        if unknown:
            raise WeightsError(f"the adapter changes matrices that this model does not have: {_some(unknown)}")
        others = [name for name in names if not self._adapters.is_layer(name)]
        if others:
            raise WeightsError(
                f"the adapter changes {_some(others)}, which belong to no linear layer; nothing was loaded. Publish merged weights "
                "(inference.publish = 'full')"
            )

    def _require_base(self, adapter: Adapter) -> None:
        """An engine with another dtype than the trainer's base has other bytes and cannot compare."""
        if adapter.base_digest is None or {NAMES[t.dtype] for t in self._targets.values()} != {adapter.base_dtype}:
            return
        if (digest := self.base_digest()) != adapter.base_digest:
            raise WeightsError(
                f"adapter {adapter.name} was trained on weights with digest {adapter.base_digest}, but this engine's base has "
                f"{digest}; serve the same model, or publish whole weights (inference.publish = 'full')"
            )

    @contextmanager
    def _staged(self) -> Iterator[None]:
        """On a GPU, run the block on the staging stream, after the last applied update, and wait for its completion."""
        if self._staging is None:
            with torch.inference_mode():
                yield
            return
        if self._applied is not None:
            self._staging.wait_event(self._applied)
        with torch.cuda.stream(self._staging), torch.inference_mode():
            yield
        self._staging.synchronize()


class _NoCopies(TorchFunctionMode):
    """transformers makes each part of a split tensor contiguous, which would copy it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def checkpoint_views(model: Any) -> dict[str, Tensor]:
    """The weights under the names and shapes of the checkpoint's files, as views into those of the module.

    transformers keeps some weights in another form than their files, such as all experts of a layer in one tensor. Where a weight
    of the files is not a view, such as a sum, all weights have their names in the module.
    """
    state = dict(model.state_dict())
    with _NoCopies():
        converted: dict[str, Tensor] = revert_weight_conversion(model, state)
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    is_view = all(tensor.untyped_storage().data_ptr() in storages for tensor in converted.values())
    covered = sum(tensor.numel() for tensor in converted.values()) == sum(tensor.numel() for tensor in state.values())
    # In the order of the module, because tied weights are published under their first name.
    return {name: converted[name] for name in state if name in converted} | converted if is_view and covered else state


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _host_bytes(name: str, tensor: Tensor) -> FileTensor:
    host = tensor.detach().to("cpu", copy=True).contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().data
    return FileTensor(name=name, dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape), data=data)


def _require_shape(name: str, tensor: TensorSource, shape: torch.Size) -> None:
    if not is_raw(tensor):
        if not isinstance(tensor, Tensor):
            raise WeightsError(f"tensor {name} is a {type(tensor).__name__}, not a torch tensor; nothing was loaded")
        if tensor.shape != shape:
            raise WeightsError(
                f"tensor {name} has shape {tuple(tensor.shape)}, the model's is {tuple(shape)}; nothing was loaded"
            )
        return
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise WeightsError(f"tensor {name} has dtype {tensor.dtype}, which is not supported; nothing was loaded")
    if tensor.shape != tuple(shape):
        raise WeightsError(f"tensor {name} has shape {tensor.shape}, the model's is {tuple(shape)}; nothing was loaded")
    count = shape.numel()
    if len(tensor.data) != count * dtype.itemsize:
        raise WeightsError(f"tensor {name} has {len(tensor.data)} bytes for {count} numbers; nothing was loaded")


def _host_tensor(tensor: TensorSource) -> Tensor:
    """A copy of raw bytes, because a mapped file is read-only and may be removed. Tensors are returned as they are."""
    if isinstance(tensor, Tensor):
        return tensor
    if not is_raw(tensor):
        raise TypeError(f"a {type(tensor).__name__} is neither bytes nor a torch tensor")
    host = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    if host.numel():
        host.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(tensor.data, dtype=np.uint8)
    return host


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class Upload:
    """Copies tensors from main memory to a GPU while other threads launch work there.

    Allocations of pinned memory, and of many blocks of GPU memory, would stop those launches. So the tensors become one block, and
    their bytes pass through two windows of pinned memory: one is filled while the other is transferred. On another device it does
    the same without pinned memory.
    """

    def __init__(self, device: torch.device, *, window_bytes: int = WINDOW_BYTES) -> None:
        self._device = device
        self._window_bytes = window_bytes
        is_gpu = device.type == "cuda"
        self._windows = [torch.empty(window_bytes, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2)]
        self._transferred = [torch.cuda.Event() for _ in self._windows] if is_gpu else []  # type: ignore[no-untyped-call]

    def __call__(self, tensors: Sequence[RawTensor]) -> dict[str, Tensor]:
        """The tensors on the device, by name. Complete when the current stream is."""
        headers = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        ranges, size = layout(headers)
        bodies = [np.frombuffer(tensor.data or b"", dtype=np.uint8) for tensor in tensors]
        block = torch.empty(size, dtype=torch.uint8, device=self._device)
        first = 0
        for number, start in enumerate(range(0, size, self._window_bytes)):
            end = min(start + self._window_bytes, size)
            window = self._windows[number % 2]
            if self._transferred and number >= 2:
                self._transferred[number % 2].synchronize()
            filled = window.numpy()
            while first < len(ranges) and ranges[first].end <= start:
                first += 1
            for part, body in zip(ranges[first:], bodies[first:], strict=True):
                if part.start >= end:
                    break
                begin, stop = max(part.start, start), min(part.end, end)
                filled[begin - start : stop - start] = body[begin - part.start : stop - part.start]
            block[start:end].copy_(window[: end - start], non_blocking=True)
            if self._transferred:
                self._transferred[number % 2].record()
        return unpack_views(block, headers)
