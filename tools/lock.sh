#!/usr/bin/env bash
# Writes requirements.lock and requirements-torch.lock: the versions of constraints.txt with the SHA-256 of every file
# that PyPI has of them, for Python 3.10 to 3.13 and any platform. Needs uv (`pip install uv`) and asks PyPI.
# Usage: tools/lock.sh [DIRECTORY]     DIRECTORY: where to write, the repository by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
directory=${1:-.}
command -v uv >/dev/null || { echo "uv is missing: pip install uv" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
grep -v '^torch==' constraints.txt >"$work/others.in"
grep '^torch==' constraints.txt >"$work/torch.in"

# Nothing of this machine: neither its configuration nor the name of the index that it asks.
compile() {
    uv pip compile --quiet --no-config --no-python-downloads --universal --python-version 3.10 --generate-hashes \
        --no-annotate --no-header --no-emit-index-url "$@"
}
lock() {
    echo "# Made by tools/lock.sh of constraints.txt: $1"
    cat "$2"
}

compile --no-deps "$work/others.in" --output-file "$work/others.lock"
lock "everything but torch." "$work/others.lock" >"$directory/requirements.lock"
# What only torch's CUDA build needs is resolved here; what is in the other lock already is left out.
compile --constraint "$work/others.in" "$work/torch.in" --output-file "$work/torch.lock"
awk -F'==' 'FNR == NR { if (/^[a-z]/) known[$1]; next } /^[a-z]/ { wanted = !($1 in known) } wanted' \
    "$work/others.lock" "$work/torch.lock" >"$work/torch-only.lock"
lock "PyPI's torch and the CUDA libraries of its Linux build." "$work/torch-only.lock" >"$directory/requirements-torch.lock"

# What the project needs under each Python must be in the locks: an installation asks no index for anything else.
list() { uv pip compile --quiet --no-config --no-python-downloads --no-annotate --no-header "$@" | sort; }
locks=("$directory/requirements.lock" "$directory/requirements-torch.lock")
for version in 3.10 3.11 3.12 3.13; do
    list --python-version "$version" --extra dev pyproject.toml --constraint constraints.txt \
        --constraint "${locks[1]}" >"$work/needed"
    list --python-version "$version" --no-deps "${locks[@]}" >"$work/locked"
    missing=$(comm -23 "$work/needed" "$work/locked")
    if [[ -n $missing ]]; then
        echo "Python $version needs what constraints.txt does not name, or names for other versions only:" >&2
        echo "$missing" >&2
        exit 1
    fi
done
