"""Extras that hold less on the device.

activation_offload   activations in host memory between F and B
gradient_release     weights updated inside the step, their gradients dropped
weight_offload       weights that live in host memory: WHERE A WEIGHT IS, AND WHEN
weight_blocks        the blocks whose weights are offloaded, and what is refused
weight_buffers       host memory, and the two buffers on the device
offloaded_gradients  W of such a block: its gradients on the device, and home again
saved_weights        what autograd has saved of a block's weights, packed
"""
