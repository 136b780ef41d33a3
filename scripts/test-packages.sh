#!/usr/bin/env bash
# Tries the packages as a user gets them: `cargo install` from the packaged crates and nothing else,
# the archive of a static program in an empty environment, the Debian package; lints the rest.
#
# usage: scripts/test-packages.sh
#
# The crates of the lock file are fetched from crates.io where cargo's cache lacks them; after that
# no step needs a network. Results stay in target/dist. A missing tool is skipped with a line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

MUSL=x86_64-unknown-linux-musl
PROMPT="Tell me the fable of The Fox and the Crow."
BEGINNING="A Crow was sitting on a branch of a tree"

target=${CARGO_TARGET_DIR:-$PWD/target}
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT

step() { printf -- '-- %s\n' "$1"; }
skip() { printf 'skipped: %s\n' "$1"; }
has() { command -v "$1" >/dev/null; }
has_subcommand() { cargo "$1" --version >/dev/null 2>&1; }

# answers CACHE COMMAND...: whether a program answers by its built-in model, in an environment with
# a cache folder only.
answers() {
    local answer cache=$1
    shift
    answer=$(env -i XDG_CACHE_HOME="$cache" "$@" run "$PROMPT")
    case $answer in
        "$BEGINNING"*) printf '%s...\n' "${answer:0:60}" ;;
        *) printf 'FAILED: another answer: %s\n' "$answer" >&2; return 1 ;;
    esac
}

# Packs the publishable crates as crates.io would get them, each below its limit of 10 MiB.
package_crates() {
    local how=(--workspace --no-verify --locked --allow-dirty)
    if cargo info --quiet cfg-if >/dev/null 2>&1; then
        cargo publish "${how[@]}" --dry-run
    else
        skip "cargo publish --dry-run, as crates.io cannot be reached"
    fi
    rm -f "$target"/package/*.crate
    cargo package "${how[@]}" --offline --exclude moeflux-goldens --exclude moeflux-python \
        --exclude moeflux-capi
    local large
    large=$(find "$target/package" -maxdepth 1 -name '*.crate' -size +10485759c)
    [ -z "$large" ] || { echo "larger than crates.io accepts: $large" >&2; return 1; }
}

# A registry in a folder, in place of crates.io: all dependencies, and the packaged crates.
registry() {
    local crate name digest
    cargo vendor --locked --quiet --versioned-dirs "$temporary/vendor" >/dev/null
    for crate in "$target"/package/*.crate; do
        name=$(basename "$crate" .crate)
        tar -xzf "$crate" -C "$temporary/vendor"
        digest=$(sha256sum "$crate")
        printf '{"files":{},"package":"%s"}' "${digest%% *}" >"$temporary/vendor/$name/.cargo-checksum.json"
    done
    mkdir -p "$temporary/cargo"
    cat >"$temporary/cargo/config.toml" <<TOML
[source.crates-io]
replace-with = "vendored"
[source.vendored]
directory = "$temporary/vendor"
TOML
}

# The README's line, offline, outside the checkout. The development profile is the quicker one;
# without optimization kernels would take minutes.
install_crate() {
    (
        cd "$temporary"
        CARGO_HOME=$temporary/cargo CARGO_NET_OFFLINE=true CARGO_TARGET_DIR=$target/install \
            CARGO_PROFILE_DEV_OPT_LEVEL=1 CARGO_PROFILE_DEV_DEBUG=0 \
            cargo install --quiet --debug --locked --root "$temporary/installed" moeflux-cli
    )
    answers "$temporary/cache" "$temporary/installed/bin/moeflux"
}

# The archive of the static program: unpacked, one line. As root also in a folder with nothing else.
archive() {
    local folder=$temporary/moeflux-$MUSL
    scripts/package.sh "$MUSL" --out target/dist
    (cd target/dist && sha256sum --check --quiet "moeflux-$MUSL.tar.gz.sha256")
    tar -xzf "target/dist/moeflux-$MUSL.tar.gz" -C "$temporary"
    ldd "$folder/moeflux" 2>&1 | grep -Eq 'statically linked|not a dynamic executable'
    answers "$temporary/cache" "$folder/moeflux"
    if [ "$(id -u)" = 0 ] && has chroot; then
        mkdir -p "$temporary/root/tmp"
        cp "$folder/moeflux" "$temporary/root/"
        answers /tmp "$(command -v chroot)" "$temporary/root" /moeflux
    fi
    if has groff; then
        # A warning of the formatter is a fault of a page.
        [ -z "$(groff -man -Tutf8 -ww -z "$folder"/man/*.1 2>&1 | tee -a /dev/stderr)" ]
    fi
}

debian() {
    scripts/package.sh x86_64-unknown-linux-gnu --deb --out target/dist
    if has lintian; then lintian --fail-on error target/dist/moeflux_*.deb; else skip "lintian"; fi
}

# Linters of the files that only run elsewhere.
lint() {
    local scripts=(scripts/package.sh scripts/test-packages.sh)
    if has shellcheck; then shellcheck --severity warning "${scripts[@]}"; else skip "shellcheck"; fi
    if has ruby; then ruby -wc contrib/homebrew/moeflux.rb; else skip "ruby, for the Homebrew formula"; fi
    if has nix-instantiate; then nix-instantiate --parse flake.nix >/dev/null; else skip "nix-instantiate"; fi
    if has hadolint; then hadolint contrib/Containerfile; else skip "hadolint"; fi
    if has check-jsonschema; then
        check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
    else
        skip "check-jsonschema, for the workflows"
    fi
    if has actionlint; then actionlint; else skip "actionlint"; fi
}

has_target() { [ -d "$(rustc --print sysroot)/lib/rustlib/$1/lib" ]; }

step "crates"
package_crates
step "cargo install, offline"
registry
install_crate

if ! { has_subcommand about && has_subcommand cyclonedx; }; then
    skip "licences and SBOM (cargo install --locked cargo-about cargo-cyclonedx)"
    export MOEFLUX_WITHOUT_LICENCES=1
fi
step "archive of $MUSL"
if has_target "$MUSL"; then archive; else skip "rustup target add $MUSL"; fi
step "Debian package"
if has_subcommand deb && has dpkg; then debian; else skip "cargo install --locked cargo-deb"; fi
step "linters"
lint
