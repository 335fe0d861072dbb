"""The weights a model samples from: checked, staged and replaced in place, and read back.

Replacing is a copy into the very memory the forwards read, between two of them: addresses never change. On a GPU the new weights
are brought over beforehand, on a stream of their own, so that what happens between two forwards is a copy inside the device.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rollbook.contracts.adapter import Adapter
from rollbook.contracts.weights import RawTensor, weights_digest
from rollbook.inference.engine import TensorSource, WeightsError
from rollbook.inference.engines.embedded.adapter_merge import Beside
from rollbook.inference.weights.lora import checked_settings, low_rank_pairs
from rollbook.inference.weights.safetensors import FileTensor, is_raw
from rollbook.inference.weights.transports.packing import headers_of, layout, unpack_views

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
WARM_RANK = 16
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """From and to, all checked, of equal shapes; and what is true of the weights once they are there."""

    sources: list[Tensor]
    targets: list[Tensor]
    beside: Beside | None = None
    """The adapter that is then live, with what it stands beside. None: the weights are whole by themselves."""
    is_new_base: bool = False


class LiveWeights:
    """Made once the model is in its final memory; `plan` may be called from any thread, `apply` from the engine's only."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._targets = dict(model.state_dict())
        self._turned = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, Conv1D)}
        self._device = device
        self._staging = _stream(device) if device.type == "cuda" else None
        self._beside: Beside | None = None
        self._base_digest: str | None = None
        self._pinned: Tensor | None = None
        self._applied: torch.cuda.Event | None = None

    @property
    def adapter(self) -> Adapter | None:
        """The one that is live."""
        return None if self._beside is None else self._beside.adapter

    @property
    def num_parameters(self) -> int:
        return sum({target.data_ptr(): target.numel() for target in self._targets.values()}.values())

    @property
    def num_bytes(self) -> int:
        distinct = {target.data_ptr(): target for target in self._targets.values()}
        return sum(target.numel() * target.element_size() for target in distinct.values())

    def plan(self, tensors: Mapping[str, TensorSource]) -> LoadPlan:
        """Tied weights may be named once or by each of their names. On a GPU, everything is over there when this returns."""
        unknown = sorted(set(tensors) - set(self._targets))
        if unknown:
            raise WeightsError(f"weights name tensors this model does not have: {_some(unknown)}; nothing was loaded")
        covered = {self._targets[name].data_ptr() for name in tensors}
        missing = sorted(name for name, target in self._targets.items() if target.data_ptr() not in covered)
        if missing:
            raise WeightsError(f"weights lack tensors this model has: {_some(missing)}; nothing was loaded")
        sources = [self._as_torch(name, tensor, self._targets[name].shape) for name, tensor in tensors.items()]
        targets = [self._targets[name] for name in tensors]
        if self._staging is not None:
            with self._staged():
                sources = [
                    source.to(device=self._device, non_blocking=True).to(target.dtype)
                    for source, target in zip(sources, targets, strict=True)
                ]
        return LoadPlan(sources=sources, targets=targets, is_new_base=True)

    def plan_adapter(self, adapter: Adapter, tensors: Mapping[str, TensorSource]) -> LoadPlan:
        """Every adapted matrix becomes base + scale x B A; one that only the adapter before had goes back to its base.

        The base of adapted matrices is kept beside the live ones, so that an adapter is never taken off by subtracting.
        """
        pairs = low_rank_pairs(checked_settings(adapter.settings), tensors)
        self._require_targets([pair.target for pair in pairs])
        self._require_base(adapter)
        kept = {} if self._beside is None else self._beside.base
        halves: dict[str, Tensor] = {}
        for pair in pairs:
            out, into = self._targets[pair.target].shape[:: -1 if pair.target in self._turned else 1]
            halves[pair.a] = _as_torch(pair.a, tensors[pair.a], torch.Size((pair.rank, into)), is_pinned=False)
            halves[pair.b] = _as_torch(pair.b, tensors[pair.b], torch.Size((out, pair.rank)), is_pinned=False)
        with self._staged():
            held = self._held(halves)
            base = {
                pair.target: kept[pair.target] if pair.target in kept else self._targets[pair.target].clone()
                for pair in pairs
            }
            beside = Beside(adapter=adapter, pairs=pairs, halves=held, base=base, turned=self._turned)
            # By groups on a GPU: there a few large products disturb the steps beside them less than many small ones.
            changed = beside.merged_by_groups() if self._staging is not None else beside.merged_one_by_one()
        restored = {name: tensor for name, tensor in kept.items() if name not in changed}
        sources = {**restored, **changed}
        return LoadPlan(
            sources=list(sources.values()), targets=[self._targets[name] for name in sources], beside=beside
        )

    def _held(self, halves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """On the device, in memory of our own: what was given may be a view into the trainer's. From the host in one piece."""
        if self._staging is None or any(half.is_cuda for half in halves.values()):
            return {name: half.to(device=self._device, copy=True) for name, half in halves.items()}
        headers = headers_of(halves)
        ranges, size = layout(headers)
        if self._pinned is None or self._pinned.numel() < size:
            self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for part, half in zip(ranges, halves.values(), strict=True):
            self._pinned[part.start : part.end].copy_(half.reshape(-1).view(torch.uint8))
        return unpack_views(self._pinned[:size].to(self._device, non_blocking=True), headers)

    def warm_up_adapters(self) -> None:
        """On a GPU: load the kernels of the products ahead, in the thread that will ask for them. Loading holds up every stream."""
        if self._staging is None:
            return
        with self._staged():
            for shape, dtype in {(tuple(t.shape), t.dtype) for t in self._targets.values() if t.ndim == 2}:
                b = torch.zeros(2, shape[0], WARM_RANK, device=self._device)
                a = torch.zeros(2, WARM_RANK, shape[1], device=self._device)
                torch.bmm(b, a).mul_(2.0).to(dtype)

    def plan_base(self) -> LoadPlan:
        """Take the adapter off: its matrices go back to their base."""
        kept = {} if self._beside is None else self._beside.base
        return LoadPlan(sources=list(kept.values()), targets=[self._targets[name] for name in kept])

    def apply(self, plan: LoadPlan) -> None:
        sources, targets = plan.sources, plan.targets
        if plan.is_new_base:
            self._base_digest = None
        self._beside = plan.beside
        with torch.inference_mode():
            if self._staging is not None:
                torch._foreach_copy_(targets, sources)
                for source in sources:
                    # Allocated on the staging stream: its memory may be used again only after this copy.
                    source.record_stream(torch.cuda.current_stream(self._device))
                self._applied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                self._applied.record()
                return
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

    def snapshot(self) -> list[RawTensor]:
        """The live weights as host bytes, under the names a publication gives them: tied ones once. In the engine's thread."""
        return self._snapshot(self._targets)

    def adapter_snapshot(self) -> list[RawTensor] | None:
        """The live adapter as host bytes; None where there is none, or where the live matrices are not what it makes of its base.

        In any thread while nothing replaces the weights: steps only read them, and go on.
        """
        beside = self._beside
        if beside is None:
            return None
        with self._staged():
            if not beside.is_live_in(self._targets, by_groups=self._staging is not None):
                return None
            return [_host_bytes(name, half) for name, half in beside.halves.items()]

    def base_digest(self) -> str:
        """Of the weights without any adapter. Read while nothing replaces them; steps may go on."""
        if self._base_digest is None:
            kept = {} if self._beside is None else self._beside.base
            with self._staged():
                taken = self._snapshot({**self._targets, **kept})
            self._base_digest = weights_digest(taken)
        return self._base_digest

    def _snapshot(self, weights: Mapping[str, Tensor]) -> list[RawTensor]:
        """Tied ones once."""
        seen: set[int] = set()
        taken: list[RawTensor] = []
        for name, target in self._targets.items():
            if target.data_ptr() not in seen:
                seen.add(target.data_ptr())
                taken.append(_host_bytes(name, weights[name]))
        return taken

    def _require_targets(self, names: Sequence[str]) -> None:
        unknown = sorted(name for name in names if name not in self._targets)
        if unknown:
            raise WeightsError(f"the adapter is for matrices this model does not have: {_some(unknown)}")
        flat = [name for name in names if self._targets[name].ndim != 2]
        if flat:
            raise WeightsError(f"the adapter is for tensors that are no matrices: {_some(flat)}; nothing was loaded")
        tenants = Counter(target.data_ptr() for target in self._targets.values())
        tied = [name for name in names if tenants[self._targets[name].data_ptr()] > 1]
        if tied:
            raise WeightsError(
                f"the adapter changes {_some(tied)}, which shares its memory with another matrix of this model: both would change; "
                "nothing was loaded"
            )

    def _require_base(self, adapter: Adapter) -> None:
        """Digests are of float32; an engine of another dtype has other bytes and cannot compare."""
        if adapter.base_digest is None or any(t.dtype is not torch.float32 for t in self._targets.values()):
            return
        if (digest := self.base_digest()) != adapter.base_digest:
            raise WeightsError(
                f"adapter {adapter.name} was trained beside weights with digest {adapter.base_digest}, and this engine's base has "
                f"{digest}; serve the same model, or publish whole weights (inference.publish = 'full')"
            )

    @contextmanager
    def _staged(self) -> Iterator[None]:
        """On a GPU: on the staging stream, after what was applied before, and done when the block is left."""
        if self._staging is None:
            with torch.inference_mode():
                yield
            return
        if self._applied is not None:
            self._staging.wait_event(self._applied)
        with torch.cuda.stream(self._staging), torch.inference_mode():
            yield
        self._staging.synchronize()

    def _as_torch(self, name: str, tensor: TensorSource, shape: torch.Size) -> Tensor:
        return _as_torch(name, tensor, shape, is_pinned=self._device.type == "cuda")


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _host_bytes(name: str, tensor: Tensor) -> FileTensor:
    host = tensor.detach().to("cpu", copy=True).contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().data
    return FileTensor(name=name, dtype=SAFETENSORS_DTYPES[tensor.dtype], shape=tuple(tensor.shape), data=data)


def _as_torch(name: str, tensor: TensorSource, shape: torch.Size, *, is_pinned: bool) -> Tensor:
    if not is_raw(tensor):
        if not isinstance(tensor, Tensor):
            raise WeightsError(f"tensor {name} is a {type(tensor).__name__}, not one of torch's; nothing was loaded")
        if tensor.shape != shape:
            raise WeightsError(
                f"tensor {name} has shape {tuple(tensor.shape)}, the model's is {tuple(shape)}; nothing was loaded"
            )
        return tensor
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise WeightsError(f"tensor {name} has dtype {tensor.dtype}, which is not supported; nothing was loaded")
    if tensor.shape != tuple(shape):
        raise WeightsError(f"tensor {name} has shape {tensor.shape}, the model's is {tuple(shape)}; nothing was loaded")
    count = shape.numel()
    if len(tensor.data) != count * dtype.itemsize:
        raise WeightsError(f"tensor {name} has {len(tensor.data)} bytes for {count} numbers; nothing was loaded")
    if not count:
        return torch.empty(tensor.shape, dtype=dtype)
    # A private copy: the mapped file is read-only and may go away. For a GPU in memory it can fetch from directly.
    host = torch.empty(tensor.shape, dtype=dtype, pin_memory=is_pinned)
    host.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(tensor.data, dtype=np.uint8)
    return host


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
