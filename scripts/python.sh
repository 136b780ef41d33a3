#!/usr/bin/env bash
# Builds the package for Python, and tries it in empty environments: its examples, its tests and its
# types; then with lm-evaluation-harness. Needs Python 3.10 or newer, and the network for packages.
#
# usage: scripts/python.sh [PYTHON...]    default: python3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

# Limit of a wheel, in bytes.
MAX_BYTES=25000000
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
wheels=$target/wheels
[ $# -gt 0 ] || set -- python3

# environment PYTHON NAME PACKAGE...: an environment with packages; prints its Python.
environment() {
    local python=$1 folder=$target/python/$2
    shift 2
    rm -rf "$folder"
    "$python" -m venv "$folder"
    [ $# = 0 ] || "$folder/bin/pip" install -q --disable-pip-version-check "$@" >&2
    echo "$folder/bin/python"
}

rm -rf "$wheels"
tools=$(environment "$1" tools 'maturin>=1.9,<2' mypy numpy 'pyright[nodejs]' typing_extensions)
(cd crates/python && "$tools" -m maturin build -q --profile wheel --compression-level 9 --locked -o "$wheels")
wheel=$(echo "$wheels"/*.whl)
bytes=$(stat -c %s "$wheel")
echo "$(basename "$wheel"): $bytes bytes"
if [ "$bytes" -gt $MAX_BYTES ]; then
    echo "expected at most $MAX_BYTES bytes" >&2
    exit 1
fi

tests=$PWD/crates/python/tests examples=$PWD/crates/python/examples
(cd crates/python/python && "$tools" -m mypy --strict moeflux)
for example in "$examples"/*.py; do
    MYPYPATH=crates/python/python "$tools" -m mypy --strict "$example"
done
"$tools" -m pip install -q --disable-pip-version-check --no-index "$wheel"
"$tools" -m mypy.stubtest moeflux._native
# Without the modules whose packages are not in this environment.
mapfile -t modules < <(find crates/python/python/moeflux -name '*.py' ! -name '*ray*' ! -name lm_eval.py)
"$tools" -m pyright --pythonpath "$tools" "$examples" "${modules[@]}"

for python; do
    own=$(environment "$python" empty)
    echo "== $("$own" --version)"
    "$own" -m pip install -q --disable-pip-version-check --no-index "$wheel"
    (
        cd "$(dirname "$own")"
        ./python -c 'import time; t = time.perf_counter(); import moeflux; t = time.perf_counter() - t
print(f"import: {t * 1000:.0f} ms, version {moeflux.__version__}")'
        ./moeflux run --temperature 0 -n 8 "Tell me the fable of The Fox and the Crow."
        ./python -m moeflux --version
        ./pip install -q --disable-pip-version-check numpy
        for example in "$examples"/*.py; do
            echo "-- $(basename "$example")"
            ./python "$example" >/dev/null
        done
        ./python "$tests/test_package.py"
    )
done

old=$(command -v qemu-x86_64-static || command -v qemu-x86_64 || true)
if [ -n "$old" ] && [ "$(uname -m)" = x86_64 ]; then
    echo "== a processor of 2003"
    "$old" -cpu qemu64 "$own" -c 'import moeflux
model = moeflux.Model.open("tales-18m", device="cpu", context=256)
print(model.generate("A Fox", temperature=0, max_tokens=8).text)'
else
    echo "skipped: an old processor, as qemu-x86_64 is not installed"
fi

others=$(environment "$1" others 'lm_eval==0.4.13' numpy)
"$others" -m pip install -q --disable-pip-version-check --no-index "$wheel"
(cd "$(dirname "$others")" && ./python "$tests/test_others.py")
