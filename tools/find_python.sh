#!/usr/bin/env bash
# Prints the path of a CPython of the first of VERSIONS that this machine has, wherever it keeps it; knows nothing of
# what it is for. PYTHON=... names one, which then has to fit.
# Usage: tools/find_python.sh VERSION...     as in: tools/find_python.sh 3.12 3.13
set -euo pipefail
(($# > 0)) || { echo "usage: tools/find_python.sh VERSION..." >&2; exit 2; }
shopt -s nullglob

# One a line, the likeliest first.
directories() {
    tr : '\n' <<<"$PATH"
    # Shims of pyenv and asdf answer only for the versions that are chosen here.
    local roots=("${PYENV_ROOT:-$HOME/.pyenv}" "$(pyenv root 2>/dev/null || true)")
    printf '%s\n' "${roots[0]}"/versions/*/bin ${roots[1]:+"${roots[1]}"/versions/*/bin}
    printf '%s\n' "${ASDF_DATA_DIR:-$HOME/.asdf}"/installs/python/*/bin
    local data=${XDG_DATA_HOME:-$HOME/.local/share}
    printf '%s\n' "${UV_PYTHON_INSTALL_DIR:-$data/uv/python}"/*/bin "$data"/mise/installs/python/*/bin "$HOME/.local/bin"
    # conda and mamba: what is active, every environment that they have noted down, and where they are usually put.
    printf '%s\n' ${CONDA_PREFIX:+"$CONDA_PREFIX/bin"}
    [[ ! -r $HOME/.conda/environments.txt ]] || sed 's|$|/bin|' "$HOME/.conda/environments.txt"
    local base
    for base in ${CONDA_EXE:+"${CONDA_EXE%/*/*}"} ${MAMBA_ROOT_PREFIX:+"$MAMBA_ROOT_PREFIX"} "$data/mamba" \
        {"$HOME",/opt}/{conda,miniconda3,anaconda3,miniforge3,mambaforge,micromamba}; do
        printf '%s\n' "$base/bin" "$base"/envs/*/bin
    done
    # Of the system, of packages beside it, and built from python.org's source.
    printf '%s\n' /usr/local/bin /usr/bin /usr/local/python*/bin /opt/python*/bin /opt/python/*/bin
}

# "VERSION" of an interpreter, and why it does not serve where it does not; nothing where it does not start.
ask() {
    "$1" -c '
import sys, sysconfig
why = ""
if sys.implementation.name != "cpython":
    why = "it is not CPython"
elif sys.maxsize < 2**32:
    why = "it is a 32-bit build"
elif sysconfig.get_config_var("Py_GIL_DISABLED"):
    why = "it is a free-threaded build"
else:
    try:
        import ensurepip, venv
    except ImportError:
        why = "it lacks venv or ensurepip (Debian, Ubuntu: package python%d.%d-venv)" % sys.version_info[:2]
print("%d.%d" % sys.version_info[:2], why)' 2>/dev/null || true
}

if [[ -n ${PYTHON:-} ]]; then
    read -r version why < <(ask "$PYTHON") || { echo "PYTHON=$PYTHON does not start" >&2; exit 1; }
    [[ -n $why || " $* " == *" $version "* ]] || why="it has to be one of $*"
    [[ -z $why ]] || { echo "PYTHON=$PYTHON is Python $version: $why" >&2; exit 1; }
    command -v "$PYTHON"
    exit
fi

mapfile -t places < <(directories)
passed_over=""
for wanted in "$@"; do
    for candidate in "${places[@]/%//python$wanted}" "$(command -v python3 || true)" "$(command -v python || true)"; do
        [[ -x $candidate ]] || continue
        read -r version why < <(ask "$candidate") || continue
        [[ $version == "$wanted" ]] || continue
        if [[ -z $why ]]; then
            printf '%s\n' "$candidate"
            exit
        fi
        passed_over+="$candidate is Python $version, but $why"$'\n'
    done
done
echo "No Python $* was found on PATH, with pyenv, asdf, uv, mise or conda, in /usr/local, /usr or /opt." >&2
printf '%s' "$passed_over" | sort -u >&2
echo "Install one (uv python install $1; pyenv install $1; apt-get install python$1-venv), or name it: PYTHON=/path/to/python$1" >&2
exit 1
