"""Activations in host memory between F and B: activation_offload."""
