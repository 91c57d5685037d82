#!/bin/sh
# Prints the path of a Python that moex runs on; exits 2 and says what to install when there is none.
# Usage: find_python.sh [3.12|3.13|...]   the argument asks for that version only. PYTHON names an interpreter to use.
set -u

wanted=${1:-any}

# Prints the real path of a suitable interpreter. A version manager's shim may exist and fail, so each one is executed.
try() {
    "$1" - "$wanted" 2>/dev/null <<'EOF'
import sys, sysconfig
version = sys.version_info[:2]
wanted = sys.argv[1]
if not (3, 12) <= version < (3, 15) or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
if wanted != "any" and wanted != "%d.%d" % version:
    sys.exit(1)
import ensurepip, venv
print(sys.executable)
EOF
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON does not run, or is not a Python 3.12 to 3.14 with the modules venv and ensurepip." >&2
    exit 2
fi

for name in python3.13 python3.12 python3.14 python3 python; do
    command -v "$name" >/dev/null 2>&1 && try "$name" && exit 0
done

for version in 3.13 3.12 3.14; do
    for python in "${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}"/versions/"$version"*/bin/python; do
        [ -x "$python" ] && try "$python" && exit 0
    done
done

if [ "$wanted" = any ]; then
    cat >&2 <<'EOF'
moex needs Python 3.12, 3.13 or 3.14 with the modules venv and ensurepip, and found none on PATH or under pyenv.
Install one (Debian, Ubuntu: apt install python3.12 python3.12-venv; pyenv: pyenv install 3.13), or name one: make PYTHON=/path/to/python3.12
EOF
else
    echo "no Python $wanted found" >&2
fi
exit 2
