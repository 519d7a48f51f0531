"""What a configured training run will hold, and how long its steps take, before anything runs: `zbpp memory`.

predictor        each rank's memory over a step; which stages recompute (memory.recompute=auto)
switches         what each switch of memory saves and costs, and which of them make a run fit
stage_memory     the bytes of each stage, measured on fake tensors
measured_stages  these bytes, and what switches make of them
step_time        the simulated step, with the switches that are on
"""
