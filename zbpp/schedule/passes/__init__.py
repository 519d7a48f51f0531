"""Passes: Program -> Program. Each inserts instructions where a feature needs them, and knows no tensor.

copies   activations leave the device and come back
gate     where a step may turn out to begin again
posts    starts receives: the last pass
head_w   the W of a language model's head at the end of its B
reduce   waits for the reductions of a step, and reduces what stages share
update   updates each stage where its gradients are final
"""
