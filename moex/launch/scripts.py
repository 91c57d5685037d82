"""The texts of a SLURM batch script and of a Kubernetes JobSet."""

import shlex
from collections.abc import Sequence

from moex.launch.settings import SAVE_S, UNSET, settings
from moex.plan.target import Target


def num_hosts(target: Target) -> int:
    return -(-target.num_gpus // target.gpus_per_host)


def slurm(
    name: str, arguments: Sequence[str], target: Target, *, verdict: str, per: str = "node", hours: int = 24,
) -> str:  # fmt: skip
    """A script for `sbatch`, to be started from the checkout.

    Args:
      arguments: of train.py.  verdict: what the plan says, for the head.
      per: `node`, one process drives a host's GPUs; `gpu`, each has its own.
    """
    tasks = 1 if per == "node" else target.gpus_per_host
    hosts = num_hosts(target)
    head = [
        "#!/usr/bin/env bash",
        f"# {name} on {target}; one process for each {per}. {verdict}",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={hosts}",
        f"#SBATCH --ntasks-per-node={tasks}",
        f"#SBATCH --gpus-per-node={target.gpus_per_host}",
        "#SBATCH --exclusive",
        f"#SBATCH --time={hours}:00:00",
        f"#SBATCH --signal=TERM@{SAVE_S}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    per_domain = target.domain // target.gpus_per_host
    if per_domain > 1 and hosts > per_domain and hosts % per_domain == 0:
        head.append(f"#SBATCH --segment={per_domain}  # hosts of one NVLink domain stay together (topology/block)")
    body = ["set -u", 'cd "${SLURM_SUBMIT_DIR:-.}" || exit 2', f"unset {' '.join(UNSET)}  # they can hang the start"]
    body += [line for s in settings(target) for line in (f"# {s.why}", f'export {s.name}="{s.value}"')]
    tail = [
        "",
        "# --wait: when one process ends, the others get a minute to tell why.",
        f"srun --wait=60 .venv/bin/python train.py {shlex.join(arguments)}",
        "status=$?",
        "",
        f"# 75: told {SAVE_S} seconds before its end, the run has saved. The same job continues it.",
        'if [ "$status" -eq 75 ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$status"',
    ]
    return "\n".join([*head, *body, *tail]) + "\n"


def jobset(
    name: str, arguments: Sequence[str], target: Target, *, verdict: str, image: str, volume: str, restarts: int = 10,
) -> str:  # fmt: skip
    """A JobSet for `kubectl apply`: a pod for each host, which drives all its GPUs.

    Args:
      arguments: of train.py.  verdict: what the plan says.
      image: with the checkout in /moex.  volume: claim that all pods can write, mounted at /runs.
    """
    hosts = num_hosts(target)
    name = name.replace("_", "-")
    variables = [f"# {s.why}\n- {{name: {s.name}, value: {_quoted(_in_pod(s.value))}}}" for s in settings(target)]
    variables += [
        f'- {{name: NUM_PROCESSES, value: "{hosts}"}}',
        _from_label("JOBSET_NAME", "jobset-name"),
        _from_label("REPLICATED_JOB_NAME", "replicatedjob-name"),
    ]
    listed = ", ".join(_quoted(a) for a in _on_volume(name, arguments))
    return _JOBSET.format(
        about=f"{name} on {target}. {verdict}", name=name, restarts=restarts, hosts=hosts, grace=SAVE_S, image=image,
        arguments=listed, variables=_indented("\n".join(variables), 20), gpus=target.gpus_per_host, volume=volume,
    )  # fmt: skip


_JOBSET = """# {about}
# Needs the JobSet controller (jobset.sigs.k8s.io). kubectl apply -f FILE
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    enableDNSHostnames: true
    publishNotReadyAddresses: true  # process 0 is looked for before it is ready
  failurePolicy:
    maxRestarts: {restarts}  # each continues from the newest checkpoint, also after exit code 75 (preempted, saved)
  replicatedJobs:
    - name: worker
      replicas: 1
      template:
        spec:
          completions: {hosts}
          parallelism: {hosts}
          backoffLimit: 0  # one lost process ends the run: the JobSet starts all of them again
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {grace}  # time to save
              containers:
                - name: train
                  image: {image}
                  workingDir: /moex
                  command: [".venv/bin/python", "train.py"]
                  args: [{arguments}]
                  env:
{variables}
                  resources:
                    limits:
                      nvidia.com/gpu: {gpus}
                  volumeMounts:
                    - {{name: runs, mountPath: /runs}}
                    - {{name: shm, mountPath: /dev/shm}}
              volumes:
                - name: runs
                  persistentVolumeClaim: {{claimName: {volume}}}
                - name: shm
                  emptyDir: {{medium: Memory}}  # NCCL's, between a host's GPUs
"""


def _on_volume(name: str, arguments: Sequence[str]) -> Sequence[str]:
    """train.py's arguments, with a run folder that outlives the pods unless one is given."""
    given = any(a.partition("=")[0] == "--folder" for a in arguments)
    return arguments if given else [*arguments, "--folder", f"/runs/{name}"]


def _in_pod(value: str) -> str:
    """Kubernetes expands no shell defaults: caches lie on the shared volume."""
    return "/runs/.jax_cache" if value.startswith("${MOEX_CACHE") else value


def _from_label(name: str, label: str) -> str:
    path = f"metadata.labels['jobset.sigs.k8s.io/{label}']"
    return f"- name: {name}\n  valueFrom:\n    fieldRef:\n      fieldPath: {path}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _indented(text: str, by: int) -> str:
    return "\n".join(" " * by + line for line in text.splitlines())
