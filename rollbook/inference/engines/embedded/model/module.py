"""Loads a Hugging Face causal language model, and runs its module over the slots.

Prompts are padded on the right: under causal attention a real token never attends to padding, so a fresh prefill needs no mask and
can use the fastest attention kernel. Only the last real position of each row passes through the output head.
"""

# N rows, C tokens a row or a forward, T positions, V vocabulary, E hidden size, K most likely tokens

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import TopLogprobs
from rollbook.contracts.weights import WeightsError
from rollbook.inference.engine import PromptScores
from rollbook.inference.engines.embedded.adapters import AdapterBank, AdapterRows
from rollbook.inference.engines.embedded.model.forward import PrefillInput, PrefillPositions
from rollbook.inference.engines.embedded.model.hf_cache import DecodeCache, PrefillCache, ProbeCache
from rollbook.inference.engines.embedded.slot_cache import LayerShape, SlotCache
from rollbook.inference.weights.lora import CONFIG_FILE, read_settings

FORWARD_TOKENS = 256
"""Tokens of one scoring forward: logits of all positions of a long prompt would need gigabytes."""


def load_module(directory: Path, *, device: str, dtype: str, max_model_len: int | None) -> tuple[Any, int]:
    """The model in a Hugging Face directory, or the base of a PEFT directory, and its maximum length. Nothing is downloaded."""
    try:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        is_adapter = (directory / CONFIG_FILE).is_file()
        model: Any = AutoModelForCausalLM.from_pretrained(
            read_settings(directory)["base_model_name_or_path"] if is_adapter else directory,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, WeightsError) as error:
        raise RunError(f"no causal language model could be loaded from {directory}: {error}") from error
    built_for = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    length = max_model_len or built_for
    if length < 2 or (built_for and length > built_for):
        raise RunError(
            f"max_model_len {max_model_len} does not fit the model in {directory}, which supports {built_for} positions"
        )
    _require_full_attention(model.config, length)
    try:
        return model.to(device).eval().requires_grad_(False), length
    except (RuntimeError, AssertionError) as error:  # torch raises either
        raise RunError(f"inference.device is {device!r}, which this machine does not have: {error}") from error


class ModuleForward:
    """Runs any architecture through its Hugging Face module. Not thread-safe."""

    def __init__(self, model: Any, *, max_model_len: int) -> None:
        self._model = model
        self.vocab_size: int = model.config.vocab_size
        self.max_model_len = max_model_len
        parameter: Tensor = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._last_N: Tensor | None = None
        self.adapters = AdapterBank(model)
        head: nn.Module = model.get_output_embeddings()
        head.register_forward_pre_hook(self._keep_last_positions)
        self.shapes = self._probed_shapes(int(model.config.num_hidden_layers))

    def prefill(self, inputs: PrefillInput, slots: SlotCache) -> Tensor:
        positions = PrefillPositions.of(inputs, scratch_row=slots.scratch_row, max_model_len=self.max_model_len)
        masked: dict[str, Any] = {}
        if not inputs.is_fresh:
            masked = {"position_ids": positions.positions_NC, "attention_mask": positions.mask_N1CT(self.dtype)}
        self._last_N = inputs.lasts_N
        try:
            with self.adapters.in_module(inputs.adapters):
                logits_N1V: Tensor = self._model(
                    input_ids=inputs.tokens_NC, past_key_values=PrefillCache(slots, positions), use_cache=True, **masked
                ).logits
        finally:
            self._last_N = None
        return logits_N1V[:, 0]

    def decode(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        slots: SlotCache,
        *,
        length: int,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        rows_N = torch.arange(len(tokens_N), device=self.device)
        is_future_NT = torch.arange(length, device=self.device) > positions_N[:, None]
        mask_NT = torch.zeros(is_future_NT.shape, dtype=self.dtype, device=self.device)
        mask_NT.masked_fill_(is_future_NT, float("-inf"))
        with self.adapters.in_module(adapters):
            logits_N1V: Tensor = self._model(
                input_ids=tokens_N[:, None],
                position_ids=positions_N[:, None],
                attention_mask=mask_NT[:, None, None, :],
                past_key_values=DecodeCache(slots, rows_N=rows_N, positions_N=positions_N, length=length),
                use_cache=True,
            ).logits
        return logits_N1V[:, 0]

    def _probed_shapes(self, num_layers: int) -> list[LayerShape]:
        probe = ProbeCache(num_layers)
        with torch.inference_mode():
            self._model(
                input_ids=torch.ones((1, 1), dtype=torch.long, device=self.device),
                past_key_values=probe,
                use_cache=True,
            )
        return [layer.shape for layer in probe.probes]

    def _keep_last_positions(self, _head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Keep one position per row before the output head, because only that one is sampled from (V is large)."""
        if self._last_N is None:
            return None
        hidden_NCE: Tensor = args[0]
        rows_N = torch.arange(hidden_NCE.shape[0], device=hidden_NCE.device)
        return (hidden_NCE[rows_N, self._last_N][:, None], *args[1:])


def _require_full_attention(config: Any, length: int) -> None:
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if kinds and not (kinds == {"sliding_attention"} and window and window >= length):
        raise RunError(
            f"this engine supports full attention only; the model has layers of type {', '.join(sorted(kinds))}. "
            f"Set max_model_len to at most its window ({window}), or serve it with vLLM"
        )


def score_prompt(module: Any, prompt: NDArray[np.int32], top_logprobs: int) -> PromptScores:
    """Logprobs of the tokens of a prompt, for requests that echo it: evaluation harnesses compare answers this way.

    Scores with a separate cache, so running requests keep theirs.
    """
    device = next(module.parameters()).device
    tokens_T = torch.tensor(prompt, dtype=torch.long, device=device)
    cache: Any = DynamicCache(config=module.config)
    logprobs, top_tokens, top_values = [], [], []
    with torch.inference_mode():
        for start in range(0, len(prompt) - 1, FORWARD_TOKENS):
            end = min(start + FORWARD_TOKENS, len(prompt) - 1)
            inputs_C, targets_C = tokens_T[start:end], tokens_T[start + 1 : end + 1]
            logits_CV = module(input_ids=inputs_C[None], past_key_values=cache, use_cache=True).logits[0]
            logprobs_CV = torch.log_softmax(logits_CV.float(), dim=-1)
            logprobs.append(logprobs_CV.gather(1, targets_C[:, None])[:, 0].cpu())
            if top_logprobs:
                values_CK, ids_CK = logprobs_CV.topk(min(top_logprobs, logprobs_CV.shape[1]), dim=-1)
                top_tokens.append(ids_CK.to("cpu", torch.int32))
                top_values.append(values_CK.cpu())
    tops = None
    if top_tokens:
        tops = TopLogprobs(token_ids=torch.cat(top_tokens).numpy(), logprobs=torch.cat(top_values).numpy())
    return PromptScores(logprobs=torch.cat([torch.empty(0), *logprobs]).numpy(), tops=tops)
