"""A Hugging Face causal language model as the engine needs it: prefill, decode, and weights loaded in place.

Prompts are padded on the right: under causal attention a real token never sees padding, so no mask is needed and the fastest
attention kernel applies. Only the last real position of each row passes through the output head.
"""

# N rows, T padded length, V vocabulary, E hidden size

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from rollbook.contracts.errors import RunError
from rollbook.contracts.weights import RawTensor
from rollbook.inference.engine import TensorSource, WeightsError
from rollbook.inference.engines.slot_cache import PrefillCache, SlotCache
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


class CausalLM:
    """Not thread-safe: one engine thread owns it."""

    def __init__(self, model: nn.Module, *, max_model_len: int) -> None:
        self._model = model.eval().requires_grad_(False)
        config: Any = model.config
        self.vocab_size: int = config.vocab_size
        self.num_layers: int = config.num_hidden_layers
        self.max_model_len = max_model_len
        self.device = next(model.parameters()).device
        self._targets = dict(model.state_dict())
        self._last_N: Tensor | None = None
        head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]  # every causal LM has it
        head.register_forward_pre_hook(self._keep_last_positions)

    @classmethod
    def load(cls, directory: Path, *, device: str, dtype: str, max_model_len: int | None) -> "CausalLM":
        """Config and weights of a Hugging Face directory; nothing is fetched."""
        try:
            logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"no causal language model could be loaded from {directory}: {error}") from error
        built_for = int(getattr(model.config, "max_position_embeddings", 0) or 0)
        length = max_model_len or built_for
        if length < 2 or (built_for and length > built_for):
            raise RunError(
                f"max_model_len {max_model_len} does not suit the model in {directory}, which was built for {built_for} positions"
            )
        _require_full_attention(model.config, length)
        return cls(model.to(device), max_model_len=length)

    def prefill(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, PrefillCache]:
        """Logits (N, V) after the last token of each sequence, and the keys and values of all."""
        longest = max(map(len, sequences))
        # Padded by repeating a token of the row itself: any id will do, and some models warn about their pad token.
        padded = [[*tokens, *([tokens[-1]] * (longest - len(tokens)))] for tokens in sequences]
        cache = PrefillCache(self.num_layers)
        self._last_N = torch.tensor([len(tokens) - 1 for tokens in sequences], device=self.device)
        try:
            logits_N1V: Tensor = self._model(
                input_ids=torch.tensor(padded, device=self.device), past_key_values=cache, use_cache=True
            ).logits
        finally:
            self._last_N = None
        return logits_N1V[:, 0], cache

    def decode(self, tokens: Sequence[int], positions: Sequence[int], slots: SlotCache) -> Tensor:
        """Logits (N, V) after one more token in each of the first N slots."""
        positions_N, mask_N11T = slots.decode_at(positions, self.device)
        logits_N1V: Tensor = self._model(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            position_ids=positions_N[:, None],
            attention_mask=mask_N11T.to(self._model.dtype),  # type: ignore[arg-type]  # a property of pretrained models
            past_key_values=slots,
            use_cache=True,
        ).logits
        return logits_N1V[:, 0]

    def plan_load(self, tensors: Mapping[str, TensorSource]) -> list[tuple[Tensor, Tensor]]:
        """(from, to) for each tensor of a file, all checked. Tied weights may be named once or by each of their names."""
        unknown = sorted(set(tensors) - set(self._targets))
        if unknown:
            raise WeightsError(f"weights name tensors this model does not have: {_some(unknown)}; nothing was loaded")
        covered = {self._targets[name].data_ptr() for name in tensors}
        missing = sorted(name for name, target in self._targets.items() if target.data_ptr() not in covered)
        if missing:
            raise WeightsError(f"weights lack tensors this model has: {_some(missing)}; nothing was loaded")
        return [(_as_torch(name, tensor, self._targets[name]), self._targets[name]) for name, tensor in tensors.items()]

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

    def apply_load(self, plan: Sequence[tuple[Tensor, Tensor]]) -> None:
        with torch.inference_mode():
            for source, target in plan:
                target.copy_(source)

    def _keep_last_positions(self, _head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Before the output head: one position a row is sampled from, the others would be thrown away (V is large)."""
        if self._last_N is None:
            return None
        hidden_NTE: Tensor = args[0]
        rows_N = torch.arange(hidden_NTE.shape[0], device=hidden_NTE.device)
        return (hidden_NTE[rows_N, self._last_N][:, None], *args[1:])


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
        raise WeightsError(f"tensor {tensor.name} has dtype {tensor.dtype}, which is not supported; nothing was loaded")
    if tensor.shape != tuple(target.shape):
        raise WeightsError(
            f"tensor {tensor.name} has shape {tensor.shape}, the model's is {tuple(target.shape)}; nothing was loaded"
        )
    count = target.numel()
    if len(tensor.data) != count * dtype.itemsize:
        raise WeightsError(f"tensor {tensor.name} has {len(tensor.data)} bytes for {count} numbers; nothing was loaded")
    # A private copy: torch wants writable memory, and the mapped file is read-only.
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(tensor.shape)


def _require_full_attention(config: Any, length: int) -> None:
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if kinds and not (kinds == {"sliding_attention"} and window and window >= length):
        raise RunError(
            f"this engine decodes full attention only; the model has layers of kind {', '.join(sorted(kinds))}. "
            f"Set max_model_len to at most its window ({window}), or serve it with vLLM"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
