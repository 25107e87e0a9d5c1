#!/usr/bin/env bash
# Compiles the CUDA kernels where there is a CUDA compiler; running them takes a GPU, and `ctest --preset cuda` there.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v "${CUDACXX:-nvcc}" >/dev/null; then
  echo "skipped: no nvcc on this machine, so the CUDA kernels were not compiled"
  exit 0
fi
scripts/build.sh cuda-check
