"""The weights a model samples from: checked, staged and replaced in place, and read back.

Replacing is a copy into the very memory the forwards read, between two of them: addresses never change. On a GPU the new weights
are brought over beforehand, on a stream of their own, so that what happens between two forwards is a copy inside the device.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rollbook.contracts.weights import RawTensor
from rollbook.inference.engine import TensorSource, WeightsError
from rollbook.inference.tensors import is_raw
from rollbook.inference.weight_file import FileTensor

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
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

LoadPlan = tuple[list[Tensor], list[Tensor]]
"""From and to, all checked, of equal shapes."""


class LiveWeights:
    """Made once the model is in its final memory; `plan` may be called from any thread, `apply` from the engine's only."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._targets = dict(model.state_dict())
        self._device = device
        self._staging = _stream(device) if device.type == "cuda" else None

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
        sources = [_as_torch(name, tensor, self._targets[name]) for name, tensor in tensors.items()]
        targets = [self._targets[name] for name in tensors]
        if self._staging is not None:
            with torch.cuda.stream(self._staging), torch.inference_mode():
                sources = [
                    source.to(device=self._device, non_blocking=True).to(target.dtype)
                    for source, target in zip(sources, targets, strict=True)
                ]
            self._staging.synchronize()
        return sources, targets

    def apply(self, plan: LoadPlan) -> None:
        sources, targets = plan
        with torch.inference_mode():
            if self._staging is not None:
                torch._foreach_copy_(targets, sources)
                for source in sources:
                    # Allocated on the staging stream: its memory may be used again only after this copy.
                    source.record_stream(torch.cuda.current_stream(self._device))
                return
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

    def snapshot(self) -> list[RawTensor]:
        """The live weights as host bytes, under the names a publication gives them: tied ones once."""
        seen: set[int] = set()
        taken: list[RawTensor] = []
        for name, target in self._targets.items():
            if target.data_ptr() in seen:
                continue
            seen.add(target.data_ptr())
            host = target.detach().to("cpu", copy=True).contiguous()
            data = memoryview(host.reshape(-1).view(torch.uint8).numpy())
            shape = tuple(target.shape)
            taken.append(FileTensor(name=name, dtype=SAFETENSORS_DTYPES[target.dtype], shape=shape, data=data))
        return taken


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _as_torch(name: str, tensor: TensorSource, target: Tensor) -> Tensor:
    if not is_raw(tensor):
        if not isinstance(tensor, Tensor):
            raise WeightsError(f"tensor {name} is a {type(tensor).__name__}, not one of torch's; nothing was loaded")
        if tensor.shape != target.shape:
            raise WeightsError(
                f"tensor {name} has shape {tuple(tensor.shape)}, the model's is {tuple(target.shape)}; nothing was loaded"
            )
        return tensor
    dtype = TORCH_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise WeightsError(f"tensor {name} has dtype {tensor.dtype}, which is not supported; nothing was loaded")
    if tensor.shape != tuple(target.shape):
        raise WeightsError(
            f"tensor {name} has shape {tensor.shape}, the model's is {tuple(target.shape)}; nothing was loaded"
        )
    count = target.numel()
    if len(tensor.data) != count * dtype.itemsize:
        raise WeightsError(f"tensor {name} has {len(tensor.data)} bytes for {count} numbers; nothing was loaded")
    if not count:
        return torch.empty(tensor.shape, dtype=dtype)
    # A private copy: the mapped file is read-only and may go away. For a GPU in memory it can fetch from directly.
    host = torch.empty(tensor.shape, dtype=dtype, pin_memory=target.device.type == "cuda")
    host.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(tensor.data, dtype=np.uint8)
    return host


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
