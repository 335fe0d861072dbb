"""The policy as the trainer sees it: load, log-probabilities of tokens, save.

Weights are float32 whatever they were stored in: updates of a small learning rate round away in bfloat16.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rollbook.contracts.errors import RunError
from rollbook.trainer.weights import digest_of, named_weights

# Families whose logits are the output embedding applied to the last hidden state and nothing else (no scaling, no soft cap). For
# them the vocabulary-sized part is computed at trained positions only; any other family goes through its own forward.
PLAIN_HEADS = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "phi3", "gpt_neox"})


class PolicyModel:
    """A causal language model with float32 weights on one device."""

    def __init__(self, module: Any, *, device: str = "cpu", compute_dtype: str = "float32") -> None:
        self.module: nn.Module = module.to(device=device, dtype=torch.float32)
        # Dropout has no place here: the ratio compares this distribution with the one that sampled.
        self.module.eval()
        for parameter in self.module.parameters():
            # Tensors read from a file may lie at odd addresses, and the fastest matrix kernels choose their order of summation by
            # alignment. Fresh memory is aligned alike in every process, so equal weights give equal bits.
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        self._module: Any = self.module
        self._device = device
        self._is_mixed = compute_dtype == "bfloat16"
        self.config: Any = module.config

    @classmethod
    def load(cls, directory: Path, *, device: str = "cpu", compute_dtype: str = "float32") -> "PolicyModel":
        """Read a Hugging Face directory."""
        # The terminal belongs to the run's own view.
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        try:
            module = AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
        except (OSError, ValueError, RuntimeError) as error:
            raise RunError(f"no model could be loaded from {directory}: {type(error).__name__}: {error}") from error
        return cls(module, device=device, compute_dtype=compute_dtype)

    @property
    def vocabulary_size(self) -> int:
        return int(self._module.get_input_embeddings().weight.shape[0])

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()

    def tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    # B rows of inputs padded on the right to T, N positions to predict from, V vocabulary
    def token_logprobs(
        self,
        inputs_BT: Tensor,
        predicted_at_N: Tensor,
        targets_N: Tensor,
        temperatures_N: Tensor,
        *,
        is_entropy_trained: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each target at its own temperature, and the entropy where it was predicted.

        The entropy carries a gradient only if it is trained: keeping it costs memory.

        No attention mask is needed: what pads a row stands behind everything that is read from it.
        """
        logits_NV = self._logits(inputs_BT, predicted_at_N).float() / temperatures_N.unsqueeze(-1)
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        with torch.set_grad_enabled(is_entropy_trained and torch.is_grad_enabled()):
            entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(dim=-1)
        return logprobs_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1), entropy_N

    def _logits(self, inputs_BT: Tensor, predicted_at_N: Tensor) -> Tensor:
        with self._precision():
            if self.config.model_type in PLAIN_HEADS:
                hidden_BTH: Tensor = self._module.base_model(input_ids=inputs_BT, use_cache=False).last_hidden_state
                hidden_NH = hidden_BTH.flatten(0, 1).index_select(0, predicted_at_N)
                logits: Tensor = self._module.get_output_embeddings()(hidden_NH)
                return logits
            logits_BTV: Tensor = self._module(input_ids=inputs_BT, use_cache=False).logits
            return logits_BTV.flatten(0, 1).index_select(0, predicted_at_N)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device, dtype=torch.bfloat16) if self._is_mixed else nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """Named tensors, tied ones once. They are the live weights, not a copy."""
        return named_weights(self.module)

    def digest(self) -> str:
        return digest_of(self.weights())

    def save(self, directory: Path) -> None:
        """Write config and weights as a Hugging Face directory (the tokenizer is not the model's to write)."""
        self._module.save_pretrained(str(directory))
