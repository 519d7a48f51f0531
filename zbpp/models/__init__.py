"""Models that are built one stage at a time: see `zbpp.stage_api.PipelineModel`.

gpt.py, llama.py, mlp.py  models of this package, made of the parts in layers.py and llama_layer.py
documents.py              stages that tell several documents in a row apart
tensor_parallel.py        shards the stages of gpt.py and llama.py
emulated.py               stages that sleep instead of computing: more ranks than cores
flops.py                  what a transformer's head costs beside its layers, from sizes alone
hf.py                     any causal language model of Hugging Face, from its config or a folder; it uses
    hf_config.py          the config, checked; hf_files.py, hf_load.py: the weights in a folder
    hf_shrink.py          a small copy of the config, to try a cut on
    hf_calls.py           how the small model calls its layers, and which stage uses which parameter
    hf_check.py           the proof, on the small model, that its stages compute what the whole model does
    hf_init.py            initial values for the tensors of one stage
    hf_cut.py             a stage: the library's model with the layers of other stages skipped
    hf_masks.py           attention masks and positions; hf_ties.py: tied parameters
    hf_parallel.py        tensor parallelism by the library's plan
hf_export.py              writes weights as a folder that transformers loads
"""
