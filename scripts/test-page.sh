#!/usr/bin/env bash
# Drives the page of `moeflux serve` in a browser: chat, live panel, hostile text, errors, keys.
#
# usage: scripts/test-page.sh [--pictures] [BINARY]
#
#   --pictures  also writes the pictures of docs/guide/server.md
#   BINARY      default: target/release/moeflux
#
# Debian's chromium is installed through apt-get where that needs no password, npm's puppeteer-core
# into a temporary folder. Where one of them cannot be had, a line says so; with CI=true that is a
# failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

pictures=()
if [ "${1-}" = --pictures ]; then
    pictures=("$PWD/docs/guide")
    shift
fi
binary=$(realpath "${1:-target/release/moeflux}")
[ -x "$binary" ] || { echo "$binary: there is no such program: cargo build --release" >&2; exit 2; }

skip() {
    echo "skipped: the page in a browser, as there is no $1"
    [ "${CI-}" != true ]
    exit
}

find_browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }

command -v npm >/dev/null || skip "npm"
if ! browser=$(find_browser) && command -v apt-get >/dev/null; then
    root=()
    [ "$(id -u)" = 0 ] || root=(sudo -n)
    if "${root[@]}" true 2>/dev/null; then
        { "${root[@]}" apt-get -qq update && DEBIAN_FRONTEND=noninteractive "${root[@]}" apt-get -qq install -y \
            --no-install-recommends chromium fonts-dejavu-core; } >/dev/null 2>&1 || true
    fi
    browser=$(find_browser) || skip "chromium"
fi
[ -n "$browser" ] || skip "chromium"

script=$PWD/scripts/test-page.mjs
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
cd "$temporary"
npm install --no-fund --no-audit --ignore-scripts --silent puppeteer-core@24 >/dev/null 2>&1 ||
    skip "puppeteer-core"
# The built-in model is written to the cache folder.
export XDG_CACHE_HOME=$temporary/cache
mkdir "$XDG_CACHE_HOME"
# Measures the disk, whose speed the page shows.
"$binary" plan >/dev/null
node "$script" "$binary" "$browser" "${pictures[@]}"
