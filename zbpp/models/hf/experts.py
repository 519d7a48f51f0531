"""Experts of a Hugging Face model: spread over processes, by the library's registry; and what balances them.

The library stacks a layer's experts in one module, `gate_up_proj` [experts, ...] and `down_proj`, and lets a
registered function compute it. Ours is registered as "zbpp_exchange". It calls the library's own while each
process has all experts; else it exchanges the tokens' rows (zbpp/autograd/models/exchange.py). Routers,
shared experts and all else of the model are the library's code.

Where the config asks for output_router_logits, the library adds a loss that balances experts, of the logits
of all routers of the model. No stage has all of them. So each router reports the loss of its own logits.
"""

from __future__ import annotations

import logging
import sys
from copy import copy
from functools import partial
from inspect import Signature, signature
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.autograd.models.auxiliary import auxiliary_loss
from zbpp.autograd.models.exchange import Exchange, through_experts
from zbpp.autograd.models.grouped_linear import grouped_linear
from zbpp.autograd.models.sharded import local_part

_log = logging.getLogger(__name__)

_NAME = "zbpp_exchange"


def report_balance(model: Any) -> None:
    """Let each router in a library's causal model report the auxiliary loss "balance".

    The sum over a model's routers is router_aux_loss_coef x the mean of the library's loss of each, over the
    tokens that are not padding. Logs a warning for a family whose routers or loss are not known by their
    usual names.
    """
    recorder: Any = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    balance: Any = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    sizes = getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)
    coefficient: Any = getattr(model, "router_aux_loss_coef", None)
    if not hasattr(recorder, "target_class") or None in (balance, coefficient, *sizes):
        _log.warning("output_router_logits: %s has no loss that balances experts here", type(model).__name__)
        return
    routers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, recorder.target_class) and name.endswith(recorder.layer_name or "")
    ]

    seen = _SeenMask(model, routers)

    def report(router: nn.Module, args: Any, output: Any) -> None:
        if router.training:
            logits = output[recorder.index] if isinstance(output, tuple) else output
            loss = balance((logits,), *sizes, seen.counting(len(logits.flatten(0, -2))))
            auxiliary_loss("balance", coefficient / len(routers) * loss)

    for router in routers:
        router.register_forward_hook(report)


class _SeenMask:
    """The mask that a layer's attention gets, for the router behind it in the same layer.

    A recompute runs the layer again, attention first, so that the router always has its own layer's mask.
    """

    def __init__(self, model: nn.Module, routers: list[Any]) -> None:
        self._mask: Tensor | None = None
        for module in model.modules():
            takes = signature(module.forward)
            if "attention_mask" in takes.parameters and not set(routers) & set(module.modules()):
                module.register_forward_pre_hook(partial(self._remember, takes), with_kwargs=True)

    def _remember(self, takes: Signature, _: nn.Module, args: Any, kwargs: Any) -> None:
        mask = takes.bind_partial(*args, **kwargs).arguments.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) else None

    def counting(self, num_tokens: int) -> Tensor | None:
        """[batch, time]: False for padding; None if all tokens count, or if the mask is of other tokens.

        Of a mask [batch, 1, time, keys] a token counts if it may attend to itself.
        """
        mask = self._mask
        if mask is None:
            return None
        if mask.dim() == 4:
            itself = mask[:, 0].diagonal(mask.shape[-1] - mask.shape[-2], -2, -1)
            mask = itself if itself.dtype == torch.bool else itself == 0
        return mask if mask.numel() == num_tokens else None


def hold_exchanges(stage: nn.Module) -> None:
    """Give each module of stacked experts an Exchange, so that its experts can be spread."""
    found: list[Any] = [module for module in stage.modules() if _is_stacked(module)]
    if not found:
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts_forward)
    for module in found:
        module.exchange = _LibraryExchange(module.config._experts_implementation)
        # A config of its own: other modules of the model have the same one.
        module.config = copy(module.config)
        module.config._experts_implementation = _NAME


class _LibraryExchange(Exchange):
    """own: the library's name of the function that computes experts which are not spread."""

    def __init__(self, own: str | None) -> None:
        super().__init__()
        self.own = own


def _is_stacked(module: Any) -> bool:
    """Whether the library lets a registered function compute this module, and each parameter is stacked."""
    own = dict(module.named_parameters(recurse=False))
    return (
        hasattr(module, "_is_expert_parallel")
        and hasattr(type(module).forward, "__wrapped__")
        and "down_proj" in own
        and all(len(each) == module.num_experts for each in own.values())
    )


def _experts_forward(module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """(x [tokens, hidden], chosen experts [tokens, k], their weights [tokens, k]) -> [tokens, hidden]."""
    exchange: _LibraryExchange = module.exchange
    if exchange.transfer is None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        eager = type(module).forward.__wrapped__
        # The library's default, grouped_mm, takes no float64.
        name = (exchange.own or "eager") if x.dtype != torch.float64 else "eager"
        own: Any = ALL_EXPERTS_FUNCTIONS.get_interface(name, eager)
        whole: Tensor = own(module, x, chosen, weights)
        return whole

    def compute(rows: Tensor, counts: Tensor) -> Tensor:
        return _through_own(module, rows, counts)

    y = through_experts(x, chosen.long(), module.num_experts, exchange, compute)
    mixed: Tensor = (y * weights.unsqueeze(-1)).sum(1)
    return mixed.to(x.dtype)


def _through_own(module: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """What the experts of this process make of rows that are sorted by expert."""
    numbers = torch.arange(len(counts), device=rows.device)
    experts = numbers.repeat_interleave(counts, output_size=len(rows))

    def layer(name: str, x: Tensor) -> Tensor:
        weight = local_part(getattr(module, name))
        y = grouped_linear(x, weight if getattr(module, "is_transposed", False) else weight.mT, counts)
        if not getattr(module, "has_bias", False):
            return y
        return y + local_part(getattr(module, f"{name}_bias")).index_select(0, experts)

    if getattr(module, "has_gate", True):
        hidden = module._apply_gate(layer("gate_up_proj", rows))
    else:
        hidden = module.act_fn(layer("up_proj", rows))
    y = layer("down_proj", hidden)
    return module.post_expert_norm(y) if getattr(module, "has_post_expert_norm", False) else y
