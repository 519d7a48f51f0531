"""Weights on a device mesh (DTensor): W computes with the shards of its own rank.

For y = x @ w.T + bias, these placements let W compute a rank's shard of the gradient from that rank's shards
of x and dy. A line of this table holds for one dimension of the mesh:

    layer       w           x           dy          bias
    colwise     Shard(0)    Replicate   Shard(-1)   Shard(0)
    rowwise     Shard(1)    Shard(-1)   Replicate   Replicate
    neither     Replicate   Replicate   Replicate   Replicate

A rule states its own table as `Rule.shards`. If the weight or x is placed otherwise, B computes the gradient.
If dy is placed otherwise, dy is redistributed at the end of B, and W computes with shards as usual.

A model that computes with its own shard alone takes `local_part(weight)`, as experts do that are spread over
processes. The node of that Function is a view (../views.py): W adds to the local part of the gradient.

A DTensor has two counts of in-place changes (`_version`): its own, and that of the tensor that holds its
shard. An operation on the DTensor raises the first count only, an operation on the shard the second only. W
checks both. A change through another view of the shard, made by DTensor itself, raises neither count.

The split imports nothing of torch.distributed: where a DTensor exists, its module has been imported.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.autograd.capture import Add, AddOfParts, Capture, HeldTensors, is_kept
from zbpp.autograd.rules import DirectCapture, Rule
from zbpp.autograd.views import MATRIX_TRANSPOSE, VIEWS, View

Placements = tuple[Any, ...]
Dims = tuple[int | None, ...]
"""For each dimension of a mesh: the dimension of a tensor that is sharded there, None if it is replicated."""


class OnMesh(NamedTuple):
    """A DTensor that W needs, and the tensor that holds its shard on this rank."""

    whole: Tensor
    shard: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are kept alive."""
        return (self.shard,)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.whole.shape

    @property
    def _version(self) -> int:
        """Like a tensor's: it grows when the DTensor or the shard is changed in place."""
        return self.whole._version + self.shard._version


class AddOfShards(AddOfParts):
    """An Add whose target is a DTensor and whose other arguments are OnMesh: calls `add` with their shards.

    placements: those of the leaf and of its gradient. dy_dims: the placements that dy needs, as Dims.
    """

    def __init__(self, add: Add, placements: Placements, dy_dims: Dims) -> None:
        self.add, self.placements, self.dy_dims = add, placements, dy_dims

    def __call__(self, target: Any, held: HeldTensors, dy: Any, fresh: bool) -> None:
        if target.placements != self.placements:
            raise ValueError(
                f"a gradient is placed as {target.placements} and its parameter as {self.placements}: write "
                "p.grad = p.grad.redistribute(placements=p.placements), the same for a main_grad"
            )
        self.add(target.to_local(), tuple([each.shard for each in held]), dy.shard, fresh)

    def placed(self, dy: Any) -> OnMesh:
        """dy, placed as the product of shards needs it."""
        wanted = _placements(self.dy_dims, dy)
        if dy.placements != wanted:
            dy = dy.redistribute(placements=wanted)
        return OnMesh(dy, shard_of(dy))


class WordShard(NamedTuple):
    """The words of a vocabulary that this rank has: those from `first` on.

    most: the most words that a rank has. The ranks along dimension `dim` of the mesh share the words.
    """

    first: int
    most: int
    mesh: Any
    dim: int

    def gather(self, numbers: Tensor) -> Tensor:
        """The numbers of all ranks that share the words, in an additional first dimension."""
        found = [torch.empty_like(numbers) for _ in range(self.mesh.size(self.dim))]
        sys.modules["torch.distributed"].all_gather(
            found, numbers.contiguous(), self.mesh.get_group(self.dim)
        )
        return torch.stack(found)


