#!/usr/bin/env bash
# Everything that must hold before a change lands: formatting, lints, documentation, the foreign targets, the tests.
# Needs no weights and, where the tools are installed, no network.
#
# usage: scripts/test.sh [--full]
#
#   --full   also runs cargo-deny and mlx-lm's fuzzer where they are installed, and the tests once more in release
#            mode with more property cases
#
# Missing rustup components and targets are installed through rustup. A foreign target that cannot be installed is
# skipped with a line that says so; with CI=true that is a failure. The tests come last: their closing lines end
# the output.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

FOREIGN_TARGETS=(aarch64-apple-darwin x86_64-pc-windows-msvc)

full=false
case "${1-}" in
    "") ;;
    --full) full=true ;;
    *) sed -n '/^# usage/,/^# the output/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

# Debug information of the tests and incremental state cost a cold build time and disk, and help nobody in CI.
if [ "${CI-}" = true ]; then
    export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0
fi

heading() { printf '\n== %s\n' "$1"; }

# section NAME COMMAND...: runs the command under a heading and says how long it took, or that it failed.
section() {
    local name=$1 start=$SECONDS
    shift
    heading "$name"
    trap 'printf "FAILED: %s\n" "'"$name"'" >&2' EXIT
    "$@"
    trap - EXIT
    printf -- '-- %s: %d s\n' "$name" $((SECONDS - start))
}

has_target() { [ -d "$(rustc --print sysroot)/lib/rustlib/$1/lib" ]; }

# Installs what is missing where rustup can; leaves the foreign targets that are there in `targets`.
toolchain() {
    command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs" >&2; return 1; }
    rustc --version
    cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
    cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
    targets=()
    for target in "${FOREIGN_TARGETS[@]}"; do
        has_target "$target" || { command -v rustup >/dev/null && rustup target add "$target"; } || true
        if has_target "$target"; then
            targets+=("$target")
        elif [ "${CI-}" = true ]; then
            echo "the target $target is missing and cannot be installed" >&2
            return 1
        else
            echo "skipped: $target is not installed (rustup target add $target)"
        fi
    done
}

documentation() { RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --lib --no-deps; }

# A crate of ours for every target that we support type-checks, without a linker or an SDK for it.
foreign() { cargo clippy --locked --workspace --lib --bins --target "$1" -- -D warnings; }

# run_tests ARGUMENT...: nextest where it is installed, after the examples in the documentation, which it cannot run.
run_tests() {
    if cargo nextest --version >/dev/null 2>&1; then
        cargo test --locked --workspace --doc "$@"
        cargo nextest run --locked --workspace --no-fail-fast "$@"
    else
        cargo test --locked --workspace --no-fail-fast "$@"
    fi
}

fuzz() {
    cargo build --locked --release
    python3 scripts/fuzz-golden.py target/release/moeflux --seeds 0:40
}

section toolchain toolchain
section format cargo fmt --all --check
section lints cargo clippy --locked --workspace --all-targets -- -D warnings
for target in "${targets[@]}"; do
    section "lints for $target" foreign "$target"
done
section documentation documentation

if $full; then
    if cargo deny --version >/dev/null 2>&1; then
        section "licences and advisories" cargo deny check
    else
        echo "skipped: cargo-deny is not installed"
    fi
    if python3 -c 'import mlx_lm' 2>/dev/null; then
        section "random checkpoints against mlx-lm" fuzz
    else
        echo "skipped: mlx-lm is not installed"
    fi
    section tests run_tests
    export PROPTEST_CASES="${PROPTEST_CASES:-4096}"
    heading "tests in release mode, $PROPTEST_CASES cases per property"
    run_tests --release
else
    heading tests
    run_tests
fi
