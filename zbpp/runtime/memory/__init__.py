"""Extras that hold less on the device.

activation_offload   activations in host memory between F and B
gradient_release     weights updated inside the step, their gradients dropped
head_at_once         W of a language model's head at the end of its B
weight_offload       weights that live in host memory: WHERE A WEIGHT IS, AND WHEN
weight_buffers       host memory, and the two buffers on the device
"""
