"""What a model may ask of the split beyond plain layers. The split knows none of these files.

    recompute.py          `checkpoint` and `recompute`: one recompute for B and W together
    structures.py         tensors inside nested values, for a checkpoint's arguments and outputs
    forward_state.py      the buffers that a forward used, for its recompute
    auxiliary.py          `auxiliary_loss`: scalars that a forward reports beside its output
    past.py               keys and values of earlier slices, for a sequence that comes in slices
    sharded.py            weights on a device mesh (DTensor): W computes with the shards of its own rank
    linear_cross_entropy.py  a language model's head and its loss, without logits in float32
    grouped_linear.py     linear layers of several experts at once, over rows sorted by expert
    loss_kernels.py       the loss as one compiled kernel per pass, for 16-bit logits on a GPU
    exchange.py           a layer of experts that are spread over processes: rows sent there and back
    context.py            attention over sequences that are divided over processes: heads exchanged for tokens

A recompute is an autograd Function, which finds the B around it by the collector (../collector.py). Sharded
weights are captured by a function that is registered with `register_subclass` (../rules.py).
"""
