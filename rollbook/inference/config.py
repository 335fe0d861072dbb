"""What an operator may set about the policy server."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, Field


class KvAfterUpdate(StrEnum):
    KEEP = "keep"
    """Running requests keep the keys and values that older weights computed. No pause."""
    RECOMPUTE = "recompute"
    """Running requests are prefilled again under the new weights before their next token."""


class UpdateSequence(StrEnum):
    IN_FLIGHT = "in_flight"
    """Decoding goes on while weights move; they are applied between two steps."""
    PAUSED = "paused"
    """All replicas are paused first, then weights are sent, then all resume: no replica samples while another updates."""


class ScriptedConfig(BaseModel, frozen=True, extra="forbid"):
    """The engine without a model: a seeded random policy. For tests, docs and benchmarks."""

    vocab_size: int = Field(default=64, ge=2)
    """Token ids lie below this."""

    max_model_len: int = Field(default=4096, ge=2)
    """Longest sequence it pretends to support, in tokens."""

    token_s: float = Field(default=0.0, ge=0)
    """Seconds one decode step takes."""

    script: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """`module:function` that is given the model directory and returns the script: a mapping or a function from the prompt's tokens
    to those of the reply. Unset: a seeded random policy."""


class VllmConfig(BaseModel, frozen=True, extra="forbid"):
    """vLLM as the engine. Its servers need `VLLM_SERVER_DEV_MODE=1`, `--enable-scale-out` and `--logprobs-mode
    processed_logprobs`; those that the run starts get them."""

    python: str | None = None
    """An interpreter that has vLLM: the run starts `inference.replicas` servers with it. Unset: `inference.urls` are used."""

    args: tuple[str, ...] = ()
    """Further arguments of its server."""

    update: Literal["reload", "plugin"] = "reload"
    """`reload`: it reads a directory again, with no set-up. `plugin`: our weight transfer back end, which checks digests; its
    environment needs this package, and the server `--weight-transfer-config '{"backend": "rollbook"}'`."""

    model_name: str = "policy"
    """The name it serves the policy under."""


class InferenceConfig(BaseModel, frozen=True, extra="forbid"):
    """One policy server: its engine, its limits, and the deadline its clients set."""

    engine: Literal["transformers", "scripted", "vllm"] = "transformers"
    """`transformers` runs any Hugging Face causal language model; `scripted` needs no model; `vllm` is a vLLM server, one of
    `urls` or started with `vllm.python`."""

    replicas: int = Field(default=1, ge=1)
    """Policy servers that a run starts. Requests go to the least loaded; an episode's turns stay at one."""

    urls: tuple[str, ...] = ()
    """Policy servers that run elsewhere and are used in place of ones of our own."""

    api_key_env: str | None = None
    """Variable that holds the key which the servers at `urls` demand."""

    watch_s: float = Field(default=1.0, gt=0)
    """How often a client looks at the health of every replica, where there are several."""

    affinity_spread: int = Field(default=8, ge=0)
    """Requests that an episode's own replica may have more than the least loaded one, before the episode goes there."""

    transfer: Literal["auto", "directory", "shared_memory", "cuda_ipc", "gloo", "nccl"] = "auto"
    """How weights reach the replicas. `auto`: replicas that the run starts itself get them through the memory of the GPU that
    they share with the trainer, or of the host; others through a directory that both sides see. `gloo`: over the network.
    `cuda_ipc`: trainer and policy on one GPU. `nccl`: to vLLM."""

    publish: Literal["auto", "full", "adapter"] = "auto"
    """What is published where `trainer.lora` is set: the `adapter` alone, under a versioned name beside the base that every replica
    has, or the `full` weights, merged. `auto`: the adapter, where replicas can take one: not over `nccl`, and to vLLM only if
    the run starts it. Without LoRA it is always `full`."""

    transfer_host: str = "127.0.0.1"
    """Address under which replicas reach the trainer, for `gloo` and `nccl`."""

    update_sequence: UpdateSequence = UpdateSequence.IN_FLIGHT
    """Whether replicas go on decoding while weights move."""

    confirm_s: float = Field(default=60.0, gt=0)
    """How long a publication waits for one of several replicas, before that replica goes into quarantine."""

    check_digest: bool = True
    """After every `cuda_ipc` transfer, compare the digest of the weights that each replica uses with the published one, where the
    dtypes are equal. The other transports check the digest before weights are loaded."""

    device: str = "cpu"
    """Where the model lives, as torch names it: `cpu`, `cuda`, `cuda:1`, `mps`."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and cache. Logprobs are always computed in float32."""

    threads: int = Field(default=1, ge=1)
    """CPU threads of the model's arithmetic."""

    max_running: int = Field(default=256, ge=1)
    """Requests that are decoded together at most: the slots of the cache."""

    max_queued: int = Field(default=4096, ge=1)
    """Requests that may wait for a slot. Beyond it the server answers 503 with Retry-After."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion, in tokens. Unset: what the model was built for."""

    kv_memory_mb: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Keys and values take this much memory at most; when more is needed, the youngest requests make room and are computed again
    later. `auto`: 85 % of what is free on a GPU once the weights are loaded, half of what is available elsewhere."""

    step_prefill_tokens: int | None = Field(default=None, ge=1)
    """Prompt tokens prefilled between two decode steps at most, so that long prompts cannot starve running requests: a longer
    prompt is prefilled in pieces. Unset: 16384 on a GPU, 4096 elsewhere."""

    forward_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one prefill forward at most, padding included. Unset: 8192 on a GPU, 768 elsewhere (what fits a CPU's caches is
    fastest)."""

    forward: Literal["auto", "module"] = "auto"
    """`auto`: a lean forward of our own for models shaped like Llama, once it has agreed with the module's; `module`: always the
    Hugging Face module's."""

    capture_steps: bool = True
    """Run steps as captured CUDA graphs where possible. Without a GPU it changes nothing."""

    steps_ahead: int | None = Field(default=None, ge=0)
    """Steps launched before the tokens of earlier ones are read. Unset: 2 on a GPU, 0 elsewhere."""

    prompt_memo_mb: float = Field(default=16.0, ge=0)
    """Memory for the next-token logits of prompts seen under the current weights: siblings of a group ask alike. 0: off."""

    prefix_cache_share: float = Field(default=0.25, ge=0, lt=1)
    """Share of `kv_memory_mb` for keys and values of finished requests: the next turn of an episode begins with the tokens of the
    last one, and only the rest is prefilled. Least recently used go first, and all of them when weights arrive. 0: off."""

    prefix_cache_least: int | None = Field(default=None, ge=1)
    """Beginnings shorter than this many tokens are not kept and not looked for. Unset: 32 on a CPU. On a GPU a captured
    prefill of all of it is faster up to a length that shrinks with the model's size: 8,889 tokens for 135 million parameters, 800
    for 1.5 billion. An estimate from one measurement."""

    kv_after_update: KvAfterUpdate = KvAfterUpdate.KEEP
    """What becomes of the cache of running requests when weights arrive."""

    seed: int = Field(default=0, ge=0)
    """Of the randomness behind requests that bring no seed of their own."""

    request_s: float = Field(default=120.0, gt=0)
    """The deadline a client sets for one policy request or one weight update, retries included."""

    max_connections: int = Field(default=128, ge=1)
    """Connections one client process opens to the policy server at most."""

    vllm: VllmConfig = VllmConfig()
    """Settings of vLLM servers."""

    scripted: ScriptedConfig = ScriptedConfig()
    """Settings of the scripted engine."""
