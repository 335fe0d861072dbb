"""Small Harbor tasks for tests."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from rollbook.sandbox.harbor.image import build_image
from rollbook.sandbox.harbor.task import HarborTask
from rollbook.sandbox.sandbox import Image

TOML = """
schema_version = "1.1"
[task]
name = "rollbook/greeting"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 20.0
env = { WORD = "hello" }
[agent]
timeout_sec = 30
[environment]
cpus = 1
memory_mb = 512
storage_mb = 64
"""
DOCKERFILE = """
FROM python:3.11-slim
# What the agent finds.
ARG FOLDER=data
ENV GREETING_FILE=/app/greeting.txt \\
    PATH=/app/bin:$PATH
WORKDIR /app
COPY notes/ ./$FOLDER/
COPY start.txt /app/
RUN mkdir -p bin && printf '#!/bin/sh\\necho tool' > bin/tool \\
    && chmod 755 bin/tool
CMD ["sleep", "infinity"]
"""
TEST = """#!/bin/bash
if [ "$(cat "$GREETING_FILE")" = "$WORD" ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
SOLVE = "#!/bin/bash\necho hello > greeting.txt\n"


def write_task(
    root: Path,
    name: str = "greeting",
    *,
    toml: str = TOML,
    dockerfile: str = DOCKERFILE,
    test: str = TEST,
    solve: str | None = SOLVE,
) -> Path:
    directory = root / name
    files = {
        "task.toml": toml,
        "instruction.md": "Write the word hello into greeting.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/notes/readme.txt": "a note\n",
        "environment/start.txt": "start\n",
        "tests/test.sh": test,
        **({} if solve is None else {"solution/solve.sh": solve}),
    }
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return directory


def keep_images_in(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built images of tasks, instead of in the home directory."""

    def build(task: HarborTask, **settings: Any) -> Coroutine[Any, Any, Image]:
        return build_image(task, **{**settings, "cache": cache})

    monkeypatch.setattr("rollbook.sandbox.harbor.trial.build_image", build)
