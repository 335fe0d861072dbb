"""Norms are fused only if the fused kernel computes the same values."""

import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rollbook.trainer.model.network import fuse_norms


class ShiftedRMSNorm(nn.Module):
    """Has the attributes of the usual RMS norm, but adds 2 to its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (2 + self.weight) * hidden_states * scale


def test_only_known_norms_are_fused_and_the_result_is_the_same() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([LlamaRMSNorm(16), ShiftedRMSNorm(16), Gemma2RMSNorm(16)])
    for weight in model.parameters():
        nn.init.normal_(weight)
    hidden = torch.randn(5, 16)
    before = [norm(hidden) for norm in model]
    assert fuse_norms(model) == 2
    for norm, expected in zip(model, before, strict=True):
        torch.testing.assert_close(norm(hidden), expected)
