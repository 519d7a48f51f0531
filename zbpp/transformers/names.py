"""The names of the Trainer, and of TRL's, that a pipeline needs, and the versions that have them.

Most of them are no documented interface. So each is looked up before a Trainer is made, and a version that
lacks one is refused.
"""

from __future__ import annotations

SEEN = ("5.17.0", "5.20.0", "5.23.0")
"""The versions of transformers whose Trainer has all of these names."""

OVERRIDDEN = {
    "create_accelerator_and_postprocess": "accelerate is told that the job is one data-parallel process",
    "_move_model_to_device": "a stage is moved when the model is cut",
    "create_optimizer": "the model is cut once its parameters are in groups",
    "_wrap_model": "the wrapped model is the rank's stages",
    "get_batch_samples": "the microbatches of a step",
    "training_step": "the last microbatch of a step runs the step of all of them",
    "floating_point_ops": "counted once for microbatches of one shape",
    "evaluation_loop": "logits are made small on the last stage",
    "prediction_step": "an evaluation of the pipeline",
    "log": "what the last stage's rank has counted goes to all ranks",
    "save_model": "the tensors of all ranks go to rank 0",
    "_save": "rank 0 writes them",
    "_save_optimizer_and_scheduler": "the states of all ranks go to rank 0",
    "_load_optimizer_and_scheduler": "each rank takes its own states",
    "_save_rng_state": "rank 0 writes it, since all ranks have the same",
    "_load_rng_state": "all ranks read it",
    "get_train_dataloader": "a pipeline's share of the batches",
    "get_eval_dataloader": "likewise",
    "get_test_dataloader": "likewise",
    "_load_from_checkpoint": "other ranks' tensors are left alone",
    "_load_best_model": "other ranks' tensors are left alone",
    "hyperparameter_search": "refused",
}

CALLED = {
    "compute_loss": "by the last stage, where the loss is the Trainer's own",
    "_prepare_inputs": "puts a batch on the device",
    "_get_num_items_in_batch": "counts the targets of a batch that is evaluated",
}

OF_TRL = {
    "_metrics": "what compute_loss has counted: it goes from the last stage's rank to all ranks",
    "_total_train_tokens": "likewise",
}
SEEN_OF_TRL = ("1.0.0", "1.16.0")
"""The attributes of a Trainer of TRL that are read, and the versions of TRL that have them."""


def check_names(trainer: type) -> None:
    """Raise ValueError if a Trainer class lacks one of the names."""
    missing = [name for name in (*OVERRIDDEN, *CALLED) if not hasattr(trainer, name)]
    if missing:
        import transformers

        raise ValueError(
            f"{trainer.__name__} of transformers {transformers.__version__} has no {', '.join(missing)}, "
            f"which a pipeline needs: install transformers from {SEEN[0]} to {SEEN[-1]}"
        )


def check_names_of_trl(trainer: object) -> None:
    """Raise ValueError if a Trainer of TRL lacks one of the attributes."""
    if not any(each.__module__.startswith("trl.") for each in type(trainer).__mro__):
        return
    if missing := [name for name in OF_TRL if not hasattr(trainer, name)]:
        raise ValueError(
            f"this version of trl has no {', '.join(missing)} in its trainer, which a pipeline needs: "
            f"install trl from {SEEN_OF_TRL[0]} to {SEEN_OF_TRL[-1]}"
        )
