"""Bytes and multiply-adds of one call, counted from its shape: what the kernels must move and compute, with and without LR.

`unique_bytes` is what a perfect cache would read from and write to memory once; `flops` counts a multiply-add as two. Both
are checked against the kernels themselves in `tests/kernels/test_cost.py`: bytes against the addresses that the
interpreter sees, flops against the tensor-core instructions in the compiled inner loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from .plan import power_of_two

__all__ = ["Cost", "flops", "key_bytes", "unique_bytes"]


@dataclass(frozen=True)
class Cost:
    """`base`: attention over K and V_base. `low_rank`: what V_lr and B add."""

    base: int
    low_rank: int

    @property
    def overhead(self) -> float:
        """What the low-rank part adds, as a fraction of the rest."""
        return self.low_rank / self.base


def unique_bytes(batch: int, heads: int, kv_heads: int, Lq: int, Lk: int, D: int, R: int, itemsize: int) -> Cost:
    """Memory of Q, K, V_base and O against that of V_lr and B (one B for the batch), each once; no masks, no parts."""
    base = itemsize * D * (2 * batch * heads * Lq + 2 * batch * kv_heads * Lk)
    return Cost(base, itemsize * R * (batch * Lk + kv_heads * D))


def key_bytes(batch: int, kv_heads: int, Lk: int, D: int, R: int, turning: int, itemsize: int) -> int:
    """Memory of K_lr, B_k and the angles of `turning` columns (cos and sin, one for each pair, shared by the batch)."""
    return itemsize * (R * (batch * Lk + kv_heads * D) + Lk * turning)


def flops(batch: int, heads: int, pairs: int, rows: int, D: int, R: int, *, padded: bool = True) -> Cost:
    """`pairs` of a query and a key it sees, a head; `rows` queries, a head. padded: what the units do, powers of two.

    Base: scores and P V_base, 2 D each. LR: P V_lr, 2 R a pair, and the expansion by B, 2 R D a row.
    """
    if padded:
        D, R = power_of_two(D), power_of_two(R) if R else 0
    return Cost(batch * heads * pairs * 4 * D, batch * heads * (pairs * 2 * R + rows * 2 * R * D))
