"""Builds and warm-starts a model of a hundred thousand parameters. It knows the format of an answer and is sometimes right."""

import json
import random
import subprocess
import sys
from pathlib import Path

import tomli_w

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} Answer : {{ m.content }} <eos>{% else %}"
    " {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} Answer : {% endif %}"
)
WORDS = ["What", "is", "?", "Answer", ":", "The", "answer", "+", "-", *(str(n) for n in range(-9, 28))]


def tiny_model(home: Path, *, seed: int, right: float = 0.4) -> Path:
    """Train on demonstrations of which a fraction `right` is correct: the model learns the format and can still improve."""
    rng = random.Random(seed)
    lines = []
    for _ in range(1500):
        left, sign, other = rng.randint(0, 9), rng.choice("+-"), rng.randint(0, 9)
        correct = left + other if sign == "+" else left - other
        answer = correct if rng.random() < right else rng.randint(-9, 18)
        messages = [
            {"role": "user", "content": f"What is {left} {sign} {other} ?"},
            {"role": "assistant", "content": f"The answer is {answer}"},
        ]
        lines.append(json.dumps({"messages": messages}))
    (home / "demonstrations.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config = {
        "run": {"name": "tiny", "seed": seed},
        "model": {
            "build": {
                "hidden_size": 64,
                "layers": 2,
                "heads": 4,
                "kv_heads": 4,
                "intermediate_size": 128,
                "max_position_embeddings": 64,
                "vocabulary": WORDS,
                "chat_template": TEMPLATE,
            }
        },
        "sft": {"data": "demonstrations.jsonl", "examples_per_step": 32, "epochs": 6},
        "trainer": {"lr": 3e-3, "schedule": "cosine", "checkpoint_every": 1000},
    }
    (home / "tiny.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "rollbook", "sft", str(home / "tiny.toml"), "--out", str(home / "tiny")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Path(json.loads(done.stdout.splitlines()[-1])["model"])
