#!/usr/bin/env bash
# wheel.sh cpu|cuda [BUILD]: compiles gka, without its tests, and packs it into dist/. With BUILD, a folder that is
# built already, that is packed instead.
set -euo pipefail
cd "$(dirname "$0")/.."

kind=$1
build=${2:-build/wheel-$kind}
options=(--config-settings=build-dir="$build")
if [ $# -eq 1 ]; then options+=(--config-settings=cmake.define.GKA_BUILD_TESTS=OFF); fi
if [ "$kind" = cuda ]; then options+=(--config-settings=cmake.define.GKA_CUDA=ON); fi

echo "compiling in $build; the first time takes about a quarter of an hour on two cores"
mkdir -p "$build" dist
log=$build/wheel.log
set +e
.venv/bin/python -m pip wheel --verbose --disable-pip-version-check --no-build-isolation --no-deps --no-index \
  --wheel-dir dist "${options[@]}" . 2>&1 | tee "$log" | grep --line-buffered -E '^ *\[[0-9]+/[0-9]+\]'
status=${PIPESTATUS[0]}
set -e
if [ "$status" -ne 0 ]; then
  tail -40 "$log" >&2
  echo "the wheel was not built; all that was said is in $log" >&2
  exit "$status"
fi
wheel=$(ls -t dist/gka-*.whl | head -1)
echo "$wheel ($(du -h "$wheel" | cut -f1)), for torch $(.venv/bin/python -c 'import torch; print(torch.__version__)'): pip install $wheel"
