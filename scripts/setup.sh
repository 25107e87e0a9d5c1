#!/usr/bin/env bash
# Everything the build needs on a Debian machine: its packages, and a .venv with the pinned Python packages. Does only
# what is missing, so a second run takes a moment.
#
#   PYTHON=python3.12 scripts/setup.sh     make .venv with another interpreter
#   scripts/setup.sh --for-tests           what tests use besides, as far as it can be had: Chromium for those of the
#                                          server's page, and requirements-test.txt. What is missing skips its tests.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

python=${PYTHON:-python3}
[ -z "${PYTHON:-}" ] || command -v "$python" >/dev/null || fail "PYTHON names $python, which is not there."

# One line per need: the Debian package, and a command that succeeds where the need is met already.
needs() {
  cat <<END
build-essential     command -v g++
cmake               command -v cmake
ninja-build         command -v ninja
ccache              command -v ccache
python3             command -v $python
python3-venv        $python -c 'import venv, ensurepip'
libgtest-dev        installed libgtest-dev
libcli11-dev        installed libcli11-dev
nlohmann-json3-dev  installed nlohmann-json3-dev
libpcre2-dev        installed libpcre2-dev
libssl-dev          installed libssl-dev
zlib1g-dev          installed zlib1g-dev
libzstd-dev         installed libzstd-dev
liblzma-dev         installed liblzma-dev
END
}

installed() { dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed; }

missing_packages() {
  local package probe
  while read -r package probe; do
    eval "$probe" >/dev/null 2>&1 || printf '%s ' "$package"
  done < <(needs)
}

# Whether the packages that are named can be installed here, and through what (as_root); else `why` says why not.
may_install_debian_packages() {
  if ! command -v apt-get >/dev/null; then
    why="this machine has no apt-get; install what Debian calls $* by other means and try again."
    return 1
  fi
  as_root=()
  [ "$(id -u)" -ne 0 ] || return 0
  as_root=(sudo)
  command -v sudo >/dev/null && return 0
  why="Debian packages are missing and this user may not install them; have root run: apt-get install $*"
  return 1
}

# The same packages, installed; else `why` says why not.
apt_install() {
  may_install_debian_packages "$@" || return 1
  echo "Installing Debian packages: $*"
  "${as_root[@]}" apt-get update -qq || echo "setup: apt-get update failed; trying with the lists that are there." >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" && return 0
  why="apt-get could not install $*; the lines above say why."
  return 1
}

install_debian_packages() {
  local missing
  read -r -a missing <<<"$(missing_packages)"
  [ ${#missing[@]} -eq 0 ] || apt_install "${missing[@]}" || fail "$why"
}

check_python() {
  $python -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is $($python --version 2>&1), and gka needs Python 3.10 or newer; name another with PYTHON=…"
}

# check_version NAME FOUND OLDEST ADVICE
check_version() {
  [ "$(printf '%s\n' "$2" "$3" | sort -V | head -1)" = "$3" ] || fail "$1 is $2, and gka needs $3 or newer; $4"
}

check_compilers() {
  check_version cmake "$(cmake --version | sed -n '1s/[^0-9]*//p')" 3.25 "pip install cmake has one."
  [ -n "${CXX:-}" ] || # of another one cmake says so itself
    check_version g++ "$(g++ -dumpversion)" 12 "install another and name it (CXX=g++-12)."
}

# Of a file of pinned versions, unless the last time it was this very file.
pip_install() {
  local file=$1 stamp=.venv/.$(basename "$1" .txt).sha256 wanted quiet=(-qq)
  wanted=$(sha256sum <"$file")
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return 0; fi
  echo "Installing the Python packages of $file into .venv$2"
  [ -t 1 ] && quiet=()
  .venv/bin/python -m pip install --disable-pip-version-check "${quiet[@]}" -r "$file" || return 1
  printf '%s\n' "$wanted" >"$stamp"
}

install_python_packages() {
  if [ ! -x .venv/bin/python ]; then
    echo "Creating .venv with $($python --version)"
    $python -m venv .venv
  fi
  pip_install requirements.txt " (the largest is torch: minutes on a slow line)" ||
    fail "pip could not install requirements.txt; without a network, docs/building.md shows a build with what is there."
}

install_for_tests() {
  local browser
  for browser in chromium chromium-browser google-chrome ""; do # as tests/serve/browser.py looks for it
    [ -z "$browser" ] || ! command -v "$browser" >/dev/null || break
  done
  [ -n "$browser" ] || apt_install chromium || echo "setup: tests of the server's page will skip: $why"
  pip_install requirements-test.txt "" ||
    echo "setup: pip could not install requirements-test.txt; tests that need those packages will skip."
}

case "${1:-}" in
"") ;;
--for-tests)
  install_for_tests
  exit 0
  ;;
*) fail "'$1' is not known; it takes --for-tests or nothing." ;;
esac
install_debian_packages
check_compilers
check_python
install_python_packages
