#!/usr/bin/env bash
# Everything that must hold before a change lands: formatting, lints, documentation, the foreign
# targets, the tests. Needs no weights and, where the tools are installed, no network.
#
# usage: scripts/test.sh [--full] [--only TEXT]
#
#   --full       also runs cargo-deny, cargo-fuzz and mlx-lm's fuzzer where they are installed,
#                builds and tries the packages, Ray on two nodes, the page in a browser, lints for
#                the foreign targets, the tests of the Windows build under Wine, all weight formats,
#                the whole conformance table on every kind of GPU below, and the tests once more in
#                release mode with more property cases: some four hours on 2 cores
#   --only TEXT  only sections whose names contain TEXT, such as --full --only Windows
#
# Kernels run on a software Vulkan driver in subgroups of 8. A sample of the conformance table also
# runs in subgroups of 4 and 16, without subgroups, and as Metal: translated to its language and
# compiled as C++ (crates/compute/tests/conformance/metal).
#
# Missing rustup components and targets are installed through rustup; the driver, the C++ compiler,
# MinGW and Wine through apt-get, where that needs no password. A tool that cannot be installed is
# skipped with a line that says so; with CI=true that is a failure. The tests come last: their closing
# lines end the output.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

FOREIGN_TARGETS=(aarch64-apple-darwin x86_64-pc-windows-msvc)

full=false only='' any=false
while [ $# -gt 0 ]; do
    case "$1" in
        --full) full=true ;;
        --only) only=${2:?"--only needs a part of a section's name"}; shift ;;
        *) sed -n '/^# usage/,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
    shift
done

# Debug information and incremental state cost a cold build time and disk, and have no use in CI.
if [ "${CI-}" = true ]; then export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0; fi

heading() { printf '\n== %s\n' "$1"; }

# Whether --only leaves a section in.
selected() {
    case $1 in *"$only"*) any=true ;; *) return 1 ;; esac
}

# step NAME COMMAND...: runs the command under a heading; reports its duration, or its failure.
step() {
    local name=$1 start=$SECONDS
    shift
    heading "$name"
    trap 'printf "FAILED: %s\n" "'"$name"'" >&2' EXIT
    "$@"
    trap - EXIT
    printf -- '-- %s: %d s\n' "$name" $((SECONDS - start))
}

# section NAME COMMAND...: the same for what --only can leave out.
section() { if selected "$1"; then step "$@"; fi; }

has_target() { [ -d "$(rustc --print sysroot)/lib/rustlib/$1/lib" ]; }

# Installs a target through rustup if it is missing.
add_target() { has_target "$1" || { command -v rustup >/dev/null && rustup target add "$1" && has_target "$1"; }; }

