"""Compiled stages: F, B and W of a module as three graphs, compiled by Inductor."""

from zbpp.autograd.compiled.forward import Programs, compile_stage

__all__ = ["Programs", "compile_stage"]
