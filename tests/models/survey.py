"""What Rollbook does with each family of `families.py`: one line of docs/models.md for each.

    python -m tests.models.survey > docs/models.md

`make test-models` compares every line with a new measurement.
"""

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import __version__ as transformers_version

from rollbook.contracts.errors import RunError
from rollbook.contracts.policy import Completion, Publication, PublicationId, SamplingParams, with_length
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engines.embedded.captured_runner import CapturedRunner
from rollbook.inference.engines.embedded.engine import open_engine
from rollbook.inference.engines.embedded.model.llama import LlamaForward
from rollbook.inference.engines.embedded.model.module import StateForward
from rollbook.trainer.config import LoraSettings
from rollbook.trainer.data.minibatches import Minibatch, plan
from rollbook.trainer.data.rows import flatten
from rollbook.trainer.model.policy_model import PolicyModel
from rollbook.trainer.model.weights import write_weights
from rollbook.trainer.step import TrainStep
from tests.models.families import FAMILIES, VOCABULARY, Family
from tests.parts.inference.recording import RecordingCapture
from tests.parts.trainer.batches import batch_of, quick, row, sample

CLOSE = 1e-3
"""Largest accepted difference of a logprob of the engine and of the trainer, in float32."""
MAX_REASON = 90
HEAD = f"""# Models

Each line is a measurement (`make test-models`) with a tiny model of random weights, built from the classes of
transformers {transformers_version}: the code is that of the large models. Sequences are longer than windows and chunks. Not
measured: speed, GPUs, bfloat16, and real checkpoints.

- **engine**: `fast` is our forward for Llama-like models, also with gated delta layers
  ([decision 0060](decisions/0060-gated-delta-layers-on-the-fast-forward.md)). `module` calls the module of transformers: over slots
  (full attention), or over states (all other layers), which decode merged, or row by row
  ([decision 0042](decisions/0042-row-states-in-transformers-caches.md)). *captured*: a GPU repeats a decode step without
  Python ([decision 0054](decisions/0054-decode-steps-of-modules-are-captured.md)); here, a recording of its operations gave the
  same tokens and logprobs. *from Python*: why a decode step cannot be captured.
- **prefix reuse**: of any common prefix, or of whole turns only (the prompt must continue all of a finished request).
- **training**: `packed`, with shared prefixes, or `padded`. Gradients leak into no other sequence, in either.
- **LoRA**: layers that `targets = "all-linear"` adapts. *attention* is q, k, v and o, *mlp* is gate, up and down. *+ experts*:
  `experts = true` adapts the matrices of all experts, too.
- **published names**: the names and shapes of the weights that engines receive are those of the checkpoint's files, which
  vLLM and SGLang read. *converted*: transformers has other names in memory.
- **round trip**: a checkpoint of the trainer has the names and bytes of the loaded one.
- **parity**: the logprobs of engine and trainer for {{count}} sampled tokens, in batches of different lengths and over two
  turns, differ by at most {CLOSE:g} in float32.

- **router replay**: `trainer.router_replay` trains with the experts that the embedded engine chose, all of them. *no*: refused at
  the start by the model's type. –: no mixture of experts.

| family | model type | engine | prefix reuse | training | LoRA | published names | round trip | parity | router replay |
|---|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class _Sampled:
    prompt: list[int]
    completion: Completion


@dataclass(frozen=True, slots=True)
class _Engine:
    path: str
    reuse: str
    sampled: list[_Sampled]


def line(family: Family) -> str:
    """The line of a family. It never raises: what fails is a reason in its column."""
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "model"
        cells = [family.name, f"`{family.model_type}`"]
        try:
            family.model().save_pretrained(directory)
            model = PolicyModel.load(directory, quick())
        except Exception as error:
            return _joined([*cells, f"does not load: {_reason(error)}", *["–"] * 7])
        engine = asyncio.run(_engine(directory, model))
        training = ("packed" if model.is_packed else "padded") if not leaks(model) else "LEAKS"
        cells += [engine.path, engine.reuse, training, _lora(directory), _names(model, directory)]
        cells += ["exact" if _is_round_trip_exact(model, directory, Path(root)) else "DIFFERS", _parity(model, engine)]
        cells.append(_replay(directory) if _has_experts(model) else "–")
        return _joined(cells)


def page(lines: list[str]) -> str:
    return HEAD.replace("{count}", str(NUM_TOKENS)) + "\n".join(lines) + "\n"


def _joined(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).replace("|", "/").partition(" (")[0]
    return f"{type(error).__name__}: {text[:MAX_REASON]}"


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, size).tolist() for size in (1, 3, 12, 25, 25, 40)]


MAX_TOKENS = (1, 4, 12)
NUM_TOKENS = 2 * sum(MAX_TOKENS[number % 3] for number in range(6))


async def _engine(directory: Path, model: PolicyModel) -> _Engine:
    config = InferenceConfig(max_running=4, max_model_len=160, kv_memory_mb=30, prefix_cache_least=8)
    try:
        async with open_engine(config, directory) as engine:
            path = directory / "published.safetensors"
            # As a trainer publishes: the engine must know these names.
            write_weights(model.weights(), path, digest=model.digest())
            publication = Publication(id=PublicationId(1), epoch=1, step=1, digest=model.digest())
            await engine.load_weights(publication, path)
            if await engine.weights_digest() != model.digest():
                raise RunError("the digest of the live weights is not the published one")
            prompts = _prompts()
            first = await _play(engine, prompts)
            cached = engine.stats().cached_tokens
            turns = [[*one.prompt, *one.completion.token_ids.tolist(), 9, 8, 7] for one in first]
            second = await _play(engine, turns)
            is_reused = engine.stats().cached_tokens > cached
            parts = engine.parts
            slots: Any = parts.runner
            reuse = ("any prefix" if slots.slots.is_croppable else "whole turns") if is_reused else "none"
            way = _path(parts)
        if way != "fast":
            way += f", {await _captured(directory, [*first, *second])}"
        return _Engine(way, reuse, [*first, *second])
    except Exception as error:
        return _Engine(f"refused: {_reason(error)}", "–", [])


async def _captured(directory: Path, expected: list[_Sampled]) -> str:
    config = InferenceConfig(max_running=4, max_model_len=160, kv_memory_mb=30, prefix_cache_least=8, forward="module")
    async with open_engine(config, directory, capture=RecordingCapture()) as engine:
        parts = engine.parts
        if not isinstance(parts.runner, CapturedRunner):
            reasons = [choice.partition("because ")[2] for choice in parts.choices if choice.startswith("decode steps")]
            return f"from Python: {reasons[0][:MAX_REASON]}"
        await engine.adopt(Publication(id=PublicationId(1), epoch=1, step=0, digest=""))
        half = len(expected) // 2
        found = [*await _play(engine, [one.prompt for one in expected[:half]])]
        found += await _play(engine, [one.prompt for one in expected[half:]])
    for one, other in zip(expected, found, strict=True):
        if one.completion.token_ids.tolist() != other.completion.token_ids.tolist():
            return "DIFFERENT tokens when captured"
        if np.abs(one.completion.logprobs - other.completion.logprobs).max() > CLOSE:
            return "DIFFERENT logprobs when captured"
    return "captured"


async def _play(engine: Any, prompts: list[list[int]]) -> list[_Sampled]:
    requests = [
        engine.generate(prompt, SamplingParams(max_tokens=MAX_TOKENS[number % 3], seed=number))
        for number, prompt in enumerate(prompts)
    ]
    completions = await asyncio.gather(*requests)
    return [_Sampled(prompt, found) for prompt, found in zip(prompts, completions, strict=True)]


def _path(parts: Any) -> str:
    if isinstance(parts.model, LlamaForward):
        return "fast"
    if not isinstance(parts.model, StateForward):
        return "module, slots"
    return "module, states" if parts.runner.slots.is_mergeable else "module, states, row by row"


def _has_experts(model: PolicyModel) -> bool:
    return any("experts" in name for name in model.module.state_dict())


def _replay(directory: Path) -> str:
    """Whether every choice of the engine reaches the experts of the trainer."""
    config = InferenceConfig(max_running=4, max_model_len=160, kv_memory_mb=30, record_routes=True)

    async def routed() -> list[_Sampled]:
        async with open_engine(config, directory) as engine:
            await engine.adopt(Publication(id=PublicationId(1), epoch=1, step=0, digest=""))
            return await _play(engine, _prompts())

    try:
        learner = TrainStep(PolicyModel.load(directory, quick(router_replay=True)), quick(router_replay=True))
        played = asyncio.run(routed())
    except RunError:
        return "no"
    samples = []
    for one in played:
        assert one.completion.routes is not None
        tokens = [*one.prompt, *one.completion.token_ids.tolist()]
        made = row(tokens, range(len(one.prompt), len(tokens)))
        samples.append(sample(made.with_columns(routes=with_length(one.completion.routes, len(tokens)))))
    metrics = learner.run(batch_of(1, [samples])).metrics
    return "yes" if metrics["train/router_replayed"] == 1.0 else "DIFFERS"


def _minibatch(model: PolicyModel, sequences: list[tuple[list[int], int, NDArray[np.float32]]]) -> Minibatch:
    """Sequences of tokens, each with its first trained token and its logprobs."""
    samples = []
    for tokens, start, logprobs in sequences:
        made = row(tokens, range(start, len(tokens)))
        made.logprobs[start:] = logprobs
        samples.append(sample(made))
    (minibatch,) = plan(flatten(batch_of(1, [samples]), quick()), quick(), step=1, is_packed=model.is_packed)
    return minibatch


def _parity(model: PolicyModel, engine: _Engine) -> str:
    if not engine.sampled:
        return "–"
    sequences = [
        ([*one.prompt, *one.completion.token_ids.tolist()], len(one.prompt), one.completion.logprobs)
        for one in engine.sampled
    ]
    differences = []
    with torch.no_grad():
        for micro in _minibatch(model, sequences).microbatches:
            found = model.token_logprobs(micro)[0].numpy()
            differences.append(np.abs(found - micro.sampled_logprobs_N))
    largest = float(np.concatenate(differences).max())
    return "yes" if largest <= CLOSE else f"DIFFERS by {largest:.2g}"


def leaks(model: PolicyModel) -> bool:
    """Whether a loss on one sequence of a pass has a gradient at a token of another, or at padding."""
    rng = np.random.default_rng(1)
    sequences = [
        (rng.integers(3, VOCABULARY, size).tolist(), 1, np.zeros(size - 1, np.float32)) for size in (30, 30, 21)
    ]
    (micro,) = _minibatch(model, sequences).microbatches
    embedded: list[torch.Tensor] = []

    def keep(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    handle = model.network.language_model.get_input_embeddings().register_forward_hook(keep)
    try:
        logprobs_N, _ = model.token_logprobs(micro)
        is_second_N = micro.row_of_N == 1
        total: Any = logprobs_N[torch.from_numpy(is_second_N)].sum()
        total.backward()
    finally:
        handle.remove()
        model.discard_gradients()
    gradient = embedded[0].grad
    assert gradient is not None, "the loss depends on the embeddings"
    is_used_T = gradient.abs().amax(dim=-1).flatten().numpy() > 0
    expected = np.zeros(micro.inputs_BT.size, dtype=bool)
    expected[micro.predicted_at_N[is_second_N]] = True
    return bool((is_used_T != expected).any())


def _lora(directory: Path) -> str:
    try:
        model: Any = PolicyModel.load(directory, quick(lora=LoraSettings(rank=2)))
    except Exception as error:
        return f"refused: {_reason(error)}"
    names = {name.split(".lora_")[0].split(".")[-1] for name in model.checkpointed_weights()}
    for short, layers in (("attention", "qkvo"), ("mlp", ("gate", "up", "down"))):
        whole = {f"{layer}_proj" for layer in layers}
        if whole <= names:
            names = (names - whole) | {short}
    try:
        PolicyModel.load(directory, quick(lora=LoraSettings(rank=2, experts=True)))
    except RunError:
        return ", ".join(sorted(names))
    return f"{', '.join(sorted(names))} + experts"


def _names(model: PolicyModel, directory: Path) -> str:
    published = {name: tuple(tensor.shape) for name, tensor in model.weights().items()}
    if published != {name: tuple(tensor.shape) for name, tensor in _tensors(directory).items()}:
        return "DIFFER"
    return "yes" if published.keys() == model.module.state_dict().keys() & published.keys() else "yes, converted"


def _is_round_trip_exact(model: PolicyModel, directory: Path, root: Path) -> bool:
    model.save(root / "checkpoint")
    before, after = _tensors(directory), _tensors(root / "checkpoint")
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("model*.safetensors"):
        with safe_open(str(path), framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dictionary
    return found


if __name__ == "__main__":
    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    chosen = [family for family in FAMILIES if not sys.argv[1:] or family.model_type in sys.argv[1:]]
    sys.stdout.write(page([line(family) for family in chosen]))
