"""`rollbook proxy`: sessions open with their first request and are recorded token by token at their end."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI

from rollbook.inference.config import InferenceConfig, ScriptedConfig
from rollbook.inference.engines.scripted import open_engine
from rollbook.inference.server.app import build_app, serve
from tests.parts.inference.models import publish
from tests.parts.rollout.agents import TOOLS_TEMPLATE, EngineRecord, bpe_vocabulary, word_tokenizer


def start(policy: str, model: Path, record: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "rollbook", "proxy", "--policy", policy, "--model", str(model)]
    process = subprocess.Popen([*command, "--record", str(record)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    found = re.search(r"base_url: (\S+)/s/NAME/v1", process.stderr.readline())
    assert found is not None
    return process, found[1]


def end(url: str, reward: float) -> Any:
    request = urllib.request.Request(
        url, data=json.dumps({"reward": reward}).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())


async def test_recorded_sessions_hold_the_tokens_of_the_engine(tmp_path: Path) -> None:
    bpe_vocabulary().save(str(tmp_path / "tokenizer.json"))
    settings = {"chat_template": TOOLS_TEMPLATE, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = word_tokenizer()
    engine_record = EngineRecord(tokenizer, lambda _: "It is sunny.<|im_end|>")
    config = InferenceConfig(engine="scripted", scripted=ScriptedConfig(vocab_size=tokenizer.vocab_size))
    record = tmp_path / "sessions.jsonl"
    async with open_engine(config, script=engine_record) as engine:
        weights = tmp_path / "weights.safetensors"
        await engine.load_weights(publish(weights, torch.nn.Linear(1, 1), 3), weights)
        async with serve(build_app(engine, config)) as policy:
            process, url = start(policy, tmp_path, record)
            try:
                for name in ("first", "left-open"):
                    async with AsyncOpenAI(base_url=f"{url}/s/{name}/v1", api_key="x") as client:
                        messages: list[Any] = [{"role": "user", "content": "Paris?"}]
                        reply = await client.chat.completions.create(model="m", messages=messages)
                        messages += [
                            {"role": "assistant", "content": reply.choices[0].message.content},
                            {"role": "user", "content": "Sure?"},
                        ]
                        await client.chat.completions.create(model="m", messages=messages)
                assert end(f"{url}/s/first/end", 0.5) == {"session": "first", "turns": 2, "sequences": 1, "reward": 0.5}
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=60)
    assert process.returncode == 0
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    assert [(line["session"], line["reward"]) for line in lines] == [("first", 0.5), ("left-open", None)]
    turns = [(turn["prompt_ids"], turn["token_ids"]) for line in lines for turn in line["turns"]]
    assert turns == engine_record.turns
    assert all(version == 3 for line in lines for turn in line["turns"] for version in turn["versions"])
