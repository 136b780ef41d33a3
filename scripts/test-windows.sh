#!/usr/bin/env bash
# Unit, golden and CLI tests of the Windows build under Wine, on the CPU: paths, locks, renames,
# unbuffered reads, consoles and memory are the system's, and none of it shows in a type-check.
#
# usage: scripts/test-windows.sh [FILTER...]
#
#   FILTER  only tests whose names contain it
#
# Needs Debian's packages gcc-mingw-w64-x86-64 and wine, and
# `rustup target add x86_64-pc-windows-gnu`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

target=x86_64-pc-windows-gnu

# Tests that fail by a gap of Wine 8, not of Windows: filters of names.
WINE_GAPS=(
    # A rename over a file that is open. Windows 10 has it on NTFS.
    injected_faults::an_engine_reopens_
    snapshot::tests::concurrent_writers_do_not_interfere
    pipeline_folder::tests::of_two_writers_one_wins_and_readers_see_whole_contents
    # File::unlock unlocks until ERROR_NOT_LOCKED, for which Wine has another error.
    snapshot::tests::only_stale_temporary_files_are_removed
    # Waits of a millisecond, each of which is a request to a server of Wine's.
    io::tests::bandwidth_of_a_parallel_disk_scales_with_the_depth
    # Runs cargo, which is a program of the host.
    the_package_fits_into_a_registry
    # Budgets near the size of the program. Wine reads the program into memory and touches half of
    # each thread's stack, where Windows maps both.
    devices::auto_selects_a_device_and_reports_the_reason
    inspect::a_failed_plan_is_shown_and_is_no_error
    inspect::an_advised_budget_holds_the_working_set
    pack::a_packed_model_is_used_like_any_other
)

scratch=$(mktemp -d)
finish() {
    wineserver -k 2>/dev/null || true
    rm -rf "$scratch"
}
trap finish EXIT
# Neither .NET nor a browser is wanted, whose installation Wine would offer.
export WINEPREFIX=$scratch/prefix WINEDEBUG=-all WINEDLLOVERRIDES='mscoree=;mshtml='
mkdir "$WINEPREFIX"
# A server that stays saves its start in each test that runs a program.
wineserver -p
wine wineboot --init >/dev/null 2>&1
# Rust's standard library imports it, and Wine has it since version 9.
system32=$WINEPREFIX/drive_c/windows/system32
if [ ! -e "$system32/bcryptprimitives.dll" ]; then
    x86_64-w64-mingw32-gcc -shared -o "$system32/bcryptprimitives.dll" -x c - -ladvapi32 <<'C'
#include <windows.h>
#include <ntsecapi.h>
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T len) {
    return RtlGenRandom(data, len);
}
C
fi

skips=()
for test in "${WINE_GAPS[@]}"; do skips+=(--skip "$test"); done
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER=wine
export MOEFLUX_TEST_GPU=none
# Formats and shapes beyond the usual tables differ by arithmetic, which is that of other systems.
unset MOEFLUX_TEST_FULL
# Tests run the examples, which `--tests` does not build.
cargo build --locked --workspace --target "$target" --examples
cargo test --locked --workspace --no-fail-fast --target "$target" --lib --bins --tests -- \
    "${skips[@]}" "$@"
