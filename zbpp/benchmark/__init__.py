"""Measuring a model's costs, and timing schedules and runtimes on it: one job, the same work for all.

jobs                what `zbpp bench` and `zbpp measure` call on every rank
workload            what all runners work on: one model, its batches, its stages
interleaved_timing  timing in turns, so that a slow moment of the machine hits all
bench               which schedules and runtimes are timed
torch_runner        torch's runtime, with the schedules of the same names
measurement         the costs of a model's stages: times, messages, copies, memory
delayed_links       EMULATED slow links: messages that wait before they are sent
length_costs        how times grow with the length of a microbatch
report              rows of numbers, a table, files
"""
