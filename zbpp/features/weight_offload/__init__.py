"""Weights that live in host memory.

weight_offload   the feature: WHERE A WEIGHT IS, AND WHEN
weight_buffers   host memory, and the two buffers on the device
"""
