#!/bin/sh
# A virtual environment with the openenv package, for the tests that play against it (tests/services/test_envs_openenv_package.py).
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/openenv/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/openenv
.venvs/openenv/bin/python -m pip install --quiet openenv==0.10.0 aiohttp msgspec numpy
