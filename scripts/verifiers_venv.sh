#!/bin/sh
# Creates a virtual environment with verifiers, for tests/services/test_rollout_verifiers.py. Its harnesses need uv.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/verifiers/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/verifiers
.venvs/verifiers/bin/python -m pip install --quiet verifiers==0.4.0 uv==0.13.8
