#!/bin/sh
# The package of Modal in a folder of its own (`make test-modal`): no other test finds it.
set -eu
cd "$(dirname "$0")/.."
"${PYTHON:-python3.11}" -m pip install --quiet --upgrade --target .venvs/modal modal==1.6.4
