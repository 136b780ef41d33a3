#!/usr/bin/env bash
# Installs the C library into a folder, and tries it as its users do: by pkg-config from C99, C++11
# and Go, the static library too; its symbols; then all functions with AddressSanitizer and Valgrind.
# Needs cargo-c, pkg-config, a C and a C++ compiler; Go (1.21) and Valgrind are left out with a line
# if they are missing.
#
# usage: scripts/capi.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
root=$target/capi
rm -rf "$root"
mkdir -p "$root/work"
cargo cinstall -p moeflux-capi --release --locked --prefix "$root" --libdir lib
export PKG_CONFIG_PATH=$root/lib/pkgconfig LD_LIBRARY_PATH=$root/lib
ls -l "$root/lib" "$root/include"
flags=$(pkg-config --cflags --libs moeflux)
rules=$PWD/crates/capi/tests/rules.c examples=$PWD/crates/capi/examples
warnings=(-pedantic -Wall -Wextra -Werror)
posix=-D_POSIX_C_SOURCE=200809L
cd "$root/work"

# try NAME COMMAND...: an example's answer.
try() {
    echo "-- $1"
    "${@:2}" | cut -c 1-100 | tee answer
    grep -q '^A Crow was sitting' answer
}

# shellcheck disable=SC2086 # words of pkg-config
{
    cc -std=c99 "${warnings[@]}" "$examples/hello.c" $flags -o hello-c
    c++ -std=c++11 -x c++ "${warnings[@]}" "$examples/hello.c" $flags -o hello-cpp
    cc -std=c99 "${warnings[@]}" "$examples/hello.c" $(pkg-config --cflags moeflux) "$root/lib/libmoeflux.a" \
        $(pkg-config --static --libs-only-l moeflux | sed 's/-lmoeflux//') -o hello-static
    cc -std=c99 "${warnings[@]}" $posix "$rules" $flags -lpthread -o rules
    cc -std=c99 "${warnings[@]}" $posix -g -fsanitize=address,undefined "$rules" $flags -lpthread -o rules-asan
}
try "C99" ./hello-c
try "C++11" ./hello-cpp
try "C99, static" env -u LD_LIBRARY_PATH ./hello-static
if command -v go >/dev/null; then
    mkdir -p go
    cp "$examples/hello.go" go/main.go
    (cd go && printf 'module hello\n\ngo 1.21\n' >go.mod && go build -o ../hello-go .)
    try "Go" ./hello-go
else
    echo "skipped: go is not installed"
fi

others=$(nm -D --defined-only "$root/lib/libmoeflux.so" | awk '$3 !~ /^moeflux_/ { print $3 }')
if [ -n "$others" ]; then
    echo "expected exported symbols that begin with moeflux_, got $others" >&2
    exit 1
fi

./rules
echo "-- AddressSanitizer"
# An opened Vulkan loader keeps memory to the end.
ASAN_OPTIONS=detect_leaks=0 ./rules-asan
if command -v valgrind >/dev/null; then
    echo "-- Valgrind"
    valgrind -q --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
        --error-exitcode=9 ./rules
else
    echo "skipped: valgrind is not installed"
fi
echo "the C library: as it should be"
