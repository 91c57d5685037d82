#!/usr/bin/env bash
# One process for each GPU of the named hosts, by Open MPI. From the checkout:
#   scripts/launch/mpirun.sh host0:8,host1:8 qwen3_30b_a3b --parallel.ep 16 --parallel.transport alltoall
# One process for each host: host0:1,host1:1. Process 0 runs on the first host; PORT must be free there.
set -u
if [ $# -lt 1 ]; then
    echo "usage: $0 HOST:PROCESSES[,HOST:PROCESSES ...] [train.py's arguments]" >&2
    exit 2
fi
hosts=$1
shift

# Open MPI up to 4 tells the processes where mpirun runs; Open MPI 5 doesn't, and mpirun may run elsewhere.
export COORDINATOR_ADDRESS="${COORDINATOR_ADDRESS:-${hosts%%:*}:${PORT:-61441}}"
exec mpirun --host "$hosts" --map-by slot -x COORDINATOR_ADDRESS -x PATH .venv/bin/python train.py "$@"
