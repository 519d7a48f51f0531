"""The stage API is not about GPTs: an encoder-decoder, cut by a class as a user would write it."""

import pytest
import torch

pytest.importorskip("transformers")

from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from helpers.processes import run_ranks
from zbpp import Pipeline, plan
from zbpp.models.layers import token_loss
from zbpp.partition import split_layers


def built(config):
    """The library's whole model: it is small, so each stage builds it and keeps its own parts."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return T5ForConditionalGeneration(config)


class T5:
    """Tokens and the decoder's tokens, [batch, time] each -> logits; the encoder's layers come first."""

    def __init__(self, config):
        self.config = config

    def build_stage(self, index, num_stages):
        whole = built(self.config)
        num_encoder = self.config.num_layers
        own = split_layers(num_encoder + self.config.num_decoder_layers, num_stages)[index]
        return T5Stage(
            whole, [n for n in own if n < num_encoder], [n - num_encoder for n in own if n >= num_encoder]
        )

    def tied(self):
        return dict.fromkeys(("decoder.embed_tokens.weight", "lm_head.weight"), "encoder.embed_tokens.weight")

    def loss(self, output, target):
        return token_loss(output, target)


class T5Stage(nn.Module):
    """Some layers of the encoder, then some of the decoder.

    Between stages go (x, position bias, what the encoder computed, decoder's tokens), None for what there is
    not yet or no more. The bias is computed by the first layer of either half, and used by all others.
    """

    def __init__(self, whole, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.block = nn.ModuleDict({str(n): whole.encoder.block[n] for n in encoder})
        self.decoder.block = nn.ModuleDict({str(n): whole.decoder.block[n] for n in decoder})
        self.begins_encoder, self.begins_decoder = 0 in encoder, 0 in decoder
        self.ends_encoder = len(whole.encoder.block) - 1 in encoder
        self.ends_decoder = len(whole.decoder.block) - 1 in decoder
        if self.begins_encoder:
            self.encoder.embed_tokens = whole.encoder.embed_tokens
        if self.ends_encoder:
            self.encoder.final_layer_norm = whole.encoder.final_layer_norm
        if self.begins_decoder:
            self.decoder.embed_tokens = whole.decoder.embed_tokens
        if self.ends_decoder:
            self.decoder.final_layer_norm, self.lm_head = whole.decoder.final_layer_norm, whole.lm_head
            self.scale = whole.model_dim**-0.5 if whole.config.scale_decoder_outputs else 1.0

    def forward(self, *received):
        if self.begins_encoder:
            tokens, decoder_tokens = received
            x, bias, memory = self.encoder.embed_tokens(tokens), None, None
        else:
            x, bias, memory, decoder_tokens = received
        for block in self.encoder.block.values():
            x, bias, _ = block(x, None, bias)
        if self.ends_encoder:
            x, bias, memory = None, None, self.encoder.final_layer_norm(x)
        if self.begins_decoder:
            x, decoder_tokens = self.decoder.embed_tokens(decoder_tokens), None
        for block in self.decoder.block.values():
            mask = causal(x) if bias is None else None  # the bias holds the mask from then on
            x, bias, _ = block(x, mask, bias, memory)
        if self.ends_decoder:
            return self.lm_head(self.decoder.final_layer_norm(x) * self.scale)
        return x, bias, memory, decoder_tokens


def causal(x):
    time = x.shape[1]
    above = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
    return x.new_zeros(1, 1, time, time).masked_fill(above, torch.finfo(x.dtype).min)


CONFIG = T5Config(
    d_model=16,
    d_kv=8,
    d_ff=24,
    num_layers=3,
    num_decoder_layers=3,
    num_heads=2,
    vocab_size=40,
    dropout_rate=0.0,
)
GENERATOR = torch.Generator().manual_seed(0)
TOKENS, ANSWER = (torch.randint(40, (4, time), generator=GENERATOR) for time in (9, 7))


def on_ranks(rank, num_ranks, schedule, num_stages):
    with Pipeline(T5(CONFIG), plan(schedule, num_ranks, 2, **num_stages)) as pipeline:
        losses = pipeline.step(TOKENS, ANSWER, target=ANSWER.roll(-1, 1))
        return [float(each) for each in losses], {n: p.grad for n, p in pipeline.named_parameters()}


def check(results):
    """Losses and gradients of all ranks are the library's; each parameter is on some rank."""
    whole = built(CONFIG)
    logits = whole(input_ids=TOKENS, decoder_input_ids=ANSWER, use_cache=False).logits
    loss = token_loss(logits, ANSWER.roll(-1, 1))
    loss.backward()
    assert sum(each for losses, _ in results for each in losses) / 2 == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: each.grad for name, each in whole.named_parameters(remove_duplicate=False)}
    found = set()
    for _, grads in results:
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
        found |= grads.keys()
    assert expected.keys() - found <= {"shared.weight", "decoder.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_an_encoder_decoder_is_trained_as_uncut(num_stages):
    """With 2 stages the decoder begins with a stage, with 3 it begins within one."""
    check([on_ranks(0, 1, "interleaved_1f1b", {"stages_per_rank": num_stages})])


def test_an_encoder_decoder_on_two_ranks_sums_the_gradients_of_its_tied_embeddings():
    check(run_ranks(on_ranks, 2, 2, "zb_v", {}))
