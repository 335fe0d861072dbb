"""A gated delta layer, read from its Hugging Face module: a state of fixed size for each row, in place of keys and values.

The state S of a head is a matrix that maps keys to values. A token with decay a, rate b, key k, value v and query q does

    S = a S;   S = S + k (b (v - S^T k))^T;   its result is S^T q

Queries, keys and values have passed a short convolution over the last K tokens, so the inputs of the last K tokens are the second
part of the state. `step` adds one token to each row, `chunked` many: within a chunk, what each token writes is the solution of a
triangular system, and S is computed once for each chunk. States are computed in float32.
"""

# N rows, T tokens a row, M = N x T tokens, X numbers of the fused projection, C channels of the convolution, K tokens of it,
# H value heads, D key size, V value size, L chunks, B tokens of a chunk

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rollbook.numerics.module_parts import (
    DELTA_PARTS,
    GROUPED_DELTA_PARTS,
    UnsupportedModelError,
    refuse_other_parts,
)

CHUNK = 64
"""Tokens of a chunk."""
EPSILON = 1e-6
"""Added to the squared norm of queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """What a projection says about tokens."""

    mixed: Tensor
    """Queries, keys and values before the convolution, (..., C)."""
    gates: Tensor
    """Factors of the results before their activation, (..., H, V)."""
    rates: Tensor
    """Before the sigmoid, (..., H)."""
    times: Tensor
    """What decays depend on, (..., H)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaLayer:
    """The weights are those of the module."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    is_grouped: bool
    """The projection has the numbers of each key head next to each other."""
    kernel_C1K: Tensor
    log_rates_H: Tensor
    time_biases_H: Tensor
    norm_V: Tensor
    norm_epsilon: float

    @classmethod
    def of(cls, module: Any) -> "DeltaLayer":
        """Raises `UnsupportedModelError`."""
        is_grouped = hasattr(module, GROUPED_DELTA_PARTS[0])
        known = {*(GROUPED_DELTA_PARTS if is_grouped else DELTA_PARTS), "conv1d", "norm", "out_proj"}
        refuse_other_parts("gated delta part", module, known, parameters={"dt_bias", "A_log"})
        if missing := known - {name for name, _ in module.named_children()}:
            raise UnsupportedModelError(f"{type(module).__name__} has no {', '.join(sorted(missing))}")
        if module.conv1d.bias is not None or module.activation != "silu":
            raise UnsupportedModelError(f"its convolutions are those of {type(module).__name__}")
        return cls(
            key_heads=module.num_k_heads,
            value_heads=module.num_v_heads,
            key_size=module.head_k_dim,
            value_size=module.head_v_dim,
            is_grouped=is_grouped,
            kernel_C1K=module.conv1d.weight,
            log_rates_H=module.A_log,
            time_biases_H=module.dt_bias,
            norm_V=module.norm.weight,
            norm_epsilon=module.norm.variance_epsilon,
        )

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the states of a row: the inputs of its last tokens (C, K) in the model's dtype, and S (H, D, V) in float32."""
        channels, _, width = self.kernel_C1K.shape
        return (channels, width), (self.value_heads, self.key_size, self.value_size)

    def step(self, fused_NX: Tensor, inputs_NCK: Tensor, state_NHDV: Tensor, is_added_N: Tensor) -> Tensor:
        """The results (N, H x V) of one token for each row. Changes the states in place, those of rows that are not added not at
        all."""
        new = self.moved(fused_NX, inputs_NCK, is_added_N)
        is_added_N111 = is_added_N[:, None, None, None]
        rates_NH, log_decays_NH = self.decays(new.rates, new.times)
        convolved_NC = (inputs_NCK.float() * self.kernel_C1K[:, 0].float()).sum(dim=-1).to(fused_NX.dtype)
        query_NHD, key_NHD, value_NHV = self.heads(F.silu(convolved_NC))
        decay_NH11 = torch.where(is_added_N111, log_decays_NH.exp()[..., None, None], 1.0)
        # S is read once, for the key and the query, and written once.
        read_NH2V = torch.stack((key_NHD, query_NHD), dim=2) @ state_NHDV * decay_NH11
        written_NH1V = (value_NHV[:, :, None] - read_NH2V[:, :, :1]) * rates_NH[..., None, None]
        written_NH1V = written_NH1V.masked_fill(~is_added_N111, 0.0)
        state_NHDV.mul_(decay_NH11).addcmul_(key_NHD[..., None], written_NH1V)
        result_NHV = read_NH2V[:, :, 1] + (query_NHD * key_NHD).sum(dim=-1, keepdim=True) * written_NH1V[:, :, 0]
        return self.gated(result_NHV.to(fused_NX.dtype), new.gates)

    def moved(self, fused_NX: Tensor, inputs_NCK: Tensor, is_added_N: Tensor) -> DeltaInputs:
        """The first part of a step: the inputs of the last tokens include this one."""
        new = self._split(fused_NX)
        moved_NCK = torch.cat((inputs_NCK[..., 1:], new.mixed[..., None]), dim=-1)
        inputs_NCK.copy_(torch.where(is_added_N[:, None, None], moved_NCK, inputs_NCK))
        return new

    def chunked(
        self, fused_NTX: Tensor, inputs_NCK: Tensor, state_NHDV: Tensor, lengths_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The results (N, T, H x V) of the first tokens of each row, `lengths_N` of them, and both states after them. What follows
        is padding."""
        width, count = inputs_NCK.shape[2], fused_NTX.shape[1]
        new = self._split(fused_NTX)
        all_NCT = torch.cat((inputs_NCK, new.mixed.transpose(1, 2)), dim=2)
        convolved_NCT = F.conv1d(all_NCT[..., 1:], self.kernel_C1K, groups=len(self.kernel_C1K))
        last_NK = lengths_N[:, None] + torch.arange(width, device=lengths_N.device)
        inputs_NCK = all_NCT.gather(2, last_NK[:, None].expand_as(inputs_NCK))
        query, key, value = (x.transpose(1, 2) for x in self.heads(F.silu(convolved_NCT).transpose(1, 2)))
        # Padding writes nothing and forgets nothing.
        is_padding_NT1 = (torch.arange(count, device=lengths_N.device) >= lengths_N[:, None])[..., None]
        rates, log_decays = (
            x.masked_fill(is_padding_NT1, 0.0).transpose(1, 2) for x in self.decays(new.rates, new.times)
        )
        result_NHTV, state_NHDV = chunked_delta(query, key, value, rates, log_decays, state_NHDV=state_NHDV)
        return (
            self.gated(result_NHTV.transpose(1, 2).to(fused_NTX.dtype), new.gates),
            inputs_NCK,
            state_NHDV,
        )

    def _split(self, fused: Tensor) -> DeltaInputs:
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        sizes = [2 * keys + values, values, self.value_heads, self.value_heads]
        if self.is_grouped:
            sizes = [sizes[0] + sizes[1], sizes[2] + sizes[3]]
        return self.inputs_of(torch.split(fused, sizes, dim=-1))

    def inputs_of(self, projected: Sequence[Tensor]) -> DeltaInputs:
        """`projected`: the results of the projections, in the order of `DELTA_PARTS` or `GROUPED_DELTA_PARTS`."""
        if self.is_grouped:
            both, of_time = projected
            of_head = self.value_heads // self.key_heads
            sizes = [self.key_size, self.key_size, of_head * self.value_size, of_head * self.value_size]
            parts = torch.split(_in_heads(both, self.key_heads), sizes, dim=-1)
            mixed = torch.cat([part.flatten(-2) for part in parts[:3]], dim=-1)
            gates = parts[3].flatten(-2)
            rates, times = (x.flatten(-2) for x in _in_heads(of_time, self.key_heads).chunk(2, dim=-1))
        else:
            mixed, gates, rates, times = projected
        return DeltaInputs(mixed=mixed, gates=_in_heads(gates, self.value_heads), rates=rates, times=times)

    def decays(self, rates: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Rates after the sigmoid, and logarithms of decays."""
        passed = F.softplus(times.float() + self.time_biases_H.float())
        return rates.sigmoid().float(), -self.log_rates_H.float().exp() * passed

    def heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (..., H, D) with a length of 1, and values (..., H, V)."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        *both, value = torch.split(convolved.float(), [keys, keys, values], dim=-1)
        query, key = (_in_heads(x, self.key_heads) for x in both)
        query, key = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + EPSILON) for x in (query, key))
        if (of_head := self.value_heads // self.key_heads) > 1:
            query, key = (x.repeat_interleave(of_head, dim=-2) for x in (query, key))
        return query * self.key_size**-0.5, key, _in_heads(value, self.value_heads)

    def gated(self, result: Tensor, gates: Tensor) -> Tensor:
        """The results (..., H x V), normed and multiplied by their gates."""
        # Rounded where the module rounds.
        normed = F.rms_norm(result, self.norm_V.shape, eps=self.norm_epsilon) * self.norm_V
        return (normed * F.silu(gates.float())).to(result.dtype).flatten(-2)


def _in_heads(x: Tensor, heads: int) -> Tensor:
    return x.view(*x.shape[:-1], heads, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTerms:
    """What a chunk does to any state S before it. Its tokens write W = own - of_state S, their results are query S + seen W, and
    the state after it is decay S + key^T W."""

    own: Tensor
    """(..., B, V)"""
    of_state: Tensor
    """(..., B, D)"""
    query: Tensor
    """(..., B, D)"""
    seen: Tensor
    """(..., B, B)"""
    key: Tensor
    """(..., B, D)"""
    decay: Tensor
    """(..., 1, 1)"""

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, rates: Tensor, log_decays: Tensor) -> "ChunkTerms":
        """Shapes: queries and keys (..., B, D), values (..., B, V), rates and decays (..., B, 1)."""
        # From the start of the chunk up to each token, and after token j up to token i: at most 1.
        ages = log_decays.cumsum(dim=-2)
        size = key.shape[-2]
        is_later_BB = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
        between = (ages - ages.transpose(-1, -2)).masked_fill(is_later_BB, float("-inf")).exp()
        since_start, until_end = ages.exp(), (ages[..., -1:, :] - ages).exp()
        # A token writes b (v - what S at the start and the tokens before it hold for its key).
        system = (rates * key) @ key.transpose(-1, -2) * between
        known = torch.cat((rates * value, rates * since_start * key), dim=-1)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        own, of_state = torch.split(solved, [value.shape[-1], key.shape[-1]], dim=-1)
        return cls(
            own=own,
            of_state=of_state,
            query=query * since_start,
            seen=query @ key.transpose(-1, -2) * between,
            key=key * until_end,
            decay=since_start[..., -1:, :],
        )


def chunked_delta(
    query: Tensor, key: Tensor, value: Tensor, rates: Tensor, log_decays: Tensor, *, state_NHDV: Tensor
) -> tuple[Tensor, Tensor]:
    """The results (N, H, T, V) of tokens (N, H, T, ...), and S after the last one."""
    count = key.shape[2]
    size = min(CHUNK, count)
    missing = -count % size

    def in_chunks(x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, missing))
        return padded.view(*x.shape[:2], -1, size, x.shape[-1])

    terms = ChunkTerms.of(*map(in_chunks, (query, key, value, rates[..., None], log_decays[..., None])))
    results = []
    for chunk in range(terms.key.shape[2]):
        written = terms.own[:, :, chunk] - terms.of_state[:, :, chunk] @ state_NHDV
        results.append(terms.query[:, :, chunk] @ state_NHDV + terms.seen[:, :, chunk] @ written)
        state_NHDV = state_NHDV * terms.decay[:, :, chunk] + terms.key[:, :, chunk].transpose(-1, -2) @ written
    return torch.cat(results, dim=2)[:, :, :count], state_NHDV
