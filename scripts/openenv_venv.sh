#!/bin/sh
# Creates a virtual environment with the openenv package, for tests/services/test_envs_openenv_package.py.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/openenv/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/openenv
.venvs/openenv/bin/python -m pip install --quiet openenv==0.10.0 aiohttp msgspec numpy xxhash
