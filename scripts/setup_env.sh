#!/bin/sh
# Makes a virtual environment and installs moex into it, or does nothing when that was done before.
# Usage: setup_env.sh VENV [EXTRAS [PIN]]   e.g. setup_env.sh .venv-floor dev,hf jax=0.11.2
#
# A stamp in the environment tells what was installed, from which pyproject.toml and constraints.txt, and where:
# an install that stopped half way leaves none, a clone that was moved or a Python that is gone is noticed.
# Environment: PYTHON (the interpreter), PYTHON_VERSION (e.g. 3.12: that version only).
set -eu

venv=$1
extras=${2:-}
pin=${3:-}
cd "$(dirname "$0")/.."

case $venv in
    /*) place=$venv ;;
    *) place=$(pwd -P)/$venv ;;
esac
stamp="$venv/.moex-installed-${extras:-core}"
content="$place $(cat pyproject.toml constraints.txt | cksum) $pin"

# The environment is of use when its Python and pip run, lie where they were made, and have the version asked for.
usable() {
    [ -f "$venv/.moex-place" ] && [ "$(cat "$venv/.moex-place")" = "$place" ] || return 1
    have=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 1
    if [ -n "${PYTHON:-}" ]; then
        [ "$have" = "$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" ] || return 1
    fi
    [ -z "${PYTHON_VERSION:-}" ] || [ "$have" = "$PYTHON_VERSION" ]
}

if usable; then
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$content" ] && exit 0
else
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        echo "$venv is no virtual environment: not touching it" >&2
        exit 2
    fi
    python=$(scripts/find_python.sh ${PYTHON_VERSION:-}) || exit 2
    echo "making $venv with $("$python" -V) ($python)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    echo "$place" > "$venv/.moex-place"
fi

started=$(date +%s)
target=.${extras:+[$extras]}
echo "installing moex-jax${extras:+[$extras]}${pin:+ with $pin} into $venv: about a minute, longer on a slow network"
rm -f "$stamp"
constraints="$venv/.moex-constraints"
if [ -n "$pin" ]; then
    # jax=0.11.2 replaces the pins of jax and jaxlib, which go together.
    sed -E "s/^(${pin%%=*}(lib)?)==[^ ;]*/\\1==${pin#*=}/" constraints.txt > "$constraints"
else
    cp constraints.txt "$constraints"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0
"$venv/bin/python" -m pip install -qq -c "$constraints" -e "$target"
echo "$content" > "$stamp"
echo "$content" > "$venv/.moex-installed-core"
echo "installed in $(($(date +%s) - started)) s"
