"""Models that are built one stage at a time: see `zbpp.stage_api.PipelineModel`.

gpt.py, llama.py, mlp.py  models of this package, made of the parts in layers.py and llama_layer.py
attention.py              causal attention of a slice's queries, without a mask
experts.py                a mixture of experts as a layer's MLP
tensor_parallel.py        shards the stages of gpt.py and llama.py
emulated.py               stages that sleep instead of computing: more ranks than cores
hf/                       any causal language model of Hugging Face, from its config or a folder
"""
