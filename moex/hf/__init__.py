"""Public checkpoints: reading their folders into a run, and writing a run as one."""
