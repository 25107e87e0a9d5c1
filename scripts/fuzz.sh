#!/usr/bin/env bash
# Fuzzes every format gka reads for so many minutes, all targets in turns. With clang on the machine by libFuzzer, which
# sees what an input reaches; otherwise by our own driver. What ends a target is left beside as crash-TARGET.
#
#   scripts/fuzz.sh MINUTES [TARGET]
set -euo pipefail
cd "$(dirname "$0")/.."

minutes=${1:?scripts/fuzz.sh MINUTES [TARGET]}
targets=${2:-safetensors config training_file tokenizer tokens run pattern request template}

if ! command -v clang++ >/dev/null; then
  scripts/build.sh asan
  exec nice -n 19 build/asan/bin/gka_fuzz --seconds $((minutes * 60)) --seed "$(date +%s)" ${2:+"$2"}
fi

cmake --preset asan -B build/fuzz -DCMAKE_CXX_COMPILER=clang++ -DGKA_LIBFUZZER=ON
# shellcheck disable=SC2086  # a list of words on purpose
cmake --build build/fuzz --target $(printf 'gka_fuzz_%s ' $targets)
count=$(wc -w <<<"$targets")
failed=
for target in $targets; do
  mkdir -p "build/fuzz/corpus/$target"
  nice -n 19 "build/fuzz/bin/gka_fuzz_$target" -max_total_time=$((minutes * 60 / count + 1)) -timeout=60 \
    -artifact_prefix="crash-$target-" "build/fuzz/corpus/$target" "tests/fuzz/corpus/$target" || failed+=" $target"
done
[ -z "$failed" ] || { echo "fuzz: something was found in$failed; the inputs are crash-TARGET-*" >&2; exit 1; }
