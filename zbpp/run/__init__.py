"""From a config to a finished run, and to an exported model.

app            puts a run together from the parts below, and runs it
checks         which switches of a config don't go together
plan           the timetable that a run begins with
cut            model.layers_per_stage=auto: what it needs, and the cut that a run has had so far
speeds         the speeds of ranks, where parallel.speeds does not give them
model          the user's model, and this rank's stages of it
stages         the stages before the first step: device, dtype, mesh, recompute, compile
data           the data
optimizer      the optimizer and its learning rate
trainer        the pipeline, and the trainer over it
callbacks      callbacks and loggers
results        what a run writes at its end

export         a run's weights as a folder that transformers loads
explain_stage  what the split does with each weight of one stage
"""
