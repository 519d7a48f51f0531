"""An update that is validated at the gate of the next step.

validation   the feature, and what a step does at its gate
gate         how far a rank runs before its gate; the instruction, and the pass that inserts it
posts        a gather in two halves: post a value now, collect all of them later
"""
