#!/usr/bin/env bash
# Builds, tests and measures moeflux on a Mac, and writes a report to send: no Mac has run it yet.
#
# usage: scripts/report-macos.sh [--quick] [FILE]
#
#   FILE     the report, by default moeflux-macos-report.txt
#   --quick  tests of the kernels alone, and no benchmarks of a model on disk
#
# Needs Rust (https://rustup.rs) and the command line tools (xcode-select --install). Takes an hour
# or two, 15 GB of disk for the build, 4 GB for a model of random weights, which is deleted again.
# Leave the Mac on its power supply and otherwise idle.
#
# A step that fails is part of the report, and the next one runs. The report names neither the user,
# the computer nor folders outside the clone, and has no serial numbers. Read it, then attach it to
# an issue.
set -u
# This script is for bash 3.2, which is that of macOS.

quick=false
if [ "${1-}" = --quick ]; then quick=true && shift; fi
case "${1-}" in
    -*) sed -n '/^# usage/,/^# an issue/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
# REPORT_MACOS_ANYWHERE is for tests of this script.
if [ "$(uname)" != Darwin ] && [ -z "${REPORT_MACOS_ANYWHERE-}" ]; then
    echo "this is not a Mac: scripts/test.sh tests other systems" >&2
    exit 2
fi

