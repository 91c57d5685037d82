"""What the compiler makes of a training step for GPUs that aren't here."""
