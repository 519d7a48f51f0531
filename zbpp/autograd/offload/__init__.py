"""Saved tensors that leave device memory between F and B. The split knows none of these files.

    saved_activations.py  the storages that autograd saves in one forward: they leave, and come back
    host_copier.py        copies to host memory while the computation goes on, and back

Saved-tensor hooks pack what autograd saves as a PackedTensor (../capture.py). The split keeps that for a
weight whose gradient waits, and W unpacks it.
"""
