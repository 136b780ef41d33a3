#!/usr/bin/env bash
# Builds a release for a target and makes its archive: the program, the licences, manual pages,
# shell completions and the systemd unit. .github/workflows/release.yml runs it for every target.
#
# usage: scripts/package.sh TARGET [--deb] [--out DIR]
#
#   TARGET     such as x86_64-unknown-linux-musl; its programs must run on this machine
#   --deb      also makes a package for Debian and Ubuntu, with cargo-deb
#   --out DIR  folder of the results; default: target/dist
#
# Results: moeflux-TARGET.tar.gz (on Windows .zip), its SBOM moeflux-TARGET.cdx.json in CycloneDX,
# the Debian package, and a .sha256 of each. Needs cargo-about for the licences of the dependencies
# and cargo-cyclonedx for the SBOM. MOEFLUX_WITHOUT_LICENCES=1, for tests, leaves both out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

usage() { sed -n '/^# usage/,/^#   --out/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

target='' out=target/dist deb=false
while [ $# -gt 0 ]; do
    case $1 in
        --deb) deb=true ;;
        --out) out=${2:?"--out needs a folder"}; shift ;;
        -*) usage ;;
        *) [ -z "$target" ] || usage; target=$1 ;;
    esac
    shift
done
[ -n "$target" ] || usage
licences=true
[ "${MOEFLUX_WITHOUT_LICENCES-}" != 1 ] || licences=false

needs() {
    cargo "$1" --version >/dev/null 2>&1 || { echo "missing: cargo install --locked cargo-$1" >&2; exit 1; }
}
if $licences; then needs about; needs cyclonedx; fi
if $deb; then needs deb; fi

name=moeflux-$target
# Both folders have fixed names below the checkout: the Debian package's assets name the second.
folder=target/archive/$name
assets=target/archive/deb
binary=${CARGO_TARGET_DIR:-target}/$target/release/moeflux
case $target in *windows*) binary+=.exe ;; esac
mkdir -p "$out"
out=$(cd "$out" && pwd)

cargo build --locked --release -p moeflux-cli --target "$target"

# Licences of the crates, of Rust's library (and musl, which it links), and of the page's plots.
third_party() {
    cargo about generate --frozen --fail --manifest-path crates/cli/Cargo.toml --target "$target" about.hbs
    printf '\n%s\nuPlot, in the page of moeflux serve\n\n' "$(printf '=%.0s' {1..80})"
    cat crates/server/src/apis/page/files/uplot/LICENSE
}

# The changelog of the Debian package, which refers to that of the program.
debian_changelog() {
    local version maintainer
    version=$(cargo pkgid --locked -p moeflux-cli)
    maintainer=$(sed -n 's/^maintainer = "\(.*\)"$/\1/p' crates/cli/Cargo.toml)
    printf 'moeflux (%s-1) unstable; urgency=medium\n\n' "${version##*[#@]}"
    printf '  * The changes of this version are in changelog.gz.\n\n'
    printf ' -- %s  %s\n' "$maintainer" \
        "$(git log -1 --format=%cD 2>/dev/null || date -R)"
}

rm -rf "$folder"
mkdir -p "$folder/man" "$folder/completions"
cp "$binary" LICENSE-MIT LICENSE-APACHE README.md CHANGELOG.md contrib/moeflux.service "$folder/"
"$binary" man "$folder/man"
"$binary" completions bash >"$folder/completions/moeflux.bash"
"$binary" completions zsh >"$folder/completions/_moeflux"
"$binary" completions fish >"$folder/completions/moeflux.fish"
"$binary" completions powershell >"$folder/completions/moeflux.ps1"
if $licences; then
    third_party >"$folder/THIRD-PARTY.txt"
    # Absent where rustup installed the minimal profile.
    of_rust=$(rustc --print sysroot)/share/doc/rust/COPYRIGHT-library.html
    if [ -f "$of_rust" ]; then cp "$of_rust" "$folder/THIRD-PARTY-rust.html"; fi
    # The tool writes a file beside the manifest of every crate of the workspace.
    cargo cyclonedx --quiet --format json --target "$target" --override-filename sbom \
        --manifest-path crates/cli/Cargo.toml
    mv crates/cli/sbom.json "$out/$name.cdx.json"
    rm -f crates/*/sbom.json
fi

results=("$name.tar.gz")
case $target in
    *windows*)
        # GNU tar of a Unix shell writes no .zip.
        results=("$name.zip")
        "$SYSTEMROOT/System32/tar.exe" -a -c -f "$name.zip" -C target/archive "$name"
        mv "$name.zip" "$out/"
        ;;
    *) tar -czf "$out/$name.tar.gz" -C target/archive "$name" ;;
esac
if $licences; then results+=("$name.cdx.json"); fi
if $deb; then
    rm -rf "$assets"
    cp -r "$folder" "$assets"
    gzip -9 --no-name "$assets"/man/*
    mkdir "$assets/doc"
    mv "$assets/README.md" "$assets/doc/"
    mv "$assets/CHANGELOG.md" "$assets/doc/changelog"
    debian_changelog >"$assets/changelog"
    if $licences; then mv "$assets"/THIRD-PARTY* "$assets/doc/"; fi
    package=$(cargo deb --locked --no-build -p moeflux-cli --target "$target" --output "$out/")
    results+=("$(basename "$package")")
fi

digest=(sha256sum)
command -v sha256sum >/dev/null || digest=(shasum -a 256)
cd "$out"
for result in "${results[@]}"; do
    "${digest[@]}" "$result" >"$result.sha256"
    echo "$out/$result"
done
