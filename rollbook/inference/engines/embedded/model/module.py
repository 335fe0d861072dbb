"""Loads a Hugging Face causal language model, and runs its module.

`ModuleForward` is for full attention in all layers, over slots. Prompts are padded on the right: under causal attention a token
never attends to padding, so a fresh prefill needs no mask and can use the fastest attention kernel. `StateForward` is for all other
layers, over the caches of transformers. Only the last real position of each row passes through the output head.
"""

# N rows, C tokens a row or a forward, T positions, V vocabulary, E hidden size, K most likely tokens

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging

from rollbook.contracts.errors import RunError, is_out_of_memory
from rollbook.contracts.policy import TopLogprobs
from rollbook.contracts.weights import WeightsError
from rollbook.inference.engine import PromptScores
from rollbook.inference.engines.embedded.adapters import AdapterBank, AdapterRows
from rollbook.inference.engines.embedded.model.fixed_states import FixedStates, why_not_fixed
from rollbook.inference.engines.embedded.model.forward import PrefillInput, PrefillPositions
from rollbook.inference.engines.embedded.model.hf_cache import DecodeCache, PrefillCache, ProbeCache
from rollbook.inference.engines.embedded.model.module_kernels import StepKernels
from rollbook.inference.engines.embedded.model.row_states import RowStates, bytes_of_layers, cache_of, new_layers
from rollbook.inference.engines.embedded.routes import RouteRecorder
from rollbook.inference.engines.embedded.slot_cache import LayerShape, SlotCache
from rollbook.inference.weights.lora import CONFIG_FILE, read_settings
from rollbook.numerics.recipe import rotation_by_length
from rollbook.shared_weights.base import SharedBase
from rollbook.shared_weights.files import load_model
from rollbook.shared_weights.modules import assign, empty_model

FORWARD_TOKENS = 256
"""Tokens of one scoring forward: logits of all positions of a long prompt would need gigabytes."""


