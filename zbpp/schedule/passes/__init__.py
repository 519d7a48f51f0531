"""Passes: Program -> Program. posts starts receives; it is the last one.

A feature's passes, which insert its instructions, are in its folder (zbpp/features).
"""
