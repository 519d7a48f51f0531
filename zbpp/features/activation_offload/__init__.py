"""Activations in host memory between F and B.

activation_offload   the feature
copies               its instructions, and the pass that inserts them
choice               which values leave the device, by costs, and where the instructions stand
"""
