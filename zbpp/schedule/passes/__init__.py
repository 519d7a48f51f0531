"""Passes: Program -> Program. Each inserts instructions where a feature needs them, and knows no tensor.

reduce   waits for the reductions of a step, and reduces what stages share
update   updates each stage where its gradients are final
"""
