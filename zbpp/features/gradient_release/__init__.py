"""Weights that are updated inside the step, whose gradients are then dropped.

gradient_release    the feature
updates             its instructions, and the passes that insert them
accumulation        each microbatch's gradients go into the optimizer's states, and are dropped
restricted_update   an optimizer's step for some of its parameters
"""
