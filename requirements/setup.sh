#!/usr/bin/env bash
# Bring a virtual environment to what lock files say; install qaudit and its plug-ins, editable.
#
#     requirements/setup.sh FOLDER LOCK...
#
# Called by the Makefile, which decides when. An environment whose last set-up was interrupted
# is made anew: pip cannot tell a half-unpacked package from a whole one.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1
shift
unfinished=$folder/.unfinished
export PIP_DISABLE_PIP_VERSION_CHECK=1

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer with venv was found" >&2
    echo "hint: install one (on Debian: python3-venv), or name it: make PYTHON=/path/to/python" >&2
    return 1
}

if [ -e "$unfinished" ] || ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "making $folder with $python"
    rm -rf "$folder"
    "$python" -m venv "$folder"
fi

requirements=()
for lock in "$@"; do
    requirements+=(--requirement "requirements/$lock")
done

touch "$unfinished"
echo "installing ${*} into $folder (a few minutes the first time)"
"$folder/bin/python" -m pip install -qq "${requirements[@]}"
"$folder/bin/python" -m pip install -qq --no-deps --no-build-isolation \
    --editable . --editable plugins/autoround --editable plugins/torchao
rm "$unfinished"
