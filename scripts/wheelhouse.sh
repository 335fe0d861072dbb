#!/bin/sh
# Downloads wheels for a machine without a package index: the dependencies of this package with the given extras, without torch
# (such machines have a build for their own hardware). Copy the folder and install with
#   pip install --no-index --find-links wheelhouse 'rollbook[EXTRAS]'
# PYTHON_VERSION and PLATFORM describe the target machine; EXTRAS are the extras to include; OUT is the output folder.
set -eu
cd "$(dirname "$0")/.."
python_version="${PYTHON_VERSION:-312}"
platform="${PLATFORM:-manylinux_2_28_x86_64}"
extras="${EXTRAS:-rollout,train}"
out="${OUT:-wheelhouse}"
python="${PYTHON:-python3}"
mkdir -p "$out"
# The requirements of the package and the extras, without torch.
wanted="$out/requirements.txt"
"$python" - "$extras" "$python_version" > "$wanted" <<'PY'
import re
import sys
import tomllib

extras, version = sys.argv[1].split(","), sys.argv[2]
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
pending, seen, found = [*project["dependencies"]], set(), []
names = [extra for extra in extras if extra]
while names:
    name = names.pop()
    if name in seen:
        continue
    seen.add(name)
    if name not in project["optional-dependencies"]:
        sys.exit(f"EXTRAS: unknown extra {name!r}; available: {', '.join(project['optional-dependencies'])}")
    pending += project["optional-dependencies"][name]
    names += [n for line in pending for m in re.findall(r"^rollbook\[([^\]]+)\]", line) for n in m.split(",")]
for line in pending:
    if line.startswith(("rollbook[", "torch")):
        continue
    requirement, _, marker = line.partition(";")
    limit = re.search(r"python_version < '3\.(\d+)'", marker)
    if limit and int(version[1:]) >= int(limit.group(1)):
        continue
    found.append(requirement.strip())
print("\n".join(sorted(set(found))))
PY
# Several platform tags: wheels for older systems work on newer ones.
tags=""
for tag in "$platform" ${MORE_PLATFORMS:-manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux_2_12_x86_64 manylinux1_x86_64}; do
  tags="$tags --platform $tag"
done
# One flag per tag.
# shellcheck disable=SC2086
"$python" -m pip download --quiet --dest "$out" --only-binary :all: --python-version "$python_version" $tags \
  --requirement "$wanted" --constraint constraints.txt
# Other packages may depend on torch; the target machine has its own.
rm -f "$out"/torch-*.whl "$out"/nvidia_*.whl "$out"/triton-*.whl
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$out" .
echo "$(ls "$out"/*.whl | wc -l) wheels in $out for Python $python_version on $platform ($extras)"
