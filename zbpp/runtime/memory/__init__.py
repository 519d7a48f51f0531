"""Extras that hold less on the device.

activation_offload   activations in host memory between F and B
gradient_release     weights updated inside the step, their gradients dropped
accumulation         each microbatch's gradients go into the optimizer's states, and are dropped
restricted_update    an optimizer's step for some of its parameters
head_at_once         W of a language model's head at the end of its B
weight_offload       weights that live in host memory: WHERE A WEIGHT IS, AND WHEN
weight_buffers       host memory, and the two buffers on the device
sequence_slices      sequences in slices: the keys and values that F's of a microbatch share
"""
