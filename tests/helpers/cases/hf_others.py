"""Models that are no GPTs, cut by classes as a user would write them: an encoder-decoder, and a classifier.

A model here is small, so each stage builds the library's whole model and keeps its own parts; their names are
the library's.
"""

from collections import OrderedDict

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import T5ForConditionalGeneration, ViTForImageClassification

from zbpp.models.layers import token_loss
from zbpp.partition import split_layers


def built(kind, config, seed):
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return kind(config)


class Vit:
    """Pixels [batch, channels, height, width] -> tokens -> logits [batch, classes]."""

    def __init__(self, config, seed=0):
        self.config, self.seed = config, seed

    def build_stage(self, index, num_stages):
        whole = built(ViTForImageClassification, self.config, self.seed)
        own = split_layers(self.config.num_hidden_layers, num_stages)[index]
        parts = OrderedDict((f"layer_{number}", whole.vit.layers[number]) for number in own)
        if index == 0:
            parts["embeddings"] = whole.vit.embeddings
            parts.move_to_end("embeddings", last=False)
        if index == num_stages - 1:
            parts |= {"norm": whole.vit.layernorm, "first": FirstToken(), "classifier": whole.classifier}
        return nn.Sequential(parts)

    def loss(self, output, target):
        return cross_entropy(output, target)


class FirstToken(nn.Module):
    def forward(self, x):
        return x[:, 0]


class T5:
    """Tokens and the decoder's tokens, [batch, time] each -> logits; the encoder's layers come first."""

    def __init__(self, config, seed=0):
        self.config, self.seed = config, seed

    def build_stage(self, index, num_stages):
        whole = built(T5ForConditionalGeneration, self.config, self.seed)
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
