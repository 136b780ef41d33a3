#!/usr/bin/env bash
# Fuzzes every parser with cargo-fuzz, which needs a nightly toolchain. An input that makes a parser
# panic, take 1 GiB or 10 seconds is left in fuzz/artifacts; a small copy of it belongs in
# fuzz/corpus, which a stable test reads on every run.
#
# usage: scripts/fuzz.sh [SECONDS [TARGET...]]
#
# SECONDS is the time of all targets together, by default 60.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../fuzz"

total=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=($(cd fuzz_targets && printf '%s\n' *.rs | sed 's/\.rs$//'))
each=$((total / ${#targets[@]}))
[ "$each" -gt 0 ] || each=1

# Found inputs go to a copy, so that the corpus stays small.
found=$(mktemp -d)
trap 'rm -rf "$found"' EXIT
cargo +nightly fuzz build
for target in "${targets[@]}"; do
    cp -r "corpus/$target" "$found/"
    cargo +nightly fuzz run "$target" "$found/$target" -- \
        -max_total_time="$each" -timeout=10 -rss_limit_mb=1024 -malloc_limit_mb=1024 -verbosity=0
done
