"""Measuring a model's costs, and racing schedules and runtimes on it: one job, the same work for all."""
