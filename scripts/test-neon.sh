#!/bin/sh
# Tests the kernels for AArch64 on another machine, under qemu. Arguments are test filters. Needs
# Debian's packages qemu-user and gcc-aarch64-linux-gnu, and
# `rustup target add aarch64-unknown-linux-gnu`. Takes a quarter of an hour.
# Metal's kernels are compiled for the build machine, and tested there.
# The cortex-a53 has no int8 dot products, so both variants of NEON are tested.
set -eu
cd "$(dirname "$0")/.."
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
for processor in max cortex-a53; do
    echo "== $processor"
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu $processor" \
        cargo test -p moeflux-ops -p moeflux-compute-cpu -p moeflux-compute-gpu -p moeflux-compute \
        --target aarch64-unknown-linux-gnu -- --skip metal:: "$@"
done
