"""Logprobs of the tokens of a prompt, for requests that echo it. Evaluation harnesses compare answers this way."""

# T tokens of the prompt, C tokens of a forward, V vocabulary, K most likely tokens

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from rollbook.contracts.policy import TopLogprobs
from rollbook.inference.engine import PromptScores

FORWARD_TOKENS = 256
"""Tokens of one forward: logits of all positions of a long prompt would need gigabytes."""


def score_prompt(module: Any, prompt: NDArray[np.int32], top_logprobs: int) -> PromptScores:
    """Scores with a separate cache, so running requests keep theirs."""
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
