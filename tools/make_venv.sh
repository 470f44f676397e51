#!/usr/bin/env bash
# Makes the virtual environment DIRECTORY of locks/run.lock and locks/dev.lock, or brings it up to date.
# Usage: tools/make_venv.sh DIRECTORY     PYTHON=... names an interpreter to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:?usage: tools/make_venv.sh DIRECTORY}

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }

case $(uname -sm) in
    "Linux x86_64" | "Linux aarch64") ;;
    *)
        echo "The locks are for Linux on x86_64 and aarch64, not for $(uname -sm): use docker/Dockerfile.cpu." >&2
        exit 1
        ;;
esac

here=$("$venv/bin/python" -c 'import pip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
wanted=(3.12 3.13 3.11 3.10)
# An environment that was made with 3.13 stays one.
[[ $here != 3.13 ]] || wanted=(3.13 "${wanted[@]}")
python=$(tools/find_python.sh "${wanted[@]}")
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [[ $here != "$version" ]]; then
    say "virtual environment $venv with $("$python" --version), $python"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi
case $version in
    3.10 | 3.11)
        say "Python $version takes Megatron Core 0.16.1: all works, but runs are not bit for bit those of 0.19.2," \
            "which needs Python 3.12 or 3.13 and is what runs on GPUs"
        ;;
esac
[[ ! -e /dev/nvidiactl ]] || say "this machine has a GPU, and this environment is for CPUs: docs/images.md has the other"

# Nothing but the packages that are named, nothing fetched to build one, nobody asked, no copies of 2.6 GB in a cache.
install() {
    "$venv/bin/python" -m pip install --quiet --quiet --no-input --no-cache-dir --disable-pip-version-check --no-deps \
        --no-build-isolation "$@"
}
# Entries of the locks by a pattern of their names; without hashes torch's exact version may be a build for CPUs.
entries() {
    awk -v wanted="$1" '/^[^ ]/ { take = /^[a-z0-9]/ && $0 ~ wanted } take' locks/run.lock locks/dev.lock |
        if [[ ${UNLOCKED:-} == 1 ]]; then sed -E '/^ +--hash/d; s/ \\$//; s/===/==/'; else cat; fi
}
if [[ ${UNLOCKED:-} == 1 ]]; then
    say "UNLOCKED=1: files are taken by their versions, whatever their hashes"
else
    say "installing the packages of locks/run.lock and locks/dev.lock, each file by its SHA-256"
fi
# Packages that come as source are built with the locked setuptools, not with whatever is newest. pip downloads all
# that one command names before it installs any of it: two large commands take less room than one.
for some in '^setuptools==' '^nvidia-' .; do
    install --requirement <(entries "$some")
done
install --no-index --editable .
# torch asks for what only GPUs load, too: that is in locks/gpu.lock and stays away. Anything else is a fault.
only_for_gpus=$(sed -nE 's/^([a-z0-9.-]+)==.*/\1/p' locks/gpu.lock | sort -u | paste -sd '|')
faults=$("$venv/bin/python" -m pip check --disable-pip-version-check |
    grep -vE "requires ($only_for_gpus), which is not installed|^No broken requirements" || true)
[[ -z $faults ]] || { printf 'the environment does not fit together:\n%s\n' "$faults" >&2; exit 1; }
say "the environment is ready"
