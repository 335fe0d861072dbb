"""TRL's AsyncGRPOTrainer with its own rollout worker, for comparison: counts the samples that it drops as stale.

Run in the virtual environment of TRL. TRL's worker uses Rollbook's policy server instead of vLLM. A middleware removes the model
name and one unsupported field with a neutral value. The last line of the output is JSON.
"""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen2_5_chat_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker

from rollbook.contracts.policy import Publication, PublicationId
from rollbook.inference.config import InferenceConfig
from rollbook.inference.engine import open_engine
from rollbook.inference.server.app import build_app, serve
from rollbook.inference.weights.client import WeightTransferClient
from rollbook.integrations.trl_trainer import use_cpu
from rollbook.trainer.model.model_directory import prepare_model_directory
from rollbook.trainer.model.weights import digest_of, write_weights
from rollbook.trainer.model_config import ModelBuildConfig, ModelConfig


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(str(completion)) % 3) for completion in completions]


@web.middleware
async def without_neutral_fields(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.path == "/v1/completions":
        body = json.loads(await request.read())
        assert body.pop("repetition_penalty", 1.0) == 1.0
        body["seed"] %= 2**31
        del body["model"]  # TRL uses the directory as name; the server has one model
        request._read_bytes = json.dumps(body).encode()
    response: web.StreamResponse = await handler(request)
    return response


async def serve_policy(model_dir: Path, ready: Path) -> None:
    config = InferenceConfig(max_running=64)
    async with open_engine(config, model_dir) as engine:
        app = build_app(engine, config)
        app.middlewares.append(without_neutral_fields)
        async with serve(app) as url:
            ready.write_text(url)
            await asyncio.Event().wait()


class DirectTransfer:
    """TRL's `weight_transfer` without a ledger: publishes to the policy server."""

    def __init__(self, url: str, directory: Path) -> None:
        self._url = url
        self._directory = directory
        self._count = 0

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Any) -> None:
        weights = {name: tensor.detach().clone() for name, tensor in iterator}
        digest, path = digest_of(weights), self._directory / f"{self._count}.safetensors"
        write_weights(weights, path, digest=digest, is_durable=False)
        publication = Publication(id=PublicationId(self._count), epoch=1, step=self._count, digest=digest)
        self._count += 1

        async def push() -> None:
            async with WeightTransferClient([self._url], request_s=60) as client:
                await client.receive(publication, str(path))

        asyncio.run(push())


class DropCounter(TrainerCallback):
    """Slows each step down like a larger model, and collects the number of samples that TRL dropped."""

    def __init__(self, step_s: float) -> None:
        self.dropped: list[float] = []
        self._step_s = step_s

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(self._step_s)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "ratio" in logs:
            self.dropped.append(logs.get("sample/dropped_stale_total") or 0.0)


def main(directory: Path, steps: int, step_s: float) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    build = ModelBuildConfig(
        hidden_size=64,
        layers=1,
        heads=2,
        kv_heads=2,
        intermediate_size=128,
        tokenizer="bytes",
        max_position_embeddings=512,
    )
    model_dir = prepare_model_directory(ModelConfig(build=build), directory / "model", seed=0)
    ready = directory / "url"
    command = [sys.executable, "-m", "tests.parts.integrations.trl_alone", "serve", str(model_dir), str(ready)]
    server = subprocess.Popen(command)
    try:
        while not ready.exists():
            assert server.poll() is None
            time.sleep(0.1)
        url = ready.read_text()
        use_cpu()
        async_rollout_worker.is_vllm_available = lambda *_, **__: True
        drops = DropCounter(step_s)
        tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        tokenizer.chat_template = qwen2_5_chat_template  # TRL's worker requires a template that TRL knows
        trainer = AsyncGRPOTrainer(
            model=str(model_dir),
            reward_funcs=reward,
            args=AsyncGRPOConfig(
                output_dir=str(directory / "trl"),
                max_steps=steps,
                per_device_train_batch_size=16,
                num_generations=4,
                token_budget=0,
                max_staleness=2,
                max_completion_length=4,
                vllm_server_base_url=url,
                logging_steps=1,
                report_to=[],
                dtype="float32",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
                save_strategy="no",
            ),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": c}] for c in "abcdefgh" * 200]}),
            processing_class=tokenizer,
            weight_transfer=DirectTransfer(url, directory),
            callbacks=[drops],
        )
        trainer.train()
        print(json.dumps({"dropped_by_step": drops.dropped, "samples_per_step": 16}), flush=True)  # noqa: T201
    finally:
        server.kill()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "serve":
        asyncio.run(serve_policy(Path(sys.argv[2]), Path(sys.argv[3])))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
