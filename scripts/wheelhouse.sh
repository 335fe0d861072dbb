#!/bin/sh
# Wheels for a machine that reaches no package index: what this package needs, with the given extras, without torch (which such
# machines bring in the build for their own hardware). Carry the folder over and install with
#   pip install --no-index --find-links wheelhouse 'rollbook[EXTRAS]'
# PYTHON_VERSION and PLATFORM name the machine it is for; EXTRAS what will be used there; OUT where the wheels go.
set -eu
cd "$(dirname "$0")/.."
python_version="${PYTHON_VERSION:-312}"
platform="${PLATFORM:-manylinux_2_28_x86_64}"
extras="${EXTRAS:-rollout,train}"
out="${OUT:-wheelhouse}"
python="${PYTHON:-python3}"
mkdir -p "$out"
# The requirements of the package and of the extras, as its own metadata lists them; torch and what only it needs are left out.
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
        sys.exit(f"EXTRAS: {name!r} is no extra of this package; there are {', '.join(project['optional-dependencies'])}")
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
# Several platform tags: a wheel built for an older system serves a newer one.
tags=""
for tag in "$platform" ${MORE_PLATFORMS:-manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux_2_12_x86_64 manylinux1_x86_64}; do
  tags="$tags --platform $tag"
done
# shellcheck disable=SC2086 - one flag a tag
"$python" -m pip download --quiet --dest "$out" --only-binary :all: --python-version "$python_version" $tags \
  --requirement "$wanted" --constraint constraints.txt
# torch comes along where something else asks for it; the other machine has its own.
rm -f "$out"/torch-*.whl "$out"/nvidia_*.whl "$out"/triton-*.whl
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$out" .
echo "$(ls "$out"/*.whl | wc -l) wheels in $out for Python $python_version on $platform ($extras)"
