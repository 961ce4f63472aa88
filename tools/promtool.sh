#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Put Debian's promtool, which checks Prometheus rules and runs their tests, under build/promtool.
# Does nothing where there is one already.
#
# Only this one program is taken out of the package "prometheus": to install that would start a
# server, add a user, and bring a dozen packages that the program does not need. Where it cannot be
# had (another distribution, no network) the tests that need it are skipped, and say so.
set -euo pipefail
cd "$(dirname "$0")/.."

TARGET=build/promtool/promtool

command -v promtool >/dev/null && exit 0
[[ -x $TARGET ]] && exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "no promtool: the tests of the alert rules will be skipped" >&2
    exit 0
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
sudo=()
[[ $(id -u) -eq 0 ]] || sudo=(sudo -n)

download() {
    (cd "$folder" && apt-get download -qq -o APT::Sandbox::User=root prometheus)
}

echo "fetching promtool (Debian's prometheus; once)"
if ! download 2>/dev/null && ! { "${sudo[@]}" apt-get update -qq && download; }; then
    echo "no promtool: the tests of the alert rules will be skipped" >&2
    exit 0
fi
dpkg-deb --fsys-tarfile "$folder"/prometheus_*.deb | tar -xC "$folder" ./usr/bin/promtool
mkdir -p "${TARGET%/*}"
mv "$folder/usr/bin/promtool" "$TARGET"