folder=$PWD
case "${1-}" in
    /*) report=$1 ;;
    *) report=$folder/${1-moeflux-macos-report.txt} ;;
esac
cd "$(dirname "$0")/.." || exit 1
exec </dev/null
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 NO_COLOR=1
# These would change what is measured.
unset MOEFLUX_MODEL MOEFLUX_MEMORY MOEFLUX_GPU_MEMORY MOEFLUX_THREADS MOEFLUX_DEVICE
moeflux=${CARGO_TARGET_DIR:-target}/release/moeflux
kernels=${CARGO_TARGET_DIR:-target}/release/examples/kernels

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

# Lines of a step in the report, at most: so many from its start and as many from its end.
HALF=250

# Names that the report leaves out.
user=$(id -un)
names=$({ hostname; hostname -s; scutil --get ComputerName; scutil --get LocalHostName
    id -F; } 2>/dev/null | sort -u)

# Replaces names, folders, serial numbers, hardware ids and addresses of stdin.
anonymous() {
    REPORT_NAMES=$names REPORT_USER=$user REPORT_HOME=${HOME-} REPORT_CLONE=${PWD#/private} \
    REPORT_WORK=${work#/private} awk '
        # Replaces all of a text as it is written, without regular expressions. With `words`, only
        # where no letter or digit is beside it.
        function replace(line, text, by, words,    start, done, before, after) {
            if (length(text) < 2) return line
            done = ""
            while ((start = index(line, text)) > 0) {
                before = start > 1 ? substr(line, start - 1, 1) : ""
                after = substr(line, start + length(text), 1)
                if (words && (before after) ~ /[A-Za-z0-9]/)
                    done = done substr(line, 1, start + length(text) - 1)
                else
                    done = done substr(line, 1, start - 1) by
                line = substr(line, start + length(text))
            }
            return done line
        }
        BEGIN { count = split(ENVIRON["REPORT_NAMES"], names, "\n") }
        tolower($0) ~ /serial number|hardware uuid|udid/ { next }
        {
            # /var and /tmp are links into /private.
            line = $0
            gsub(/\/private\//, "/", line)
            line = replace(line, ENVIRON["REPORT_WORK"], "WORK", 0)
            line = replace(line, ENVIRON["REPORT_CLONE"], "CLONE", 0)
            gsub(/\/var\/folders\/[^\/ ]+\/[^\/ ]+/, "TMP", line)
            line = replace(line, ENVIRON["REPORT_HOME"], "~", 0)
            gsub(/\/Users\/[^\/ "]+/, "~", line)
            for (i = 1; i <= count; i++) line = replace(line, names[i], "HOST", 1)
            print replace(line, ENVIRON["REPORT_USER"], "USER", 1)
        }'
}

# Leaves out what has no news: tests that passed, and crates that were built.
news() {
    grep -vE '^test .* \.\.\. ok$|^ +(Compiling|Checking|Downloaded|Downloading|Updating|Locking|Doc-tests) |^$' |
        awk -v half=$HALF '
            NR <= half { print; next }
            { tail[NR % half] = $0 }
            END {
                if (NR > 2 * half) print "[" NR - 2 * half " lines are left out]"
                for (i = NR > 2 * half ? NR - half + 1 : half + 1; i <= NR; i++) print tail[i % half]
            }'
}

failed=0
# step NAME COMMAND...: the command with its output, time and exit code in the report.
step() {
    local name=$1 start=$SECONDS code
    shift
    printf '%s ...\n' "$name" >&2
    "$@" >"$work/out" 2>&1
    code=$?
    {
        printf '\n== %s\n$ %s\n' "$name" "$*"
        news <"$work/out"
        printf -- '-- exit code %d, %d s\n' "$code" $((SECONDS - start))
    } | anonymous >>"$report"
    if [ "$code" -ne 0 ]; then
        printf '   exit code %d\n' "$code" >&2
        failed=$((failed + 1))
        failures="${failures-}   $name"$'\n'
    fi
    # An interrupted step ends the script.
    [ "$code" -ne 130 ] || exit 130
}

system() {
    sw_vers
    uname -srm
    local key
    for key in hw.model machdep.cpu.brand_string machdep.cpu.features machdep.cpu.leaf7_features \
        hw.memsize hw.pagesize hw.cachelinesize hw.l1dcachesize hw.l2cachesize hw.l3cachesize \
        hw.physicalcpu hw.logicalcpu hw.nperflevels \
        hw.perflevel0.name hw.perflevel0.physicalcpu hw.perflevel0.l2cachesize \
        hw.perflevel1.name hw.perflevel1.physicalcpu hw.perflevel1.l2cachesize \
        hw.optional.arm.FEAT_DotProd hw.optional.arm.FEAT_I8MM hw.optional.arm.FEAT_BF16 \
        hw.optional.arm.FEAT_FP16 hw.optional.arm.FEAT_SME \
        iogpu.wired_limit_mb vm.swapusage kern.maxfilesperproc; do
        sysctl "$key" 2>/dev/null
    done
    memory_pressure -Q
    pmset -g batt | head -n 1
    pmset -g therm
    ulimit -a
}

# Graphics and disks: the named properties alone, as others have serial numbers and volumes' names.
hardware() {
    system_profiler SPDisplaysDataType |
        grep -E '^ +(Chipset Model|Type|Bus|Total Number of Cores|VRAM.*|Vendor|Metal.*):'
    system_profiler SPNVMeDataType SPSerialATADataType | grep -E '^ +(Model|Capacity|TRIM Support|Link.*):'
    diskutil info "$work" 2>/dev/null || diskutil info /System/Volumes/Data
    df -h "$work"
}

toolchain() {
    rustc -vV && cargo --version && xcode-select -p && xcrun --show-sdk-version && clang --version
    git log -1 --format='%H %cs' && git status --short
}

# tests DEVICES ARGUMENT...: a test run with assignments of environment variables. The workspace is
# named each time, so that cargo builds it once.
tests() {
    local devices=$1
    shift
    # shellcheck disable=SC2086 # a word for each assignment
    env $devices cargo test --locked --workspace --no-fail-fast "$@"
}

# A fable that the built-in model knows by heart: the same text on every device.
fable() { "$moeflux" run --device "$1" --temperature 0 "Tell me the fable of The Fox and the Crow."; }

synth() { "$moeflux" synth qwen3-30b-a3b --layers 8 --skew 1 --out "$work/model" && du -sh "$work/model"; }

printf 'moeflux on a Mac, %s\n' "$(date -u '+%Y-%m-%d %H:%M UTC')" >"$report" || exit 1
step system system
step hardware hardware
step toolchain toolchain
step build cargo build --locked --release
step "build of the benchmark of kernels" cargo build --locked --release -p moeflux-bench --example kernels
step version "$moeflux" --version
step devices "$moeflux" devices
step doctor "$moeflux" doctor
for device in cpu gpu; do
    step "a fable, $device" fable "$device"
done

step "conformance of the kernels, cpu" tests MOEFLUX_TEST_GPU=none --test conformance
step "conformance of the kernels, Metal" \
    tests "MOEFLUX_TEST_CPU=none MOEFLUX_TEST_GPU=gpu" --test conformance
if ! $quick; then
    # The kernels are among them once more: cargo has no option that leaves a test binary out.
    step "all tests, Metal" tests "MOEFLUX_TEST_CPU=none MOEFLUX_TEST_GPU=gpu"
fi

for device in cpu gpu; do
    step "bench of kernels, $device" "$kernels" --quick --device "$device"
    step "bench of the built-in model, $device" "$moeflux" bench --device "$device"
done
if ! $quick; then
    step "random weights" synth
    for device in cpu gpu; do
        step "bench of random weights, resident, $device" \
            "$moeflux" bench --model "$work/model" --device "$device" --context 0,512,2048 --profile
        step "bench of random weights, streamed, $device" \
            "$moeflux" bench --model "$work/model" --device "$device" --budgets 1500MiB,2GiB,3GiB --cold
        step "bench of random weights, sessions, $device" \
            "$moeflux" bench --model "$work/model" --device "$device" --sessions 1,2,4
    done
    step "doctor, random weights" "$moeflux" doctor --model "$work/model"
    step "throttling by heat" pmset -g therm
fi

printf '\n%d steps failed\n%s' "$failed" "${failures-}" | tee -a "$report" >&2
printf 'Read %s, then attach it to an issue.\n' "$report" >&2
