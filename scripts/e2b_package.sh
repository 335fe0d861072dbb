#!/bin/sh
# The package of E2B in a folder of its own (`make test-e2b`): no other test finds it.
set -eu
cd "$(dirname "$0")/.."
"${PYTHON:-python3.11}" -m pip install --quiet --upgrade --target .venvs/e2b e2b==2.63.0