# Installs Debian's packages where that needs no password; otherwise they stay missing.
add_packages() {
    [ $# -gt 0 ] && command -v apt-get >/dev/null || return 0
    local root=()
    [ "$(id -u)" = 0 ] || root=(sudo -n)
    "${root[@]}" true 2>/dev/null || return 0
    { "${root[@]}" apt-get -qq update && DEBIAN_FRONTEND=noninteractive "${root[@]}" apt-get -qq install -y \
        --no-install-recommends "$@"; } >/dev/null || true
}

# Installs missing components through rustup; sets `targets` to the installed foreign targets.
toolchain() {
    command -v cargo >/dev/null || { echo "cargo is missing: install Rust from https://rustup.rs" >&2; return 1; }
    rustc --version
    cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
    cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
    targets=()
    for target in "${FOREIGN_TARGETS[@]}"; do
        if add_target "$target"; then
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

# The library must build without its optional dependencies.
library_without_features() {
    cargo check --locked -p moeflux --lib --no-default-features
    ! cargo tree --locked -p moeflux --no-default-features --edges normal --prefix none |
        grep -E '^(io-uring|llguidance|minijinja|tokenizers|wgpu)'
}

# No crate is built that needs a C toolchain. cargo-deny bans the same ones, where it is installed.
without_c() {
    ! cargo tree --locked --workspace --all-features --target all --prefix none |
        grep -E '^(bindgen|cc|cmake|onig_sys|openssl-sys|ring) '
}

# Type-checks all crates for the foreign targets, without a linker or an SDK; with --full also lints.
foreign() {
    local arguments=()
    for target in "${targets[@]}"; do arguments+=(--target "$target"); done
    if [ ${#arguments[@]} -eq 0 ]; then return; fi
    if $full; then
        cargo clippy --locked --workspace --lib --bins "${arguments[@]}" -- -D warnings
    else
        cargo check --locked --workspace --lib --bins "${arguments[@]}"
    fi
}

# Path of the software Vulkan driver's description, if it is installed.
software_vulkan() { find /usr/share/vulkan/icd.d /etc/vulkan/icd.d -name 'lvp_icd*.json' 2>/dev/null | head -n 1; }

# Sets `vulkan` and `cxx` to the software Vulkan driver and the C++ compiler, installing them where
# that needs no password.
gpu_tools() {
    local missing=()
    [ "$(uname)" != Linux ] || [ -n "$(software_vulkan)" ] || missing+=(mesa-vulkan-drivers)
    command -v "${CXX:-g++}" >/dev/null || missing+=(g++)
    add_packages ${missing[@]+"${missing[@]}"}
    vulkan=$(software_vulkan)
    cxx=$(command -v "${CXX:-g++}" || true)
    if [ "${CI-}" = true ] && { [ -z "$cxx" ] || { [ "$(uname)" = Linux ] && [ -z "$vulkan" ]; }; }; then
        echo "missing, and cannot be installed: ${missing[*]}" >&2
        return 1
    fi
    [ -n "$vulkan" ] || echo "skipped: kernels on a software Vulkan driver (apt-get install mesa-vulkan-drivers)"
    [ -n "$cxx" ] || echo "skipped: kernels as Metal runs them (apt-get install g++)"
    # Drivers want a folder for sockets.
    if [ -z "${XDG_RUNTIME_DIR-}" ]; then
        XDG_RUNTIME_DIR=$(mktemp -d)
        export XDG_RUNTIME_DIR
    fi
}

# conformance VARIABLE=VALUE... [-- FILTER...]: the conformance table on the GPU alone. The whole
# workspace is named, so that cargo builds it with the same features as the other tests.
conformance() {
    local variables=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do variables+=("$1"); shift; done
    env MOEFLUX_TEST_CPU=none "${variables[@]}" \
        cargo test --locked -q --workspace --test conformance "$@"
}

# on_vulkan BITS [VARIABLE=VALUE...] [-- FILTER...]: the same on software Vulkan with vector registers
# of BITS bits; a subgroup has one thread for each 32 of them.
on_vulkan() {
    local bits=$1
    shift
    conformance MOEFLUX_TEST_GPU=gpu LP_NATIVE_VECTOR_WIDTH="$bits" VK_DRIVER_FILES="$vulkan" \
        VK_ICD_FILENAMES="$vulkan" "$@"
}

# Tests of the sample: each family of kernels whose code differs between kinds of GPU. Reductions
# differ by subgroup size and without subgroups, GEMM and attention by workgroup memory and
# cooperative matrices. The tests' main run covers the whole table in subgroups of 8.
SAMPLE=(
    matmul::gemv_of_few_rows matmul::gemm_of_many_rows matmul::strided_views
    attention::prefill_in_one_chunk attention::several_sequences
    attention_kinds::long_contexts attention_kinds::sliding_windows
    experts::any_number experts::routed_and_listed experts::experts_with_many_rows
    elementwise:: head_matmul::many_rows latent_attention::absorbed_form
    op_sequences:: recurrent::conv1d recurrent::delta_net_in router::ties router::strided
    segment_attention::scores_of
    top_logits:: top_positions::n_below
)
# Products and attention, for cooperative matrices.
MATRIX_SAMPLE=(
    matmul::gemm_of_many_rows attention::prefill_in_one_chunk experts::experts_with_many_rows
)

# Kernels on the kinds of GPU that the main run leaves out: a sample, or everything with --full.
kinds_of_gpu() {
    local sample=(-- "${SAMPLE[@]}") matrices=(-- "${MATRIX_SAMPLE[@]}")
    if $full; then sample=(--) matrices=(-- rows attention experts sequences); fi
    if [ -n "$vulkan" ]; then
        section "kernels in subgroups of 4" on_vulkan 128 "${sample[@]}"
        section "kernels in subgroups of 16" on_vulkan 512 "${sample[@]}"
        section "kernels without subgroups" on_vulkan 256 MOEFLUX_TEST_GPU_ISA=plain "${sample[@]}"
    fi
    if [ -n "$cxx" ]; then
        section "kernels on Metal" conformance MOEFLUX_TEST_GPU=metal-on-cpu "${sample[@]}"
        section "kernels with cooperative matrices, emulated" \
            conformance MOEFLUX_TEST_GPU=matrices-on-cpu "${matrices[@]}"
        if $full; then
            section "kernels on Metal without simdgroups" \
                conformance MOEFLUX_TEST_GPU=metal-on-cpu MOEFLUX_TEST_GPU_ISA=plain
        fi
    fi
}

# run_tests ARGUMENT...: nextest if it is installed, after the doctests, which it cannot run, and the
# conformance table, whose tests share devices and compiled kernels in one process.
run_tests() {
    if cargo nextest --version >/dev/null 2>&1; then
        cargo test --locked --workspace --doc "$@"
        local conforms=true
        cargo test --locked -q --workspace --test conformance "$@" || conforms=false
        cargo nextest run --locked --workspace --no-fail-fast -E 'not binary(conformance)' "$@"
        $conforms || { echo "FAILED: the conformance table, see above" >&2; return 1; }
    else
        cargo test --locked --workspace --no-fail-fast "$@"
    fi
}

# Licences, bans and sources; advisories too, where their database can be had.
dependencies() {
    cargo deny --locked check bans licenses sources
    if cargo deny --locked fetch db >/dev/null 2>&1; then
        cargo deny --locked check advisories
    elif [ "${CI-}" = true ]; then
        echo "the database of advisories cannot be had" >&2
        return 1
    else
        echo "skipped: advisories, as their database cannot be had"
    fi
}

# Tests of the Windows build, where its tools are installed or can be.
windows_under_wine() {
    local missing=() packages=()
    command -v x86_64-w64-mingw32-gcc >/dev/null || packages+=(gcc-mingw-w64-x86-64)
    command -v wine >/dev/null || packages+=(wine wine64)
    add_packages ${packages[@]+"${packages[@]}"}
    add_target x86_64-pc-windows-gnu || missing+=(x86_64-pc-windows-gnu)
    for tool in x86_64-w64-mingw32-gcc wine; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    if [ ${#missing[@]} -eq 0 ]; then
        scripts/test-windows.sh
    elif [ "${CI-}" = true ]; then
        echo "missing, and cannot be installed: ${missing[*]}" >&2
        return 1
    else
        echo "skipped: ${missing[*]} cannot be installed"
    fi
}

page_in_a_browser() {
    cargo build --locked --release
    scripts/test-page.sh target/release/moeflux
}

fuzz() {
    cargo build --locked --release
    python3 scripts/fuzz-golden.py target/release/moeflux --seeds 0:40
}

# The other sections need what these two find.
step toolchain toolchain
step "GPU tools" gpu_tools
section format cargo fmt --all --check
section lints cargo clippy --locked --workspace --all-targets -- -D warnings
section "library without features" library_without_features
section "build without C" without_c
section "foreign targets" foreign
section documentation documentation
# --full needs all formats and models from here on, also on the kinds of GPU.
if $full; then export MOEFLUX_TEST_FULL=1; fi
kinds_of_gpu

# The main run uses this machine's GPU, in CI the software driver in subgroups of 8. CI requires one.
if [ "${CI-}" = true ]; then
    export MOEFLUX_TEST_GPU=gpu
    if [ -n "$vulkan" ]; then export VK_DRIVER_FILES=$vulkan VK_ICD_FILENAMES=$vulkan LP_NATIVE_VECTOR_WIDTH=256; fi
fi

if $full; then
    if cargo deny --version >/dev/null 2>&1; then
        section "licences and advisories" dependencies
    else
        echo "skipped: cargo-deny is not installed"
    fi
    if cargo +nightly fuzz --version >/dev/null 2>&1; then
        section "fuzzing of parsers" scripts/fuzz.sh 60
    else
        echo "skipped: fuzzing of parsers (rustup toolchain install nightly; cargo install cargo-fuzz)"
    fi
    section "Windows, under Wine" windows_under_wine
    section "packages" scripts/test-packages.sh
    section "the package for Python" scripts/python.sh
    if command -v ip >/dev/null && unshare --net --pid --mount --fork true 2>/dev/null; then
        section "Ray on two nodes" scripts/ray.sh
    else
        echo "skipped: Ray on two nodes (needs root, namespaces, and ip of iproute2)"
    fi
    if cargo cinstall --version >/dev/null 2>&1; then
        section "the C library" scripts/capi.sh
    else
        echo "skipped: cargo-c is not installed (cargo install cargo-c)"
    fi
    section "the page in a browser" page_in_a_browser
    if python3 -c 'import mlx_lm' 2>/dev/null; then
        section "random checkpoints against mlx-lm" fuzz
    else
        echo "skipped: mlx-lm is not installed"
    fi
    section tests run_tests
    release="tests in release mode"
    if selected "$release"; then
        export PROPTEST_CASES="${PROPTEST_CASES:-4096}"
        heading "$release, $PROPTEST_CASES cases per property"
        run_tests --release
    fi
elif selected tests; then
    heading tests
    run_tests
fi
$any || { echo "no section's name contains \"$only\"" >&2; exit 2; }
