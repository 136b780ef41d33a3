#!/usr/bin/env bash
# Tests of llama.cpp's server against `moeflux serve`, in a network namespace with loopback only
# where that is allowed. Its tests start the server with its options; llama-server.py translates
# them.
#
# usage: scripts/llama-tests.sh [--keep DIR] PATH [FILE...]
#
#   PATH    folder tools/server/tests of llama.cpp, with models/templates beside tools
#   FILE    a part of it, such as test_tokenize; by default the parts with an API that moeflux has
#   --keep  folder for the Python packages of the tests; otherwise a temporary one
#
# Prints for each part the tests and the cases that passed, then the tests that failed. A test has
# passed if all its cases have. Many compare texts and token counts with those of their own model:
# they cannot pass. Needs python3. MOEFLUX and SCRIPTED name the built binary and example; without them,
# cargo builds them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here=$PWD/scripts

usage() { sed -n '/^# usage/,/^# cargo/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

keep=
if [ "${1-}" = --keep ]; then keep=${2-} && shift 2; fi
suite=${1-}
[ -f "$suite/utils.py" ] || usage
suite=$(cd "$suite" && pwd)
shift
files=("$@")
[ ${#files[@]} -gt 0 ] || files=(
    test_compat_anthropic test_chat_completion test_security test_tokenize test_template test_basic
)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${MOEFLUX-}" ] || [ -z "${SCRIPTED-}" ]; then
    cargo build --locked --release
    cargo build --locked --release -p moeflux-server --example scripted
    target=$(cargo metadata --format-version 1 --no-deps |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
    MOEFLUX=$target/release/moeflux SCRIPTED=$target/release/examples/scripted
fi
python=${keep:-$work/python}
if [ ! -x "$python/bin/pytest" ]; then
    python3 -m venv "$python"
    "$python/bin/pip" install -q -r "$suite/requirements.txt"
fi
python=$(cd "$python" && pwd)

export MOEFLUX SCRIPTED LLAMA_TESTS_WORK=$work LLAMA_SERVER_BIN_PATH=$here/llama-server.py
namespace=()
if unshare -n true 2>/dev/null; then
    namespace=(unshare -n)
elif unshare -rn true 2>/dev/null; then
    namespace=(unshare -rn)
else
    echo "network namespaces are not allowed here: the tests may reach the network"
fi
cd "$suite"
for file in "${files[@]}"; do
    "${namespace[@]}" bash -c 'ip link set lo up 2>/dev/null || true; "$@"' - \
        "$python/bin/python" -m pytest -q -p no:cacheprovider --no-header -o log_cli=false \
        --junitxml "$work/$file.xml" "unit/$file.py" >"$work/$file.log" 2>&1 || true
    python3 "$here/llama-server.py" --summary "$file" "$work/$file.xml" ||
        tail -n 20 "$work/$file.log"
done
