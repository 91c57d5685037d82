"""moex: trains Mixture-of-Experts language models on folded GPU meshes."""
