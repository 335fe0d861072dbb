#!/bin/sh
# Creates a virtual environment with agent frameworks, coding agents and an evaluation harness, for the tests that run them unchanged.
# Claude Code has its own licence. It comes from npm, for these tests only.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/agents/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/agents
.venvs/agents/bin/python -m pip install --quiet openai-agents==0.24.0 smolagents==1.26.0 langchain-openai==1.7.3 \
  'pydantic-ai-slim[openai]==2.66.0' litellm==1.83.0 inspect-ai==0.3.285 'lm-eval[api]==0.4.13' anthropic==2.9.0 \
  mini-swe-agent==2.4.6
if command -v npm > /dev/null; then
  npm install --silent --no-audit --no-fund --prefix .venvs/agents/npm @openai/codex@0.169.0 @mariozechner/pi-coding-agent@0.73.1 \
    @anthropic-ai/claude-code@2.1.197 openai@6.49.0
else
  echo "npm is not installed: the tests of Codex, pi, Claude Code and the openai client of Node will be skipped"
fi
