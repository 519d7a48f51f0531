"""The W of a language model's head at the end of its B.

head_at_once   the feature
head_w         the pass that inserts it
"""
