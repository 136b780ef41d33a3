#!/usr/bin/env bash
# JSON-Schema-Test-Suite through the grammars of answers: sampled answers of every accepted schema
# must validate, and every refused schema must name its keyword. Prints what does not hold.
#
# usage: scripts/schema-suite.sh PATH [--refused]
#
# PATH is the suite's folder `tests`, such as json/tests in the source distribution of the Python
# package jsonschema. --refused prints every refusal. The program is outside the workspace, in
# schema-suite/.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -d "${1-}/draft2020-12" ] || { sed -n '/^# usage/,/^# package/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
suite=$(cd "$1" && pwd)
cd "$here/schema-suite"
exec cargo run --locked --release --quiet -- "$suite" "${@:2}"
