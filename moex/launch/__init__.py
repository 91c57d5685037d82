"""Writes what starts a run on a cluster: `python -m moex.launch slurm|k8s PRESET`."""
