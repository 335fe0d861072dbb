"""Settings of the policy server."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

DEVICES = ("cpu", "cuda", "mps", "xpu")


class KvAfterUpdate(StrEnum):
    KEEP = "keep"
    """Running requests keep the keys and values of the old weights. No pause."""
    RECOMPUTE = "recompute"
    """Running requests are prefilled again with the new weights before their next token."""


class UpdateSequence(StrEnum):
    IN_FLIGHT = "in_flight"
    """Decoding continues during the transfer; weights are applied between two steps."""
    PAUSED = "paused"
    """All replicas are paused, then updated, then resumed: no replica samples while another updates."""


class ScriptedConfig(BaseModel, frozen=True, extra="forbid"):
    """The engine without a model: a seeded random policy. For tests, docs and benchmarks."""

    vocab_size: int = Field(default=64, ge=2)
    """Size of the vocabulary."""

    max_model_len: int = Field(default=4096, ge=2)
    """Longest supported sequence, in tokens."""

    token_s: float = Field(default=0.0, ge=0)
    """Duration of a decode step, in seconds."""

    script: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """`module:function` that takes the model directory and returns the script: a mapping or a function from the tokens of the
    prompt to the tokens of the completion. Unset: a seeded random policy."""


class VllmConfig(BaseModel, frozen=True, extra="forbid"):
    """vLLM as the engine. Its servers need `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out`, `--logprobs-mode processed_logprobs`
    and, if there are several, `--enable-server-load-tracking`; a run sets these for the servers that it starts."""

    python: str | None = None
    """A Python interpreter with vLLM installed: the run starts `inference.replicas` servers with it. Unset: `inference.urls` are
    used."""

    enforce_eager: bool | None = None
    """Run the model without compiled graphs: a faster start, slower decoding. Unset: on a CPU only, where vLLM needs it."""

    gpu_memory_share: float | None = Field(default=None, gt=0, le=1)
    """Part of the GPU's memory that a server may use. Set it if the trainer uses the same GPU. Unset: vLLM's default, 0.9."""

    prefix_caching: bool = True
    """Reuse the cache of equal prompt prefixes: all turns of an episode and all samples of a group share one."""

    args: tuple[str, ...] = ()
    """Additional arguments of the vLLM server. They come last, so they override the others."""

    update: Literal["reload", "plugin"] = "reload"
    """`reload`: vLLM reads a directory again; no set-up. `plugin`: our weight transfer back end, which checks digests; vLLM's
    environment needs this package, and the server needs `--weight-transfer-config '{"backend": "rollbook"}'`."""

    model_name: str = "policy"
    """The name under which vLLM serves the policy."""


class InferenceConfig(BaseModel, frozen=True, extra="forbid"):
    """The policy servers: engine, limits, weight transfer and client deadlines."""

    engine: Literal["transformers", "scripted", "vllm", "sglang"] = "transformers"
    """`transformers` runs any Hugging Face causal language model; `scripted` needs no model; `vllm` uses vLLM servers, at `urls` or
    started with `vllm.python`; `sglang` uses SGLang servers at `urls`."""

    replicas: int = Field(default=1, ge=1)
    """Number of policy servers that a run starts. Requests go to the least loaded one; all turns of an episode go to the same
    one."""

    urls: tuple[str, ...] = ()
    """External policy servers; the run then starts none."""

    api_key_env: str | None = None
    """Environment variable with the API key of the servers at `urls`."""

    token_file: Path | None = None
    """File with the token for weight updates at `urls`: the one that `rollbook policy serve` names at its start. Unset: the API key
    is sent."""

    watch_s: float = Field(default=1.0, gt=0)
    """Interval of a client's health checks, if there are several replicas."""

    affinity_spread: int = Field(default=8, ge=0)
    """An episode moves to the least loaded replica when its own replica has more than this many additional requests."""

    transfer: Literal["auto", "directory", "shared_memory", "pull", "cuda_ipc", "nccl"] = "auto"
    """The transport for weights. `auto`: memory of the GPU or of the host for replicas that the run starts, `pull` if other
    machines serve the run (`cluster.host`), and a shared directory for `urls`. `pull`: each machine fetches a publication once over
    HTTP, from the trainer or from a machine that has it. `cuda_ipc`: trainer and policy on one GPU. `nccl`: to vLLM."""

    publish: Literal["auto", "full", "adapter"] = "auto"
    """What a trainer with LoRA publishes: only the `adapter`, under a versioned name, or the `full` merged weights. `auto`: the
    adapter if replicas support it (not over `nccl`, and with vLLM only if the run starts it). Without LoRA it is always
    `full`."""

    transfer_host: str | None = None
    """Address at which replicas reach the trainer, for `pull` and `nccl`. Unset: `cluster.host`."""

    update_sequence: UpdateSequence = UpdateSequence.IN_FLIGHT
    """Whether replicas continue decoding during a weight transfer."""

    confirm_s: float = Field(default=60.0, gt=0)
    """How long a publication waits for a replica after another has confirmed. Then the replica gets no requests until it has
    loaded a publication (replica quarantine)."""

    check_digest: bool = True
    """After every `cuda_ipc` transfer, compare the digest of the weights that each replica uses with the published one, where the
    dtypes are equal. The other transports check the digest before weights are loaded."""

    device: str = "cpu"
    """The torch device of the model: `cpu`, `cuda`, `cuda:1`, `mps`. A GPU, if there is one."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of weights and cache. Logprobs are always computed in float32. On a GPU bfloat16."""

    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """How keys and values are stored. `auto`: in `dtype`. With 8 bits a number and an exponent for each vector, in half the memory
    of bfloat16, so that more requests run together: `int8`, as integers, whose logprobs are closer to the trainer's; `fp8`, as
    floats (e4m3), on a CPU or a GPU of compute capability 8.9 or later. Both need `exactness` = `fast` and the fast forward with
    attention in all layers."""

    weights_dtype: Literal["auto", "fp8"] = "auto"
    """How the projections of the layers are multiplied. `auto`: in `dtype`. `fp8`: as 8-bit floats (e4m3), with a scale for each
    output and each token. Decode steps then read half as many bytes of weights, from copies that take half of the weights' memory
    in addition. On a CPU or a GPU of compute capability 8.9 or later; needs `exactness` = `fast` and the fast forward with
    attention in all layers and no experts."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of torch."""

    max_running: int = Field(default=256, ge=1)
    """Maximum number of requests that are decoded together. On a GPU: as many as there are episodes in flight, up to 1024."""

    max_queued: int = Field(default=4096, ge=1)
    """Maximum number of requests that wait for a slot. If more arrive, the server responds 503 with Retry-After. Unset, in a run
    with more episodes in flight (`gate.max_groups_in_flight` × episodes per group): that number."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum length of prompt plus completion, in tokens. Unset: the model's maximum; on a GPU `rollout.max_total_tokens`, because
    the cache must have room for the longest sequence."""

    kv_memory_mb: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Maximum memory for keys and values. When it is full, the youngest requests are preempted and computed again later. On a
    GPU the memory plan chooses it, and it is allocated at the start. Otherwise: half of the available memory of a host; without a
    plan, 85 % of the free memory of a GPU after the weights are loaded, a quarter of it at the start and the rest on demand."""

    gpu_memory_gb: float | None = Field(default=None, gt=0)
    """Most memory that tensors of a policy server may take of its GPU, in GB. Chosen by the memory plan if `run.gpu_memory_gb` is
    set."""

    step_prefill_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of prompt tokens prefilled in a step, so that long prompts do not delay running requests. A longer prompt is
    prefilled in pieces. Unset: 4096."""

    forward_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in one forward. On a GPU: of decoding requests and prompts together. Elsewhere: of prompts, padding
    included. Unset: 4096 on a GPU, 768 elsewhere (a size that fits the caches of a CPU)."""

    forward: Literal["auto", "module"] = "auto"
    """`auto`: a fast forward for Llama-like models, mixtures of experts and gated delta layers, if its logits agree with the
    Hugging Face module; `module`: always the module."""

    exactness: Literal["bitwise", "fast"] = "bitwise"
    """`bitwise`: on a GPU, in bfloat16, the logprob of a sampled token has the same bits as the trainer's, for the models of the
    fast forward. `fast`: sums may have any order. A run is exact if
    `trainer.exactness` is `bitwise` too."""

    capture_steps: bool = True
    """Run steps as captured CUDA graphs where possible. Has no effect without a GPU."""

    steps_ahead: int | None = Field(default=None, ge=0)
    """Number of steps launched before the tokens of earlier steps are read. Unset: 2 on a GPU, 0 elsewhere."""

    draft_tokens: int = Field(default=0, ge=0, le=15)
    """Speculative decoding: most tokens of a request that a step computes ahead, looked up in its own prompt and answer. Tokens
    and logprobs stay those of decoding one by one. For answers that repeat their prompt and few requests at once; no steps are
    launched ahead. 0: off. With engine = "transformers", for models of the fast forward."""

    prompt_memo_mb: float = Field(default=16.0, ge=0)
    """Memory for the next-token logits of recent prompts, because episodes of a group repeat the same prompts. 0: off.
    Has no effect with blocks (on a GPU)."""

    prefix_cache_share: float = Field(default=0.25, ge=0, lt=1)
    """Share of `kv_memory_mb` for keys and values of finished requests: the next turn of an episode starts with the tokens of the
    previous turn, so only the rest is prefilled. The least recently used are evicted first, and all at a weight update. 0: off."""

    prefix_cache_least: int | None = Field(default=None, ge=1)
    """Minimum length of a cached prefix, in tokens, where slots are used. Unset: 32. With blocks (on a GPU) every full block of 16
    tokens is shared."""

    prefix_pin_s: float = Field(default=0.0, ge=0)
    """On a GPU: how long new requests may not evict the keys and values of a finished turn, in seconds. They wait instead, so that
    conversations whose next turn comes soon are not computed again. Requests that run already are never kept waiting. 0: off."""

    kv_after_update: KvAfterUpdate = KvAfterUpdate.KEEP
    """How a weight update affects the cache of running requests."""

    record_routes: bool = False
    """Report the experts that a mixture chose for each token with the completion. Set by `trainer.router_replay`; set it yourself
    for servers at `urls` only. With engine = "transformers"."""

    seed: int = Field(default=0, ge=0)
    """Random seed for requests without a seed."""

    request_s: float = Field(default=120.0, gt=0)
    """A client's deadline for one policy request or one weight update, retries included."""

    max_connections: int = Field(default=128, ge=1)
    """Maximum number of connections from one client process to a policy server."""

    vllm: VllmConfig = VllmConfig()
    """Settings of vLLM servers."""

    scripted: ScriptedConfig = ScriptedConfig()
    """Settings of the scripted engine."""

    @model_validator(mode="after")
    def _check_drafts(self) -> Self:
        if self.draft_tokens and self.engine != "transformers":
            raise ValueError(f"draft_tokens: the engine {self.engine} has settings of its own for speculative decoding")
        if self.draft_tokens and self.steps_ahead:
            raise ValueError(
                "draft_tokens and steps_ahead exclude each other: a draft needs the tokens of the step before"
            )
        return self

    @model_validator(mode="after")
    def _check_eight_bits(self) -> Self:
        for name, value, argument, rounded in (
            ("kv_dtype", self.kv_dtype, "--kv-cache-dtype", "keys and values"),
            ("weights_dtype", self.weights_dtype, "--quantization", "weights"),
        ):
            if value == "auto":
                continue
            given = f'{name} = "{value}"'
            if self.engine != "transformers":
                hint = f"; for vLLM, add {argument} and fp8 to vllm.args" if self.engine == "vllm" else ""
                raise ValueError(f'{given}: only engine = "transformers" reads it, and engine is {self.engine}{hint}')
            if self.forward == "module":
                raise ValueError(f'{given} needs the fast forward: set forward = "auto"')
            if self.exactness == "bitwise":
                raise ValueError(
                    f'{given} rounds {rounded}, so logprobs have not the bits of the trainer: set exactness = "fast"'
                )
        return self

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        name, colon, number = device.partition(":")
        if name not in DEVICES or (colon and not number.isdigit()):
            raise ValueError(
                f"{device!r} is no device: use cpu, cuda, cuda:NUMBER or mps, or leave it out: a GPU is used if there is one"
            )
        return device

    @field_validator("transfer", mode="before")
    @classmethod
    def _name_the_replacement(cls, transfer: object) -> object:
        if transfer == "gloo":
            raise ValueError("'gloo' is no longer available; use 'pull', with which replicas fetch weights over HTTP")
        return transfer
