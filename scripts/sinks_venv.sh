#!/bin/sh
# Creates a virtual environment with Trackio and MLflow, for the tests of these sinks.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/sinks/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/sinks
.venvs/sinks/bin/python -m pip install --quiet trackio==0.43.0 mlflow-skinny==3.17.2 'pydantic>=2.9' 'aiohttp>=3.11'