def word_shard(tensor: Any, words: int) -> WordShard | None:
    """The words that this rank has of a DTensor whose dimension `words` counts them.

    None unless one dimension of the mesh shards the words, and the others shard nothing.
    """
    dims = _dims(tensor.placements)
    if dims is None or sorted(dims, key=str) != [words, *[None] * (len(dims) - 1)]:
        return None
    mesh, dim, num_words = tensor.device_mesh, dims.index(words), tensor.shape[words]
    most = -(-num_words // mesh.size(dim))
    return WordShard(min(mesh.get_local_rank(dim) * most, num_words), most, mesh, dim)


def on_each_rank(tensor: Any, sums_gradient: WordShard | None = None) -> Tensor:
    """A DTensor as a whole tensor on each rank.

    sums_gradient: each rank computes a part of the gradient, from its words; the gradient is their sum.
    """
    whole = _placements((None,) * len(tensor.placements), tensor)
    of_gradient = [*whole]
    if sums_gradient is not None:
        of_gradient[sums_gradient.dim] = sys.modules["torch.distributed.tensor"].Partial()
    local: Tensor = tensor.redistribute(placements=whole).to_local(grad_placements=of_gradient)
    return local


def replicated(tensor: Tensor, like: Any) -> Tensor:
    """A tensor that is equal on all ranks, as a DTensor on the mesh of another one."""
    placements = _placements((None,) * len(like.placements), tensor)
    whole: Tensor = type(like).from_local(tensor, like.device_mesh, placements, run_check=False)
    return whole


def is_on_mesh(tensor: Any) -> bool:
    """Whether something is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(weight: Tensor) -> Tensor:
    """This process's part of a DTensor, to compute with alone; any other tensor as it is.

    The part's gradient is this process's part of the DTensor's.
    """
    if not is_on_mesh(weight):
        return weight
    part: Tensor = _LocalPart.apply(weight)  # type: ignore[no-untyped-call]  # torch's
    return part


class _LocalPart(torch.autograd.Function):
    changes_no_gradient = True  # see node_roles.py

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        ctx.like = weight.device_mesh, weight.placements, weight.shape, weight.stride()
        return _local(weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        mesh, placements, shape, stride = ctx.like
        dtensor: Any = sys.modules["torch.distributed.tensor"].DTensor
        whole: Tensor = dtensor.from_local(
            dy.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
        )
        return whole


def _local(tensor: Any) -> Tensor:
    part: Tensor = tensor._local_tensor
    return part.view_as(part)


_LOCAL_PART = View(_local)
VIEWS["_LocalPartBackward"] = _LOCAL_PART


class AddToView:
    """An Add to a view of a target, made by several views one after the other."""

    def __init__(self, add: Add, views: tuple[View, ...]) -> None:
        self.add, self.views = add, views

    def __call__(self, target: Tensor, held: HeldTensors, dy: Tensor, fresh: bool) -> None:
        if fresh and not all(view.whole for view in self.views):
            _local(target).zero_()
            fresh = False
        for view in self.views:
            target = view.apply(target)
        self.add(target, held, dy, fresh)


def capture_shards(
    site: Any, rule: Rule, operand: int, leaf: Any, views: tuple[View, ...] | None
) -> Capture | None:
    """What W needs for this rank's shard of the gradient; None if B has to compute the gradient."""
    if not is_on_mesh(leaf):
        return None
    if views and views[0] is _LOCAL_PART:
        of_part = rule.capture(site, operand)
        return of_part and Capture(of_part.held, AddToView(of_part.add, views))
    direct, dims = rule.direct.get(operand), _dims(leaf.placements)
    is_transposed = direct is not None and views == (MATRIX_TRANSPOSE,)
    if dims is None or leaf.dim() > 2 or not (is_transposed or views == ()):
        return None  # the tables hold for matrices and biases, as they are or transposed
    if is_transposed:
        dims = tuple([None if dim is None else 1 - dim for dim in dims])
    table = rule.shards.get(operand, {})
    if any(dim not in table for dim in dims):
        return None
    capture = _saved_on_mesh(site, direct, is_transposed) if direct else _on_mesh(rule.capture(site, operand))
    factor_dims, dy_dims = zip(*[table[dim] for dim in dims], strict=True)
    if capture is None or not all(_is_placed(each.whole, leaf, factor_dims) for each in capture.held):
        return None
    return Capture(capture.held, AddOfShards(capture.add, leaf.placements, dy_dims))


def _saved_on_mesh(site: Any, direct: DirectCapture, is_transposed: bool) -> Capture | None:
    """The factor that a product has saved, with its own shard: detach() makes another tensor of the shard."""
    if not is_kept(getattr(site, direct.raw_attribute)):
        return None
    factor = getattr(site, direct.attribute)
    if not is_on_mesh(factor):
        return None
    held = OnMesh(factor.detach(), shard_of(factor))
    return Capture((held,), direct.add_transposed if is_transposed else direct.add)


def _on_mesh(capture: Capture | None) -> Capture | None:
    """A capture of DTensors as a capture of OnMesh; None if it holds something else."""
    if capture is None or not all(map(is_on_mesh, capture.held)):
        return None
    return Capture(tuple([OnMesh(each, shard_of(each)) for each in capture.held]), capture.add)


def shard_of(tensor: Any) -> Tensor:
    """The tensor that holds a DTensor's shard on this rank; waits for it if it is still being received."""
    with torch.no_grad():  # with gradients to_local() returns a view, and waits for nothing
        shard: Any = tensor.to_local()
    return shard.wait() if hasattr(shard, "wait") else shard


def _dims(placements: Placements) -> Dims | None:
    """The placements as Dims; None if one of them is neither Shard nor Replicate."""
    module: Any = sys.modules["torch.distributed.tensor"]
    if any(type(each) not in (module.Shard, module.Replicate) for each in placements):
        return None
    return tuple([getattr(each, "dim", None) for each in placements])


def _placements(dims: Dims, tensor: Tensor) -> Placements:
    """Dims as placements of a tensor: the reverse of `_dims`. -1 is the tensor's last dimension."""
    module: Any = sys.modules["torch.distributed.tensor"]
    replicate, shard = module.Replicate, module.Shard
    return tuple([replicate() if dim is None else shard(dim % tensor.dim()) for dim in dims])


def _is_placed(tensor: Any, leaf: Any, dims: Dims) -> bool:
    """Whether a tensor is on the leaf's mesh and sharded along these dimensions."""
    return tensor.device_mesh == leaf.device_mesh and tensor.placements == _placements(dims, tensor)
