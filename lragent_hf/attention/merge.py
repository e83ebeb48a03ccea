"""Two attentions of the same queries over different keys, put together."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge"]


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both: outputs [B, H, Lq, D] weighed by the softmax of their lse [B, H, Lq].

    A row that saw no key in either (both lse -inf) gives zeros and -inf. Weighing is in the lse's dtype: in half
    precision the weights themselves would be the largest error.
    """
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((one - total).exp_().nan_to_num_(0.0).unsqueeze(-1) for one in (lse, other_lse))
    return torch.addcmul(out * weight, other, other_weight).to(out.dtype), total
