"""Everything around the pipeline's step: data, optimizer, metrics, checkpoints, the trainer."""