def load_module(
    directory: Path, *, device: str, dtype: str, max_model_len: int | None, base: SharedBase | None = None
) -> tuple[Any, int]:
    """The model in a Hugging Face directory, or the base of a PEFT directory, and its maximum length. Nothing is downloaded.

    `base`: its weights, in memory of another process.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either
        if is_out_of_memory(error):
            raise
        raise RunError(f"inference.device is {device!r}, which this machine does not have: {error}") from error
    try:
        logging.disable_progress_bar()
        is_adapter = (directory / CONFIG_FILE).is_file()
        source = read_settings(directory)["base_model_name_or_path"] if is_adapter else directory
        if base is None:
            model = load_model(Path(source), device=device, dtype=getattr(torch, dtype))
        else:
            model = empty_model(directory, dtype=getattr(torch, dtype))
            assign(model, base.tensors)
    except (OSError, ValueError, KeyError, WeightsError) as error:
        raise RunError(f"no causal language model could be loaded from {directory}: {error}") from error
    built_for = positions_of(model.config)
    length = max_model_len or built_for
    if (changing := rotation_by_length(model.config.get_text_config())) is not None and length > changing[1]:
        raise RunError(
            f"the rotary embedding of the model in {directory} ({changing[0]}) changes for a whole batch when one of its sequences "
            f"exceeds {changing[1]} tokens, so logprobs would depend on the other requests; set inference.max_model_len to at most "
            f"{changing[1]}"
        )
    if length == 0:
        raise RunError(
            f"the model in {directory} has no limit of its length; set inference.max_model_len to the length you need"
        )
    if length < 2 or (built_for and length > built_for):
        raise RunError(
            f"max_model_len {max_model_len} does not fit the model in {directory}, which supports {built_for} positions"
        )
    return model.to(device).eval().requires_grad_(False), length


class ModuleForward:
    """Runs an architecture with full attention through its Hugging Face module. Not thread-safe."""

    is_dense = True

    def __init__(self, model: Any, *, max_model_len: int, recorder: RouteRecorder | None = None) -> None:
        """`recorder`: set if the chosen experts are recorded."""
        self._model = model
        self._recorder = recorder
        self.step_kernels: StepKernels | None = None
        """Decode steps compute with them, if any."""
        self.vocab_size: int = model.config.vocab_size
        self.max_model_len = max_model_len
        parameter: Tensor = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self._last_N: Tensor | None = None
        self.adapters = AdapterBank(model)
        head: nn.Module = model.get_output_embeddings()
        self._hook = head.register_forward_pre_hook(self._keep_last_positions)
        self.shapes = self._probed_shapes(int(model.config.num_hidden_layers))

    def discard(self) -> None:
        """Another forward will use the module."""
        self._hook.remove()
        self.step_kernels = None

    def new_memory(self) -> SlotCache:
        routes = None if self._recorder is None else self._recorder.shape
        return SlotCache(self.shapes, dtype=self.dtype, device=self.device, routes=routes)

    def bytes_per_row(self) -> tuple[int, int]:
        routes = 0 if self._recorder is None else self._recorder.shape.num_bytes
        return SlotCache.bytes_per_token(self.shapes, self.dtype) + routes, 0

    def prefill(self, inputs: PrefillInput, slots: SlotCache) -> Tensor:
        positions = PrefillPositions.of(inputs, scratch_row=slots.scratch_row, max_model_len=self.max_model_len)
        masked: dict[str, Any] = {}
        if not inputs.is_fresh:
            masked = {"position_ids": positions.positions_NC, "attention_mask": positions.mask_N1CT(self.dtype)}
        self._last_N = inputs.lasts_N
        try:
            with self.adapters.in_module(inputs.adapters), recording(self._recorder) as chosen:
                logits_N1V: Tensor = self._model(
                    input_ids=inputs.tokens_NC, past_key_values=PrefillCache(slots, positions), use_cache=True, **masked
                ).logits
        finally:
            self._last_N = None
        if self._recorder is not None and slots.routes is not None:
            routes_NCLK = self._recorder.stacked(chosen, len(inputs.tokens_NC))
            slots.routes[positions.write_rows_NC, positions.write_at_NC] = routes_NCLK
        return logits_N1V[:, 0]

    def decode(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        slots: SlotCache,
        *,
        rows: Sequence[int],
        length: int,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        rows_N = torch.arange(len(tokens_N), device=self.device)
        is_future_NT = torch.arange(length, device=self.device) > positions_N[:, None]
        mask_NT = torch.zeros(is_future_NT.shape, dtype=self.dtype, device=self.device)
        mask_NT.masked_fill_(is_future_NT, float("-inf"))
        with self.adapters.in_module(adapters), using(self.step_kernels), recording(self._recorder) as chosen:
            logits_N1V: Tensor = self._model(
                input_ids=tokens_N[:, None],
                position_ids=positions_N[:, None],
                attention_mask=mask_NT[:, None, None, :],
                past_key_values=DecodeCache(slots, rows_N=rows_N, positions_N=positions_N, length=length),
                use_cache=True,
            ).logits
        if self._recorder is not None and slots.routes is not None:
            slots.routes[rows_N, positions_N] = self._recorder.stacked(chosen, len(tokens_N))[:, 0]
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


class StateForward:
    """Runs any architecture through its Hugging Face module, with the state of each row in the caches of transformers: windows,
    recurrent states, sparse attention. Not thread-safe."""

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int,
        is_merged: bool = True,
        is_chunked: bool = True,
        is_fixed: bool = False,
        recorder: RouteRecorder | None = None,
    ) -> None:
        """`is_merged`: rows of different lengths decode in one forward; otherwise each in its own. `is_chunked`: a row is continued
        with several tokens in a forward; otherwise with one. `is_fixed`: states do not move, so steps can be captured, and a step
        computes the first rows, as over slots. `recorder`: set if the chosen experts are recorded."""
        self.is_dense = is_fixed
        self.step_kernels: StepKernels | None = None
        """Decode steps compute with them, if any."""
        self._is_chunked = is_chunked
        self._recorder = recorder
        self._model = model
        self._config = model.config.get_text_config()
        self._is_merged = is_merged
        self.vocab_size: int = self._config.vocab_size
        self.max_model_len = max_model_len
        parameter: Tensor = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.adapters = AdapterBank(model)
        known = inspect.signature(model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in known else "cache_params"
        self._has_positions = "position_ids" in known

    def fixed(self) -> "StateForward":
        """The same, with states at fixed addresses. Raises `RunError` if this model cannot have them."""
        if not self.new_memory().is_mergeable:
            raise RunError("rows of this model do not share a step")
        if reason := why_not_fixed(self._layers_of_a_token()):
            raise RunError(reason)
        fixed = StateForward(
            self._model,
            max_model_len=self.max_model_len,
            is_chunked=self._is_chunked,
            is_fixed=True,
            recorder=self._recorder,
        )
        fixed.step_kernels = self.step_kernels
        return fixed

    @property
    def how(self) -> str:
        decoding = "rows merged for a decode step" if self._is_merged else "one forward for each row"
        return decoding if self._is_chunked else f"{decoding}, prompts continued token by token"

    def new_memory(self) -> RowStates:
        routes = None if self._recorder is None else self._recorder.shape
        if self.is_dense:
            return FixedStates(self._config, template=self._layers_of_a_token(), routes=routes)
        return RowStates(self._config, is_mergeable=self._is_merged, routes=routes)

    def bytes_per_row(self) -> tuple[int, int]:
        return bytes_of_layers(self._layers_of_a_token(), max_length=self.max_model_len)

    def _layers_of_a_token(self) -> list[Any]:
        routes = None if self._recorder is None else self._recorder.shape
        layers = RowStates(self._config, routes=routes).fresh()
        ids_11 = torch.ones((1, 1), dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self._logits(ids_11, layers, lengths=[0])
        return layers

    def prefill(self, inputs: PrefillInput, slots: RowStates) -> Tensor:
        """Rows at equal positions share a forward, so nothing is padded: a recurrent state would see the padding."""
        rows, starts, lasts = (values.tolist() for values in (inputs.rows_N, inputs.starts_N, inputs.lasts_N))
        logits: dict[int, Tensor] = {}
        lines = sorted(range(len(rows)), key=lambda line: (starts[line], lasts[line]))
        for _, same in groupby(lines, key=lambda line: (starts[line], lasts[line] if slots.is_mergeable else line)):
            group = list(same)
            start, last = starts[group[0]], lasts[group[0]]
            layers = slots.fresh() if start == 0 else slots.joined([rows[line] for line in group])
            adapters = inputs.adapters.of_tokens(torch.tensor(group)) if inputs.adapters is not None else None
            tokens_MC = inputs.tokens_NC[group, : last + 1]
            width = last + 1 if start == 0 or self._is_chunked else 1
            with self.adapters.in_module(adapters):
                for done in range(0, last + 1, width):
                    lengths = [start + done] * len(group)
                    logits_MV = self._logits(tokens_MC[:, done : done + width], layers, lengths=lengths)
            slots.put([rows[line] for line in group], layers, start + last + 1)
            logits |= dict(zip(group, logits_MV, strict=True))
        return torch.stack([logits[line] for line in range(len(rows))])

    def decode(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        slots: RowStates,
        *,
        rows: Sequence[int],
        length: int,
        adapters: AdapterRows | None = None,
    ) -> Tensor:
        if isinstance(slots, FixedStates):
            layers, mask_NT = slots.layers(positions_N, length), slots.mask(positions_N, length)
            with self.adapters.in_module(adapters), using(self.step_kernels):
                return self._called(tokens_N[:, None], layers, positions_N[:, None], mask_NT)
        if slots.is_mergeable:
            layers, lengths = slots.merged(rows)
            with self.adapters.in_module(adapters), using(self.step_kernels):
                logits_NV = self._logits(tokens_N[:, None], layers, lengths=lengths)
            slots.advanced()
            return logits_NV
        logits = []
        for line, row in enumerate(rows):
            state = slots.take(row)
            own = None if adapters is None else adapters.of_tokens(torch.tensor([line]))
            with self.adapters.in_module(own), using(self.step_kernels):
                logits.append(self._logits(tokens_N[line : line + 1, None], state.layers, lengths=[state.length]))
            slots.put([row], state.layers, state.length + 1)
        return torch.cat(logits)

    def _logits(self, tokens_NC: Tensor, layers: Sequence[Any], *, lengths: Sequence[int]) -> Tensor:
        """Logits (N, V) after the last token. Row i continues after `lengths[i]` tokens, which end together."""
        longest, count = max(lengths), tokens_NC.shape[1]
        lengths_N1 = torch.tensor(lengths, device=self.device)[:, None]
        mask_NT = None
        if min(lengths) < longest:
            mask_NT = (torch.arange(longest + count, device=self.device) >= longest - lengths_N1).long()
        positions_NC = lengths_N1 + torch.arange(count, device=self.device)
        return self._called(tokens_NC, layers, positions_NC, mask_NT)

    def _called(self, tokens_NC: Tensor, layers: Sequence[Any], positions_NC: Tensor, mask_NT: Tensor | None) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": tokens_NC, self._cache_name: cache_of(layers), "use_cache": True}
        if self._has_positions:
            inputs["position_ids"] = positions_NC
        if mask_NT is not None:
            inputs["attention_mask"] = mask_NT
        with recording(self._recorder) as chosen:
            logits_N1V: Tensor = self._model(**inputs, logits_to_keep=1).logits
        if self._recorder is not None:
            layers[-1].append(self._recorder.stacked(chosen, len(tokens_NC)))
        return logits_N1V[:, -1]


def recording(recorder: RouteRecorder | None) -> AbstractContextManager[dict[int, Tensor]]:
    return nullcontext({}) if recorder is None else recorder.recording()


def using(kernels: StepKernels | None) -> AbstractContextManager[None]:
    return nullcontext() if kernels is None else kernels.in_module()


def has_full_attention(config: Any, length: int) -> bool:
    """Whether every layer attends to all of `length` positions, and keeps nothing but their keys and values."""
    text = config.get_text_config()
    layers = new_layers(text)
    return len(layers) == text.num_hidden_layers and all(
        type(layer) is DynamicLayer or (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= length)
        for layer in layers
    )


def positions_of(config: Any) -> int:
    """The length that a model was built for; 0 if it has no limit."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "model_max_length", "seq_length"):
        if value := getattr(text, name, None):
            return int(value)
    return 0


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
