#!/bin/sh
# Creates a virtual environment with an agent framework, for the tests that run it unchanged through the proxy.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/agents/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/agents
.venvs/agents/bin/python -m pip install --quiet openai-agents==0.24.0
