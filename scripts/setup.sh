#!/usr/bin/env bash
# Everything the build needs on a Debian machine: its packages, and a .venv with the pinned Python packages. Does only
# what is missing, so a second run takes a moment.
#
#   PYTHON=python3.12 scripts/setup.sh     make .venv with another interpreter
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

install_debian_packages() {
  local missing root=()
  missing=$(missing_packages)
  missing=${missing% }
  [ -n "$missing" ] || return 0
  command -v apt-get >/dev/null ||
    fail "this machine has no apt-get; install what Debian calls $missing by other means and try again."
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
      fail "Debian packages are missing and this user may not install them; have root run: apt-get install $missing"
    root=(sudo)
  fi
  echo "Installing Debian packages: $missing"
  "${root[@]}" apt-get update -qq || echo "setup: apt-get update failed; trying with the lists that are there." >&2
  # shellcheck disable=SC2086  # a list of words on purpose
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing ||
    fail "apt-get could not install $missing; the lines above say why."
}

check_python() {
  $python -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is $($python --version 2>&1), and gka needs Python 3.10 or newer; name another with PYTHON=…"
}

install_python_packages() {
  local stamp=.venv/.requirements.sha256 wanted quiet=(-qq)
  wanted=$(sha256sum <requirements.txt)
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return 0; fi
  if [ ! -x .venv/bin/python ]; then
    echo "Creating .venv with $($python --version)"
    $python -m venv .venv
  fi
  echo "Installing the Python packages of requirements.txt into .venv (the largest is torch: minutes on a slow line)"
  [ -t 1 ] && quiet=()
  .venv/bin/python -m pip install --disable-pip-version-check "${quiet[@]}" -r requirements.txt ||
    fail "pip could not install requirements.txt; without a network, docs/building.md shows a build with what is there."
  printf '%s\n' "$wanted" >"$stamp"
}

install_debian_packages
check_python
install_python_packages
