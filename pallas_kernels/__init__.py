"""Per-device array operations of MoE layers, each with an oracle and one implementation a back end."""
