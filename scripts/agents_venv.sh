#!/bin/sh
# A virtual environment with an agent framework of other people, for the test that runs it, unchanged, through our proxy.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/agents/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/agents
.venvs/agents/bin/python -m pip install --quiet openai-agents==0.24.0
