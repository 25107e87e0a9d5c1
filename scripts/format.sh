#!/usr/bin/env bash
# Formats every source of the project, or with --check says what is not formatted and lints the Python.
set -euo pipefail
cd "$(dirname "$0")/.."

mapfile -t cpp < <(find include src tests bench examples -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.c')
python=(python tests bench experiments examples)

if [ "${1:-}" = --check ]; then
  echo "clang-format: ${#cpp[@]} files"
  .venv/bin/clang-format --dry-run -Werror "${cpp[@]}"
  .venv/bin/ruff format --check "${python[@]}"
  .venv/bin/ruff check "${python[@]}"
else
  .venv/bin/clang-format -i "${cpp[@]}"
  .venv/bin/ruff check --fix-only --quiet "${python[@]}"
  .venv/bin/ruff format "${python[@]}"
fi
