"""Everything around the pipeline's step: data, optimizer, metrics, checkpoints, the trainer.

trainer         the training loop: batch, step of the pipeline, update, metrics
batches         the batches that one process reads
length_plans    which sequences share a microbatch, and in which order microbatches go
evaluation      means over held-out microbatches
optim/          the update of the weights: optimizers, precision, post-validation
fine_tuned      a model of which only a part is trained
lora            adapters on its stages by peft, and their files

run_folder      the folder of a run
weights         its weights, by their names in the whole model
checkpoints     when checkpoints are saved, and which one a run goes on from
loggers         where a run is logged
measured_steps  figures of measured steps, and the summary of a run
callbacks       compares copies, profiles

replan          a new plan after the first steps, for their times
non_finite      what happens when a loss or a norm is NaN or infinite
leaving         what ends a run early
"""
