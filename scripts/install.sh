#!/usr/bin/env bash
# Installs build/cpu as the Python package gka into .venv. pip is pointed at the build folder, so nothing is compiled
# twice, and it is left alone when nothing it would install has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/cpu
stamp=.venv/.gka-installed

changed() { find python include cmake pyproject.toml $build/lib $build/bin/gka $build/bin/gka-torch -type f -newer $stamp; }

if [ -f $stamp ] && [ -z "$(changed)" ]; then
  echo "gka in .venv is up to date"
  exit 0
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --no-index \
  --force-reinstall --config-settings=build-dir=$build .
touch $stamp
