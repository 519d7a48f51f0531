"""Cases: activation checkpointing: zbpp's, and both kinds of torch's."""

from functools import partial

import torch
import torch.utils.checkpoint
from torch import nn

from helpers.split import Case, leaf
from zbpp import checkpoint


def record(event):
    """Does nothing. A test replaces it to see what runs."""


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(p)
        self.norm = nn.LayerNorm(8)

    def forward(self, x, scale=1.0):
        record("block")
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x))))) * scale


class Checkpointed(nn.Sequential):
    """Blocks, each under `how`."""

    def __init__(self, how, *blocks):
        super().__init__(*blocks)
        self.how = how

    def forward(self, x):
        for block in self:
            x = self.how(block, x)
        return x


def plainly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def torchs(fn, *args):
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=False)


def reentrant(fn, *args):
    return torch.utils.checkpoint.checkpoint(fn, *args, use_reentrant=True)


def checkpointed_blocks(how=checkpoint, p=0.0) -> Case:
    return Case(lambda: Checkpointed(how, *(Block(p) for _ in range(3))), lambda: leaf(2, 5, 8))


def checkpoint_on_stage_0(how=checkpoint) -> Case:
    class Language(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.embedding, self.block, self.how = nn.Embedding(11, 8), Block(), how

        def forward(self, tokens):
            return self.how(lambda tokens: self.block(self.embedding(tokens)), tokens)

    return Case(lambda: Language(how), lambda: torch.randint(11, (2, 5)))


def frozen_layer_above_an_embedding(how=checkpoint, frozen=("layer",)) -> Case:
    """Only the embedding is checkpointed: no input of its Function needs grad."""

    class Language(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.embedding, self.layer, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 4)
            self.how = how
            for name in frozen:
                getattr(self, name).requires_grad_(False)

        def forward(self, tokens):
            return self.head(torch.tanh(self.layer(self.how(self.embedding, tokens))))

    return Case(lambda: Language(how), lambda: torch.randint(11, (2, 5)))


class Nested(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.outer, self.inner, self.how = Block(0.3), Block(0.3), how

    def forward(self, x):
        return self.how(lambda x: self.outer(self.how(self.inner, self.outer(x))), x)


def nested_checkpoints(how=checkpoint) -> Case:
    return Case(lambda: Nested(how), lambda: leaf(2, 5, 8))


def keywords_constants_and_none(how=checkpoint) -> Case:
    class Module(Checkpointed):
        def forward(self, x, scale, mask):
            def run(block, x, *, scale, times, mask):
                assert mask is None
                return block(x, scale=scale) * times

            for block in self:
                x = self.how(partial(run, block), x, scale=scale, times=2, mask=mask)
            return x

    return Case(lambda: Module(how, Block(), Block()), lambda: (leaf(5, 8), leaf(8), None))


def tuple_of_outputs(how=checkpoint) -> Case:
    class Module(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.block, self.how = Block(), how

        def forward(self, x):
            def run(x):
                y = self.block(x)
                return y, None, y.argmax(-1), y.sum(), y.detach()

            y, none, indices, total, detached = self.how(run, x)
            assert none is None
            assert not indices.requires_grad
            return y * detached, total * indices.sum()

    return Case(lambda: Module(how), lambda: leaf(5, 8))


def complex_outputs(how=checkpoint) -> Case:
    """A block makes complex numbers of real ones; the next one, with a complex weight, real ones again."""

    class Module(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.block, self.how = Block(), how
            self.mixing = nn.Linear(8, 8, bias=False, dtype=torch.complex128)

        def forward(self, x):
            z = self.how(lambda x: torch.complex(self.block(x), x.tanh()), x)
            z = self.how(lambda z: self.mixing(z.conj()), z)
            return z.real * z.imag

    return Case(lambda: Module(how), lambda: leaf(5, 8))


class FirstOfTwo(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a, self.b, self.how = Block(), Block(), how

    def forward(self, x):
        return self.how(lambda x: (self.a(x), self.b(x)), x)[0]


def unused_output() -> Case:
    return Case(lambda: FirstOfTwo(checkpoint), lambda: leaf(5, 8))


def parameter_used_inside_and_outside(how=checkpoint) -> Case:
    class Module(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.block, self.how = Block(), how

        def forward(self, x):
            x = self.how(self.block, x)
            x = self.block(x) * self.block.up.weight.sum()
            return self.how(self.block, x)

    return Case(lambda: Module(how), lambda: leaf(5, 8))


def parameter_as_argument(how=checkpoint) -> Case:
    class Module(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.weight, self.how = nn.Parameter(torch.randn(8, 8)), how

        def forward(self, x):
            return self.how(lambda x, w: torch.tanh(x @ w), x, self.weight)

    return Case(lambda: Module(how), lambda: leaf(5, 8))


def frozen_block(how=checkpoint, frozen="all of it") -> Case:
    def make_module(how):
        module = Checkpointed(how, Block(), Block(), Block())
        (module[1] if frozen == "all of it" else module[1].up).requires_grad_(False)
        return module

    return Case(lambda: make_module(how), lambda: leaf(5, 8))


def input_that_is_a_view(how=checkpoint) -> Case:
    return Case(lambda: Checkpointed(how, Block(), Block()), lambda: (leaf(8, 5) * 2).t().tanh())


def in_place_operations_inside(how=checkpoint) -> Case:
    class InPlace(Block):
        def forward(self, x):
            return super().forward(x).mul_(2).add_(1)

    return Case(lambda: Checkpointed(how, InPlace(), InPlace()), lambda: leaf(5, 8))


def torchs_checkpoint() -> Case:
    return Case(
        lambda: Checkpointed(torchs, *(Block(0.3) for _ in range(3)), nn.Linear(8, 8)), lambda: leaf(5, 8)
    )


def layers_beside_torchs_checkpoint() -> Case:
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = nn.Linear(8, 8), Block(), nn.Linear(8, 8)

        def forward(self, x):
            return self.last(torchs(self.block, self.first(x)))

    return Case(Module, lambda: leaf(5, 8))


class AroundReentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), Block(0.3), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(reentrant(self.block, self.first(x)))


def reentrant_checkpoint(needs_grad=True) -> Case:
    return Case(AroundReentrant, lambda: leaf(5, 8) if needs_grad else torch.randn(5, 8), grads_in_b=True)
