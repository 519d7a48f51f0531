"""transformers.Trainer, and subclasses of it such as TRL's SFTTrainer, in a zero-bubble pipeline.

    trainer = in_pipeline(SFTTrainer, schedule="zb_v")(model=model, args=args, train_dataset=dataset)
    trainer.train()                                            # torchrun --nproc-per-node 2 script.py

The Trainer's loop stays as it is. To accelerate a pipeline is one data-parallel process: its ranks read the
same batches. A step, its norm, an evaluation and a checkpoint are those of the whole pipeline.

replicas     several pipelines beside each other, each a data-parallel process to accelerate
trainer      in_pipeline; making a Trainer whose model is cut, its steps and evaluations
cut_model    the user's model object, cut: the pipeline, and what a rank has of the whole model
stages       the model object as stages, with its own modules
chosen_cut   the cut of layers_per_stage="auto"
folder       a model read from a folder, of which each rank reads its own tensors
batches      the Trainer's batches as microbatches; a number that tells different batches apart
losses       which loss a Trainer has: zbpp's, computed by the head, or its own compute_loss on the last stage
trl          what SFTTrainer and DPOTrainer need beside it
checkpoints  the files that the Trainer writes in one process
report       what it says at its start
refusals     what does not go with a pipeline, and what to write
names        the names of the Trainer that all this uses, and the versions that have them

Needs zbpp[trainer].
"""

from zbpp.transformers.trainer import in_pipeline

__all__ = ["in_pipeline"]
