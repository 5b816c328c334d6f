#!/bin/bash
# Runs Bazel in this repository, and installs it first where it can: tools/bazel.sh test //...
#
# Bazelisk does, or any Bazel 6 or 7. Debian's own Bazel does too, together with three more of its packages (see debian_bazel.bzl).
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-platforms)

usable() {
  bazel=$(command -v bazel || command -v bazelisk) || return
  [[ $("$bazel" --version) != *no_version ]] || dpkg -s "${packages[@]}" &>/dev/null
}

install() {
  local root=()
  [ "$(id -u)" = 0 ] || root=(sudo -n)
  command -v apt-get >/dev/null && "${root[@]}" true 2>/dev/null || return
  echo "tools/bazel.sh: installing ${packages[*]} with apt-get" >&2
  "${root[@]}" apt-get update -qq &&
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${packages[@]}"
} >&2 </dev/null

if ! usable; then
  if ! install || ! usable; then
    cat >&2 <<END
tools/bazel.sh: there is no Bazel here that works. Install one of
  - Bazelisk:     npm install -g @bazel/bazelisk
  - Debian's own: sudo apt-get install ${packages[*]}
and try again.
END
    exit 1
  fi
fi
exec "$bazel" "$@"
