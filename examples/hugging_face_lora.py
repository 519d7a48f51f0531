"""LoRA on a Hugging Face model that no rank holds as a whole; peft loads the adapter.

torchrun --standalone --nproc-per-node 2 hugging_face_lora.py

FOLDER behind the command is a folder with config.json and safetensors. Without it, a small Llama is made.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import zbpp
from zbpp.models.hf import HuggingFace
from zbpp.training.fine_tuned import FineTuned
from zbpp.training.lora import save_adapter

LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def make_small_llama(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128, **sizes)).save_pretrained(folder)


def main() -> None:
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "small_llama")
    if dist.get_rank() == 0 and not folder.exists():
        make_small_llama(folder)
    dist.barrier()

    model = FineTuned(HuggingFace(path=str(folder)), lora=LORA)
    # With adapters W is short, and a V of two stages per rank idles least: docs/planning.md.
    with zbpp.Pipeline(model, "zb_v", num_microbatches=4) as pipeline:
        adapters = [each for each in pipeline.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=1e-2)
        tokens = torch.randint(128, (8, 17), generator=torch.Generator().manual_seed(0))
        for step in range(10):
            # `target` is shifted already: the tokens that follow. -100: a token that does not count.
            losses = pipeline.step(tokens[:, :-1], target=tokens[:, 1:])
            zbpp.clip_grad_norm_(pipeline, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if losses:
                print(f"step {step}  loss {sum(losses) / len(losses):.4f}")
        save_adapter(Path("adapter"), pipeline, LORA, base=str(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
