"""Several documents in one row: each token sees those of its own document only.

The rows' `position_ids` [batch, time] say where a document begins: at 0. They pass from stage to stage beside
the hidden states, so that ranks between the ends read no data; each stage makes its mask from them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DocumentStage(nn.Sequential):
    """A stage of a transformer: tokens or hidden states, and `position_ids` where documents are told apart.

    Without positions it is an nn.Sequential. With them, blocks get the positions and a mask, the embedding
    gets the positions, and the stage returns (hidden states, position_ids), or the last one its output alone.
    """

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        x = input_ids
        if position_ids is None:
            for module in self:
                x = module(x)
            return x
        mask = document_mask(position_ids)
        for module in self:
            if getattr(module, "takes_mask", False):
                x = module(x, position_ids, mask)
            elif getattr(module, "takes_positions", False):
                x = module(x, position_ids)
            else:
                x = module(x)
        return x if "head" in self._modules else (x, position_ids)


def document_mask(position_ids: Tensor) -> Tensor:
    """Which keys a query sees, bool [batch, 1, query, key]: those of its document that are not after it."""
    documents = (position_ids == 0).cumsum(dim=-1)
    is_same = documents[:, None, :, None] == documents[:, None, None, :]
    time = position_ids.shape[-1]
    return is_same & torch.ones(time, time, dtype=torch.bool, device=position_ids.device).tril()
