"""Predicts the memory and the step time of a configured training run, before the run begins: `zbpp memory`.

predictor        each rank's memory over a step; the stages that recompute (memory.recompute=auto)
programs         the programs of a configured run, with what its features put into a step
chosen_cut       the cut for ranks of unequal speed and memory (model.layers_per_stage=auto)
cut              the cut of a model whose fullest rank holds the fewest bytes
switches         how much each memory switch saves, what it costs, and which switches make a run fit
stage_memory     measures the bytes of each stage, on fake tensors if possible
measured_stages  the measured bytes, and how memory switches change them
"""
