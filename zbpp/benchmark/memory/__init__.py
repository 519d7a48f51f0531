"""Figures of the switches for memory and for the optimizer's step."""
