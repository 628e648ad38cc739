#!/bin/bash
# Fetches the x86-64 libraries that tests link with into a directory of their own, so that another kind of machine can build and, under
# qemu, run the x86-64 tests. usage: tools/x86_sysroot.sh DIRECTORY   (Debian; nothing on the machine itself is changed)
set -euo pipefail
sysroot=$(mkdir -p "$1" && cd "$1" && pwd)
[ ! -e "$sysroot/complete" ] || exit 0
mkdir -p "$sysroot/apt/lists/partial" "$sysroot/apt/cache/archives/partial" "$sysroot/debs"
: >"$sysroot/apt/status"
options=(-qq -o APT::Architecture=amd64 -o APT::Architectures=amd64 -o Dir::State="$sysroot/apt" -o Dir::State::Lists="$sysroot/apt/lists"
    -o Dir::State::status="$sysroot/apt/status" -o Dir::Cache="$sysroot/apt/cache" -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
(cd "$sysroot/debs" && apt-get "${options[@]}" download libcmocka0 libcmocka-dev libjansson4 libjansson-dev)
for package in "$sysroot"/debs/*.deb; do dpkg -x "$package" "$sysroot"; done
touch "$sysroot/complete"
