#!/usr/bin/env bash
# Makes the virtual environment DIRECTORY with the versions of constraints.txt, or brings it up to date.
# Usage: tools/make_venv.sh DIRECTORY     PYTHON=... names an interpreter to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:?usage: tools/make_venv.sh DIRECTORY}

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }

# Prints the first interpreter that fits; explains what is missing where none does.
find_python() {
    local candidate without_venv=""
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.10 python3 python; do
        "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv=$candidate
    done
    if [[ -n $without_venv ]]; then
        echo "$without_venv cannot make virtual environments: its modules venv and ensurepip are missing." >&2
        echo "On Debian and Ubuntu they are in the package python3-venv." >&2
    else
        echo "No Python from 3.10 to 3.13 was found (tried PYTHON=${PYTHON:-not set}, python3.10 ... python3.13," >&2
        echo "python3, python). Install one, or name it: make PYTHON=/path/to/python3.11 ..." >&2
    fi
    return 1
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    say "virtual environment $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

install() {
    "$venv/bin/python" -m pip install --quiet --quiet --no-input --disable-pip-version-check --no-build-isolation "$@"
}
# Nothing but the files whose SHA-256 the lock has.
install_locked() { install --require-hashes --no-deps --requirement "$1"; }

torch=$(grep '^torch==' constraints.txt)
if [[ ${UNLOCKED:-} == 1 ]]; then
    say "UNLOCKED=1: files are taken by their versions, whatever their hashes"
    install --constraint constraints.txt setuptools "$torch"
    install --constraint constraints.txt --editable '.[dev]'
    say "the environment is ready"
    exit
fi
say "installing the packages of requirements.lock, each file by its SHA-256"
# Packages that come as source are built with the locked setuptools, not with whatever is newest.
install_locked <(awk '/^[a-z]/ { wanted = /^setuptools==/ } wanted' requirements.lock)
install_locked requirements.lock
# By its exact version pip prefers a CPU wheel (2.13.0+cpu) where an index offers one; the lock knows PyPI's files.
chosen=$(install --dry-run --ignore-installed --no-deps --report - "$torch" | "$venv/bin/python" -c \
    'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])')
if [[ torch==$chosen == "$torch" ]]; then
    say "installing $torch, by its SHA-256"
    install_locked requirements-torch.lock
else
    say "installing torch $chosen by its version alone: it is not from PyPI, and no lock has its hash"
    install --no-deps "torch==$chosen"
fi
# No index: whatever the locks lack is an error, not a download.
install --no-index --editable '.[dev]'
say "the environment is ready"
