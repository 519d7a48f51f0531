"""Passes: Program -> Program. Each inserts instructions where a feature needs them, and knows no tensor.

copies   copies activations to host memory and back
gate     waits where a step may have to begin again
posts    starts receives; it is the last pass
head_w   runs the W of a language model's head at the end of its B
reduce   waits for the reductions of a step, and reduces what stages share
update   updates each stage where its gradients are final
"""
