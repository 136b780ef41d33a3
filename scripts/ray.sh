#!/usr/bin/env bash
# Tries the package for Python with Ray on two nodes: data sets and a server, with workers, replicas
# and a node killed. The nodes are network namespaces of this machine, joined by a virtual cable, in
# a PID namespace that ends with the script. Needs Linux, root, ip of iproute2, Python 3.10 or
# newer, and the network for packages.
#
# usage: scripts/ray.sh [WHEEL]    default: the newest of target/wheels; without one, it is built
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

isolated=(unshare --net --pid --mount --fork --kill-child --mount-proc)
if ! command -v ip >/dev/null || ! "${isolated[@]}" true 2>/dev/null; then
    echo "expected root, ip and the right to make network and PID namespaces" >&2
    exit 1
fi
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
wheel=${1-$(find "$target/wheels" -name '*.whl' -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -n 1 | cut -d ' ' -f 2-)}
folder=$target/python/ray
rm -rf "$folder"
python3 -m venv "$folder"
install=("$folder/bin/pip" install -q --disable-pip-version-check)
if [ -z "$wheel" ]; then
    "${install[@]}" 'maturin>=1.9,<2'
    (cd crates/python && "$folder/bin/maturin" build -q --profile wheel --locked -o "$target/wheels")
    wheel=$(echo "$target"/wheels/*.whl)
fi
"${install[@]}" "$wheel" 'ray[data,serve]==2.60.*' openai

# Two nodes "a" and "b"; then the tests, on "a".
on_two_nodes() {
    mount -t tmpfs none /run
    ip netns add a
    ip netns add b
    ip link add cable netns a type veth peer name cable netns b
    local node
    for node in a b; do
        ip -n $node address add "10.77.0.$([ $node = a ] && echo 1 || echo 2)/24" dev cable
        ip -n $node link set lo up
        ip -n $node link set cable up
        # Ray finds its own address by a route to the world.
        ip -n $node route add default dev cable
    done
    ip netns exec a python "$1"
}
export -f on_two_nodes
export PATH=$folder/bin:$PATH
# Short, as paths of sockets are; removed when all processes in it have ended.
RAY_TMPDIR=$(mktemp -d)
trap 'rm -rf "$RAY_TMPDIR"' EXIT
# A token of this cluster alone: Ray would look for the user's.
python3 -c 'import secrets; print(secrets.token_hex())' >"$RAY_TMPDIR/token"
export RAY_TMPDIR RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$RAY_TMPDIR/token
"${isolated[@]}" bash -euo pipefail -c 'on_two_nodes "$1"' - "$PWD/crates/python/tests/test_ray.py"
