#!/usr/bin/env bash
# Rounds of tools by real agents, Claude Code, Codex and OpenCode: each lists a folder, reads a file
# and edits it. The model is scripted (crates/server/examples/scripted.rs): no trained weights.
# Server and agent run in a network namespace with loopback only, where that is allowed.
#
# usage: scripts/agents.sh [--syntax json|xml] [--keep DIR] [claude] [codex] [opencode]
#
#   --syntax  call syntax of the model's template; both by default
#   --keep    installs the agents into DIR and leaves them there; otherwise a temporary folder
#
# Needs node, npm, curl and python3. SCRIPTED names a built example; without it, cargo builds one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '/^# usage/,/^# Needs/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# Context: Claude Code's first request has 76 kB.
CONTEXT=131072
# Seconds for one agent.
PATIENCE=300

# Starts the server with the script $1; sets `url`, `server_pid`.
serve() {
    "$SCRIPTED" --model "$work/model" --script "$1" --port 0 --ctx "$CONTEXT" \
        >"$work/server.log" 2>&1 &
    server_pid=$!
    url=
    for _ in $(seq 300); do
        url=$(sed -n 's|.*served at \(http://[^ ]*\)/v1$|\1|p' "$work/server.log")
        [ -z "$url" ] || return 0
        kill -0 "$server_pid" 2>/dev/null || break
        sleep 0.1
    done
    cat "$work/server.log" >&2
    return 1
}

claude_round() {
    ANTHROPIC_BASE_URL=$url ANTHROPIC_AUTH_TOKEN=none ANTHROPIC_MODEL=scripted \
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1 \
        timeout "$PATIENCE" "$bin/claude" -p "List the folder, read notes.txt and edit it." \
        --allowedTools "Bash(ls:*)" Read Edit
}

codex_round() {
    mkdir -p "$HOME/.codex"
    cat >"$HOME/.codex/config.toml" <<EOF
model = "scripted"
model_provider = "moeflux"
model_context_window = $CONTEXT

[model_providers.moeflux]
name = "moeflux"
base_url = "$url/v1"
wire_api = "responses"
EOF
    timeout "$PATIENCE" "$bin/codex" exec --skip-git-repo-check \
        --dangerously-bypass-approvals-and-sandbox "List the folder, read notes.txt and edit it."
}

opencode_round() {
    cat >opencode.json <<EOF
{
  "provider": {
    "moeflux": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "$url/v1"},
      "models": {"scripted": {"limit": {"context": $CONTEXT, "output": 8192}}}
    }
  },
  "model": "moeflux/scripted",
  "autoupdate": false,
  "share": "disabled"
}
EOF
    timeout "$PATIENCE" "$bin/opencode" run "List the folder, read notes.txt and edit it."
}

# One round of the agent $1 with the call syntax $2; in the namespace.
round() {
    local agent=$1 syntax=$2 start=$SECONDS answer
    [ "$inside" = false ] || ip link set lo up
    export HOME=$work/home
    rm -rf "$work/model" "$work/home" "$work/project"
    mkdir -p "$work/home" "$work/project"
    python3 "$maker" model "$syntax" "$work/model"
    python3 "$maker" notes "$work/project"
    python3 "$maker" script "$syntax" "$agent" "$work/project" >"$work/script.json"
    serve "$work/script.json"
    trap 'kill "$server_pid" 2>/dev/null' EXIT
    if answer=$(cd "$work/project" && "${agent}_round" </dev/null 2>"$work/agent.log") &&
        [[ $answer == *"The round is done."* ]] &&
        python3 "$maker" check "$work/project"; then
        printf 'ok: %s, %s calls, %d s; requests:\n' "$agent" "$syntax" $((SECONDS - start))
        sed -n '/served at/!p' "$work/server.log"
        curl -s "$url/metrics" | sed -n 's/^moeflux_\([a-z]*\)_tokens_total/\1 tokens:/p'
    else
        printf 'FAILED: %s, %s calls\nanswer: %s\n' "$agent" "$syntax" "$answer" >&2
        tail -n 20 "$work/agent.log" "$work/server.log" >&2
        return 1
    fi
}

# Inside the namespace: --round AGENT SYNTAX WORK BIN INSIDE
if [ "${1-}" = --round ]; then
    work=$4 bin=$5 inside=$6 maker=$PWD/scripts/tool-model/make.py
    round "$2" "$3"
    exit
fi

syntaxes=(json xml) agents=() keep=
while [ $# -gt 0 ]; do
    case $1 in
        --syntax) syntaxes=("${2-}"); shift ;;
        --keep) keep=${2-}; shift ;;
        claude | codex | opencode) agents+=("$1") ;;
        *) usage ;;
    esac
    shift
done
[ ${#agents[@]} -gt 0 ] || agents=(claude codex opencode)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "${SCRIPTED-}" ]; then
    cargo build --locked --release -p moeflux-server --example scripted
    SCRIPTED=$(cargo metadata --format-version 1 --no-deps |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
    SCRIPTED=$SCRIPTED/release/examples/scripted
fi
export SCRIPTED

node=${keep:-$work/node}
mkdir -p "$node"
node=$(cd "$node" && pwd)
declare -A packages=([claude]=@anthropic-ai/claude-code [codex]=@openai/codex
    [opencode]=opencode-ai)
for agent in "${agents[@]}"; do
    package=${packages[$agent]}
    # Their programs are packages for one platform each; scripts of packages are not run.
    [ -d "$node/node_modules/$package" ] ||
        npm install --silent --ignore-scripts --prefix "$node" "$package"
    version=$(node -p 'require(process.argv[1]).version' "$node/node_modules/$package/package.json")
    echo "$package $version"
done

# The agents' own launchers look for the program that an install script would have linked.
mkdir "$work/bin"
for agent in "${agents[@]}"; do
    program=$(find "$node/node_modules" -type f -perm -u+x -name "$agent" -path '*-x64/*' \
        -o -type f -perm -u+x -name "$agent" -path '*-arm64/*' | head -n 1)
    ln -s "${program:-$node/node_modules/.bin/$agent}" "$work/bin/$agent"
done

namespace=() inside=false
if unshare -n true 2>/dev/null; then
    namespace=(unshare -n) inside=true
elif unshare -rn true 2>/dev/null; then
    namespace=(unshare -rn) inside=true
else
    echo "network namespaces are not allowed here: the agents may reach the network"
fi
failures=0
for agent in "${agents[@]}"; do
    for syntax in "${syntaxes[@]}"; do
        "${namespace[@]}" bash "$PWD/scripts/agents.sh" --round "$agent" "$syntax" "$work" \
            "$work/bin" "$inside" || failures=$((failures + 1))
    done
done
[ "$failures" -eq 0 ]
