"""Interpreters: what a whole program takes, with all that passes have put into it, in time and in bytes.

timing       when each action and copy of the programs runs, over one step or several: a Timeline
memory       the bytes that a rank holds over a step, from those of its stages
stage_bytes  the bytes of a stage, and how memory switches change them
reductions   what runs beside a rank's actions, one piece at a time; when stages are reduced
exchange     how long W's take at their places where they run in the exchanges of experts
transmissions when each message occupies its link

A timetable alone has a shorter interpreter: simulate.py.
"""
