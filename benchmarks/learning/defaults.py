"""Do the defaults learn? Four tasks, a model that is made on the spot, and no setting but the number of steps.

    python -m benchmarks.learning.defaults --to runs/defaults        # data and warm starts; needs reasoning-gym
    rollbook study runs/defaults/aiw/study.toml --jobs 4 --out runs/defaults/aiw/study --json
    for run in runs/defaults/aiw/study/cells/*/seed-*/; do rollbook replay $run --verify; done

The tasks are sums and differences of two one-digit numbers, and two generators of reasoning-gym: products of two one-digit numbers,
and `aiw`, questions about brothers, sisters and friends. The model has two layers of width 64; each word is a token. Its warm start
has seen demonstrations of which four in ten are right, so it knows the format of an answer and is sometimes right. The fourth is
the number guessing of `rollbook demo` with its model, which starts with random weights; a turn has one token.
"""

import argparse
import importlib
import json
import random
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.report import print_status

HERE = Path(__file__).parent
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} Assistant: {{ m.content }} <eos>"
    "{% else %} User: {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %} Assistant: {% endif %}"
)
GENERATORS: dict[str, dict[str, Any]] = {
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "aiw": {},
}
MAX_TASKS = 1500
NUM_DEMONSTRATIONS, RIGHT = 4800, 0.4
SEEDS = list(range(200, 210))
STEPS, STEPS_OF_GUESSING = 100, 300
DEMO = HERE.parents[1] / "rollbook" / "demo"


def arithmetic() -> Iterator[tuple[str, str]]:
    for left in range(10):
        for right in range(10):
            yield f"What is {left} + {right} ?", str(left + right)
            yield f"What is {left} - {right} ?", str(left - right)


def generated(name: str) -> Iterator[tuple[str, str]]:
    """Questions of a generator of reasoning-gym, each once."""
    seen = set()
    for row in importlib.import_module("reasoning_gym").create_dataset(name, size=4000, seed=1, **GENERATORS[name]):
        if row["question"] not in seen:
            seen.add(row["question"])
            yield " ".join(row["question"].split()), row["answer"]


def prepare(folder: Path, pairs: list[tuple[str, str]]) -> None:
    """Write tasks, demonstrations and a warm-started model."""
    name = folder.name
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    rng.shuffle(pairs)
    pairs = pairs[:MAX_TASKS]
    rows = [{"id": f"{name}-{n}", "question": question, "answer": answer} for n, (question, answer) in enumerate(pairs)]
    answers = [answer for _, answer in pairs]
    chats = []
    for _ in range(NUM_DEMONSTRATIONS):
        row = rng.choice(rows)
        said = row["answer"] if rng.random() < RIGHT else rng.choice(answers)
        chats.append({"messages": [_message("user", row["question"]), _message("assistant", said)]})
    for file, lines in (("tasks", rows), ("demonstrations", chats)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    words = dict.fromkeys(word for question, answer in pairs for word in (*question.split(), answer))
    build = {
        "hidden_size": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 4,
        "intermediate_size": 128,
        "initializer_range": 0.05,
        "vocabulary": ["User:", "Assistant:", *words],
        "chat_template": TEMPLATE,
    }
    sft = {
        "run": {"name": name},
        "model": {"build": build},
        "sft": {"data": "demonstrations.jsonl", "examples_per_step": 64, "epochs": 6},
        "trainer": {"lr": 3e-3, "schedule": "cosine", "warmup_steps": 20, "checkpoint_every": 10_000},
    }
    (folder / "sft.toml").write_text(tomli_w.dumps(sft), encoding="utf-8")
    command = [sys.executable, "-m", "rollbook", "sft", str(folder / "sft.toml"), "--out", str(folder / "warm")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print_status(f"{name}: {len(rows)} tasks, {len(words)} words")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_study(folder: Path, *, steps: int) -> None:
    """The whole configuration: a model, tasks, a reward and the number of steps."""
    shutil.copy(HERE / "scoring.py", folder)
    run = {
        "model": {"path": "warm/final"},
        "tasks": {"source": "tasks.jsonl"},
        "rollout": {"rewards": {"functions": {"correct": {"path": "scoring:correct"}}}},
        "trainer": {"max_steps": steps},
    }
    _write(folder, run)


def write_guessing(folder: Path) -> None:
    """The demo without the settings that were chosen for it."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(DEMO / "number_guessing.py", folder)
    demo = tomllib.loads((DEMO / "run.toml").read_text(encoding="utf-8"))
    run = {name: demo[name] for name in ("model", "tasks", "env")}
    run["rollout"] = {"function": "number_guessing", "max_turns": 6, "sampling": {"max_tokens": 1}}
    _write(folder, {**run, "trainer": {"max_steps": STEPS_OF_GUESSING}})


def _write(folder: Path, run: dict[str, Any]) -> None:
    (folder / "run.toml").write_text(tomli_w.dumps(run), encoding="utf-8")
    study = {"study": {"name": folder.name, "config": "run.toml", "seeds": SEEDS, "measure": "reward"}}
    (folder / "study.toml").write_text(tomli_w.dumps(study), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("runs/defaults"), help="directory of data, models and study")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run")
    args = parser.parse_args()
    sources = {"arithmetic": arithmetic(), **{name: generated(name) for name in GENERATORS}}
    for name, pairs in sources.items():
        prepare(args.to / name, list(pairs))
        write_study(args.to / name, steps=args.steps)
    write_guessing(args.to / "number_guessing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
