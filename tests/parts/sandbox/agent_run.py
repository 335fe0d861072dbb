"""A run whose episodes use three sandboxes each: for a coding agent, for the verifier of a Harbor task, and for code of a reward
function. All of them do the right thing, so every reward is `REWARD`, unless something else than the code failed."""

import os
import sys
from pathlib import Path

REWARD = 1.01
"""1 of the verifier, and 0.01 times 1 of the reward function."""
CONFIG = """
[run]
name = "boxes"
seed = 3

[model.build]
hidden_size = 32
layers = 1
heads = 2
kv_heads = 2
intermediate_size = 64
max_position_embeddings = 256
tokenizer = "bytes"
chat_template = "{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{{{{ eos_token }}}}{{% endfor %}}assistant: "

[tasks]
source = "harbor:{directory}/tasks"

[rollout]
function = "agent"
completions_per_prompt = 2
max_total_tokens = 200
drop_constant_reward = false

[rollout.settings]
agent = "mini-swe-agent"
reward = "chaos_rewards:verified"
environment = {{ PATH = "{path}" }}

[rollout.sampling]
max_tokens = 8

[gate]
groups_per_step = 2
max_groups_in_flight = 4
max_head_offpolicy_versions = 2

[trainer]
lr = 1e-3
"""
AGENT = """#!/usr/bin/env python3
import json, os, time, urllib.request

request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Greet."}]}).encode(),
    headers={"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(request, timeout=60).read()
time.sleep(0.2)
with open("greeting.txt", "w") as file:
    file.write("hello\\n")
"""
REWARDS = """
from pathlib import Path

from rollbook import run_code
from rollbook.sandbox.harbor.task import read_task
from rollbook.sandbox.harbor.image import copy_tree
from rollbook.sandbox.harbor.trial import open_trial


async def verified(row, result, messages):
    async with open_trial(read_task(Path(row["path"])), images={"*": "host"}) as trial:
        await copy_tree(trial.sandbox, Path(row["workspace"]), "/app")
        return (await trial.verify()).reward


async def brief(case):
    result = await run_code("import time; time.sleep(0.1); print(6 * 7)")
    return float(result.stdout == b"42\\n")
"""
TASK = {
    "task.toml": 'schema_version = "1.1"\n[verifier]\ntimeout_sec = 60\n[environment]\nmemory_mb = 512\n',
    "instruction.md": "Write the word hello into greeting.txt.\n",
    "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
    "tests/test.sh": "sleep 0.2\ngrep -qx hello /app/greeting.txt && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
}
VERIFIER = "/tests/test.sh"
NUM_TASKS = 4


def write_agent_run(directory: Path) -> str:
    """Writes the agent's program, the tasks and the reward functions. Returns the configuration."""
    program = agent_program(directory)
    program.parent.mkdir()
    program.write_text(AGENT, encoding="utf-8")
    program.chmod(0o755)
    (directory / "chaos_rewards.py").write_text(REWARDS, encoding="utf-8")
    for number in range(NUM_TASKS):
        for path, text in TASK.items():
            file = directory / "tasks" / f"greeting-{number}" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    path = os.pathsep.join([str(program.parent), str(Path(sys.executable).resolve().parent), "/usr/bin", "/bin"])
    return CONFIG.format(directory=directory, path=path)


def agent_program(directory: Path) -> Path:
    """mini-swe-agent's name: it runs as a coding agent does, in its sandbox."""
    return directory / "bin" / "mini"
