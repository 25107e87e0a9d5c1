#!/usr/bin/env bash
# build.sh PRESET: configures the preset the first time, and builds what changed since.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=$1
if [ ! -f "build/$preset/build.ninja" ]; then cmake --preset "$preset"; fi
cmake --build --preset "$preset"
