"""Passes: Program -> Program. Each inserts instructions where a feature needs them, and knows no tensor.

posts    starts receives, and puts the gate into the program: the last pass
reduce   waits for the reductions of a step, and reduces what stages share
update   updates each stage where its gradients are final
"""
