#!/bin/sh
# Creates a virtual environment with agent frameworks and an evaluation harness, for the tests that run them unchanged.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/agents/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/agents
.venvs/agents/bin/python -m pip install --quiet openai-agents==0.24.0 smolagents==1.26.0 langchain-openai==1.7.3 \
  'pydantic-ai-slim[openai]==2.66.0' litellm==1.83.0 inspect-ai==0.3.285 'lm-eval[api]==0.4.13'
