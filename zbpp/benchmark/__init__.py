"""Measuring a model's costs, and timing schedules and runtimes on it: one job, the same work for all."""
