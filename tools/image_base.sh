#!/usr/bin/env bash
# Makes DIRECTORY a root like the one of the official image python:VERSION-slim-RELEASE, where no container engine can
# fetch that: Debian by mmdebstrap, and in /usr/local this machine's own Python of that version. Needs root.
# Usage: tools/image_base.sh IMAGE DIRECTORY     as in: tools/image_base.sh python:3.12-slim-bookworm build/image-base
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
image=${1:?usage: tools/image_base.sh IMAGE DIRECTORY} root=${2:?usage: tools/image_base.sh IMAGE DIRECTORY}
# What Python's modules are linked against, and what the image has beside them.
libraries=ca-certificates,libbz2-1.0,libexpat1,libffi8,liblzma5,libncursesw6,libreadline8,libsqlite3-0,libssl3,libuuid1
others=netbase,tzdata,zlib1g

if [[ ! $image =~ ^python:(3\.[0-9]+)(\.[0-9]+)?-slim-([a-z]+)$ ]]; then
    echo "$image: only python:VERSION-slim-RELEASE can be made here" >&2
    exit 1
fi
version=${BASH_REMATCH[1]} release=${BASH_REMATCH[3]}
command -v mmdebstrap >/dev/null || { echo "mmdebstrap is missing: apt-get install mmdebstrap" >&2; exit 1; }
python=$(tools/find_python.sh "$version")

mmdebstrap --quiet --variant=minbase --include="$libraries,$others" "$release" "$root"
"$python" - "$root/usr/local" <<'END'
import shutil
import sys
import sysconfig
from pathlib import Path

target = Path(sys.argv[1])
name = "python{}.{}".format(*sys.version_info)
base = Path(sys.base_prefix)
(target / "bin").mkdir(parents=True, exist_ok=True)
shutil.copy(base / "bin" / name, target / "bin" / name)
for alias in ("python3", "python"):
    (target / "bin" / alias).symlink_to(name)
left_out = shutil.ignore_patterns("site-packages", "dist-packages", "test", "__pycache__")
shutil.copytree(sysconfig.get_path("stdlib"), target / "lib" / name, symlinks=True, ignore=left_out)
if sysconfig.get_config_var("Py_ENABLE_SHARED"):
    for library in Path(sysconfig.get_config_var("LIBDIR")).glob("libpython*.so*"):
        shutil.copy(library, target / "lib")
END
chroot "$root" /sbin/ldconfig
chroot "$root" /usr/local/bin/python3 -c '
import bz2, ctypes, ensurepip, lzma, readline, sqlite3, ssl, sys, uuid, venv, zlib
print("base:", sys.version)'
