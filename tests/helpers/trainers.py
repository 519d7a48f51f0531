"""A small Trainer on one rank."""

from functools import partial

from zbpp import Pipeline, plan
from zbpp.data import regression_data
from zbpp.models.mlp import Mlp
from zbpp.training.optim.optimizer import adamw, warmup_cosine
from zbpp.training.trainer import Trainer

NUM_MICROBATCHES, BATCH_SIZE = 4, 8


def small_trainer(schedule="zb_v", *, num_steps=20, optimizer=adamw, **options):
    """A Trainer of an Mlp in two stages on random regression; options: of the Trainer."""
    model, timetable = (
        Mlp(in_features=6, hidden_size=10, out_features=3, num_layers=4),
        plan(schedule, 1, NUM_MICROBATCHES),
    )
    stages = {index: model.build_stage(index, timetable.num_stages) for index in timetable.stages_of(0)}
    pipeline = Pipeline(stages, timetable, model.loss)
    made = optimizer(pipeline.parameters(), learning_rate=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return Trainer(
        pipeline=pipeline,
        optimizer=made,
        data=regression_data(in_features=6, out_features=3, batch_size=BATCH_SIZE, seed=0),
        learning_rate=partial(warmup_cosine, num_steps=num_steps, warmup_steps=5, min_ratio=0.1),
        **options,
    )
