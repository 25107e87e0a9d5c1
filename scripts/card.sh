#!/usr/bin/env bash
# card.sh [STAGE…]: what only a machine with an NVIDIA card can tell, in the order of its worth. It needs nvcc, cmake,
# ninja and a python3 with torch; no network, no .venv.
#
#   build    what the stages named with it need, for this machine's card: the libraries and the program, test programs
#            where `tests` is named too (16 cores: 236 s with them on 2026-11-18)
#   tests    the C++ and Python tests that use the card; then the kernels' once more with all that is on trial
#   trials   bench/trials.py: kernels on trial beside what they would replace, a process for each
#   times    bench/gpu.py, bench/rivals.py
#   serve    gka bench serve: 440M, and the 8B hybrid
#   train    gka bench train: 440M beside attention at 4K, 16K and 64K
#
# Without a name: build, tests and trials; `build` alone builds for all of them. A stage that fails is said and the next
# one begins; the end status is 1 then. What hangs is stopped: a stage, and each of its commands, has so many seconds and
# no more. What a stage prints goes to LOGS/STAGE.log, the end of it to the screen.
#
#   GKA_CARD_BUILD=FOLDER     where to build (build/card)
#   GKA_CARD_PACKAGES=FOLDER  .deb and .whl files to install first, as root: CLI11, nlohmann-json, PCRE2, GoogleTest;
#                             pytest and what it needs
#   ARCHITECTURES=LIST        what nvcc compiles for (90-real, which is Hopper)
#   LIMIT=SECONDS             for each stage, in place of its own limit
#   LOGS=FOLDER               (build/card/logs)
#   LINES=N                   of a stage's log on the screen (40)
set -uo pipefail
cd "$(dirname "$0")/.."

build=${GKA_CARD_BUILD:-build/card}
mkdir -p "$build"
build=$(cd "$build" && pwd)
logs=${LOGS:-$build/logs}
mkdir -p "$logs"
python=${PYTHON:-python3}
failed=0
declare -A limits=([build]=480 [tests]=480 [trials]=300 [times]=240 [serve]=300 [train]=300) # seconds

# within SECONDS COMMAND…: for at most so long, and never beyond the end of the stage.
within() {
  local most=$1 left=$((ends - SECONDS)) status
  shift
  [ "$most" -le $left ] || most=$left
  if [ "$most" -le 0 ]; then
    echo "card: no time is left for: $*"
    return 124
  fi
  timeout --kill-after=5 "$most" "$@"
  status=$?
  [ $status -ne 124 ] && [ $status -ne 137 ] || echo "card: stopped after $most s: $*"
  return $status
}

install_packages() {
  [ -n "${GKA_CARD_PACKAGES:-}" ] || return 0
  # Their own needs (documentation, other libraries) are not there and not needed.
  find "$GKA_CARD_PACKAGES" -name '*.deb' -exec dpkg -i --force-depends {} +
  find "$GKA_CARD_PACKAGES" -name '*.whl' -exec "$python" -m pip install --no-index --no-deps --break-system-packages {} +
}

build() {
  install_packages
  if [ ! -f "$build/build.ninja" ]; then
    within 120 cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGKA_BUILD_TESTS=ON -DGKA_PRECOMPILE=ON -DGKA_WERROR=OFF \
      -DGKA_CUDA=ON -DGKA_CUDA_ARCHITECTURES="${ARCHITECTURES:-90-real}" -DGKA_PYTHON="$(command -v "$python")" || return 1
  fi
  local targets=(bin/gka bin/gka-torch lib/libgka.so lib/libgka_engine.so lib/libgka_python.so)
  if [ "${stages[*]}" = build ] || [[ " ${stages[*]} " == *" tests "* ]]; then
    targets+=(bin/gka_{kernels,ops,layers,models,infer}_test)
  fi
  within 480 cmake --build "$build" --target "${targets[@]}"
}

# The tests of a program that name a kernel's path on the card, or that look for one themselves.
cpp_tests() {
  within 200 "$build/bin/gka_kernels_test" --gtest_brief=1 --gtest_filter='*/cuda:*/hopper'
}

python_tests() { within 200 "$python" -m pytest -q -p no:cacheprovider "$@"; }

tests() {
  local status=0 program
  cpp_tests || status=1
  for program in ops layers models infer; do
    within 100 "$build/bin/gka_${program}_test" --gtest_brief=1 || status=1
  done
  python_tests tests/ops/test_cuda.py tests/ops/test_recurrence.py tests/ops/test_block.py tests/ops/test_sketch.py \
    tests/python/test_engine_on_a_gpu.py || status=1
  echo "with all that is on trial:"
  GKA_TRIAL=all cpp_tests || status=1
  GKA_TRIAL=all python_tests tests/ops/test_cuda.py tests/python/test_engine_on_a_gpu.py || status=1
  return $status
}

trials() {
  local status=0 names trial
  names=$(within 60 "$python" bench/trials.py --names) || return 1
  for trial in $names; do
    within 150 "$python" bench/trials.py --trial "$trial" || status=1
  done
  return $status
}

times() {
  local status=0
  within 120 "$python" bench/gpu.py --no-write --out "$logs" || status=1
  within 120 "$python" bench/rivals.py --no-write || status=1
  return $status
}

serve() {
  local status=0
  within 150 "$GKA" bench serve configs/440m/gka.json --batches 1,4,8,32,128 --prefill 16k --http 128 || status=1
  within 150 "$GKA" bench serve configs/8b/hybrid.json --batches 64 --contexts 16k --tokens 32 --prefill 16k || status=1
  return $status
}

train() { within 300 "$GKA" bench train configs/440m/gka.json --lengths 4k,16k,64k --batch-tokens 65536 --steps 6; }

run_stage() {
  local stage=$1 started=$SECONDS status
  ends=$((SECONDS + ${LIMIT:-${limits[$stage]}}))
  printf '==> %s\n' "$stage"
  export GKA=$build/bin/gka GKA_LIBRARY=$build/lib/libgka.so PYTHONPATH=$PWD/python PYTHONUNBUFFERED=1 GKA_BUILD_DIR=$build
  "$stage" >"$logs/$stage.log" 2>&1
  status=$?
  tail -n "${LINES:-40}" "$logs/$stage.log"
  printf '    %s: ended with %d after %d s (%s)\n' "$stage" $status $((SECONDS - started)) "$logs/$stage.log"
  [ $status -eq 0 ] || failed=1
}

stages=("$@")
[ $# -gt 0 ] || stages=(build tests trials)
for stage in "${stages[@]}"; do
  case $stage in
  build | tests | trials | times | serve | train) ;;
  *)
    echo "card: '$stage' is no stage; there are build, tests, trials, times, serve and train." >&2
    exit 2
    ;;
  esac
done
if ! nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader 2>/dev/null && [ "${stages[*]}" != build ]; then
  echo "card: nvidia-smi finds no card here, so only 'build' can run: the tests would skip and pass." >&2
  exit 2
fi
for stage in "${stages[@]}"; do run_stage "$stage"; done
exit $failed
