"""Watch every tensor that operations make, and modules of all kinds to watch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zbpp import checkpoint


class Watch(TorchDispatchMode):
    """Every storage that an operation puts out."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage().nbytes():
                storage = each.untyped_storage()
                if storage._cdata not in given:  # a view, or in place
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes(), str(func))
        return result

    def alive(self):
        """{storage: (bytes, what made it)}"""
        return {key: (size, name) for key, (ref, size, name) in self.storages.items() if not ref.expired()}


class Block(nn.Module):
    """Norm, attention, gated MLP: everything that saves activations."""

    def __init__(self, size=16):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size, bias=False)
        self.up, self.gate, self.down = (
            nn.Linear(*shape, bias=False) for shape in [(16, 32), (16, 32), (32, 16)]
        )

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Convolutional(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv1d(5, 8, 1), nn.BatchNorm1d(8), nn.GELU(), nn.Conv1d(8, 5, 3, padding=1), nn.Tanh()
        )


class CheckpointedBlock(Block):
    def forward(self, x):
        return checkpoint(super().forward, x)


class Squashed(nn.Linear):
    """W runs the chain from the product to the weight, which keeps what it has saved."""

    def forward(self, x):
        return F.linear(x, torch.tanh(self.weight).sigmoid(), self.bias)


MODULES = {
    "blocks": lambda: nn.Sequential(Block(), Block()),
    "convolutions": Convolutional,
    "checkpointed blocks": lambda: nn.Sequential(CheckpointedBlock(), CheckpointedBlock()),
    "a weight that is computed": lambda: nn.Sequential(Squashed(16, 16), nn.GELU(), Squashed(16, 16)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
    "encoder layer": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
}
