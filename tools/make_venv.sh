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
    "$venv/bin/python" -m pip install --quiet --quiet --no-input --disable-pip-version-check \
        --constraint constraints.txt "$@"
}
# torch alone and by its exact version: that form takes a CPU wheel where one is offered.
torch=$(grep '^torch==' constraints.txt)
say "installing $torch"
install setuptools "$torch"
say "installing the other packages"
# The build runs with the pinned setuptools, not with whatever is newest.
install --no-build-isolation --editable '.[dev]'
say "the environment is ready"
