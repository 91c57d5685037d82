#!/bin/sh
# Makes the environment that compiles for NVIDIA GPUs without one: JAX with its CUDA plugin, ptxas and disassemblers.
# Usage: setup_aot.sh [VENV]   (.venv-aot)   Does nothing when that was done before with the same versions.
#
# It stands apart from .venv, since with the plugin beside it every CPU run prints a loader's traceback. Without their
# dependencies the packages take 1.3 GB instead of the 4.6 GB of jax[cuda13].
set -eu

venv=${1:-.venv-aot}
cd "$(dirname "$0")/.."
jax=$(sed -n 's/^jax==//p' constraints.txt)
# ptxas decides registers and spills: a committed table holds for this version.
cuda=13.5.37
plugin="jax-cuda13-plugin==$jax jax-cuda13-pjrt==$jax"
tools="nvidia-cuda-nvcc==$cuda nvidia-cuda-crt==$cuda nvidia-cuda-runtime==$cuda nvidia-nvvm==$cuda"
tools="$tools nvidia-cuda-cuobjdump==$cuda nvidia-cuda-nvdisasm==$cuda"

stamp="$venv/.moex-aot-installed"
content="$(pwd -P) $plugin $tools"
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$content" ] && "$venv/bin/python" -c '' 2>/dev/null && exit 0
if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    echo "$venv is no virtual environment: not touching it" >&2
    exit 2
fi
python=$(scripts/find_python.sh) || exit 2
echo "making $venv with the compile-only CUDA packages (1.3 GB): some minutes"
rm -rf "$venv"
"$python" -m venv "$venv"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0
# What a kernel and the training step import.
core="absl-py flax optax tyro"
# shellcheck disable=SC2086  # lists of words
"$venv/bin/python" -m pip install -qq -c constraints.txt "jax==$jax" $core
# shellcheck disable=SC2086  # lists of words
"$venv/bin/python" -m pip install -qq --no-deps $plugin $tools
echo "$content" > "$stamp"
