"""After a split: merge the parts of each row in rank space by their log-sum-exps, then expand by B, once.

O = sum_s w_s O_s + (sum_s w_s O_lr_s) B        w = softmax over the shares s of their log-sum-exps
"""

import triton
import triton.language as tl

__all__ = ["MAX_SPLITS", "combine_kernel", "live_tiles_kernel"]

MAX_SPLITS = 128


@triton.jit(do_not_specialize=["Lq", "heads", "splits", "rows"])
def combine_kernel(
    p_part, p_part_lr, p_part_lse, p_b, p_o, p_lse, s_bb, s_bh, s_br, s_ob, s_oh, s_om, Lq, heads, splits, rows,
    GROUP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, LSE: tl.constexpr,
    BS: tl.constexpr, CH: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, CR: tl.constexpr,
):  # fmt: skip
    """One program: one row of [B, Hq, Lq]. Parts [splits, rows, D | R | 1] float32; CH shares, CR ranks at a time.

    The expansion of one row is R * D multiply-adds, on the ordinary units in float32.
    """
    i_row = tl.program_id(0).to(tl.int64)
    i_b, i_h, i_i = i_row // Lq // heads, i_row // Lq % heads, i_row % Lq
    o_s, o_c, o_d, o_r = tl.arange(0, BS), tl.arange(0, CH), tl.arange(0, BD), tl.arange(0, BR)
    b_lse = tl.load(p_part_lse + o_s.to(tl.int64) * rows + i_row, mask=o_s < splits, other=float("-inf"))  # [BS] base 2
    b_max = tl.max(b_lse, 0)
    b_ref = tl.where(b_max == float("-inf"), 0.0, b_max)
    b_sum = tl.sum(tl.exp2(b_lse - b_ref), 0)
    b_total = tl.where(b_sum > 0.0, b_ref + tl.log2(tl.where(b_sum > 0.0, b_sum, 1.0)), float("-inf"))
    b_ref = tl.where(b_sum > 0.0, b_total, 0.0)

    b_o = tl.zeros([BD], tl.float32)
    b_o_lr = tl.zeros([BR], tl.float32)
    for first in tl.range(0, splits, CH):
        m_c = first + o_c < splits
        o_part = (first + o_c).to(tl.int64) * rows + i_row  # [CH]
        b_w = tl.exp2(tl.load(p_part_lse + o_part, mask=m_c, other=float("-inf")) - b_ref)  # [CH]
        b_part = tl.load(p_part + o_part[:, None] * D + o_d[None, :], mask=m_c[:, None] & (o_d < D)[None, :], other=0.0)
        b_o += tl.sum(b_part * b_w[:, None], 0)
        if R > 0:
            m_lr = m_c[:, None] & (o_r < R)[None, :]
            b_part = tl.load(p_part_lr + o_part[:, None] * R + o_r[None, :], mask=m_lr, other=0.0)  # [CH, BR]
            b_o_lr += tl.sum(b_part * b_w[:, None], 0)
    if R > 0:
        p_b += i_b * s_bb + i_h // GROUP * s_bh
        for first in tl.static_range(0, BR, CR):
            o_x = first + tl.arange(0, CR)
            b_b = tl.load(
                p_b + o_x[:, None] * s_br + o_d[None, :], mask=(o_x < R)[:, None] & (o_d < D)[None, :], other=0.0
            )  # [CR, BD]
            if CR == BR:
                b_x = b_o_lr
            else:  # ranks first .. first + CR of b_o_lr
                b_x = tl.sum(tl.where(o_x[:, None] == o_r[None, :], b_o_lr[None, :], 0.0), 1)
            b_o += tl.sum(b_b.to(tl.float32) * b_x[:, None], 0)
    if LSE:
        tl.store(p_lse + i_row, b_total * 0.6931471805599453)  # ln 2
    tl.store(p_o + i_b * s_ob + i_h * s_oh + i_i * s_om + o_d, b_o.to(p_o.dtype.element_ty), mask=o_d < D)


@triton.jit(do_not_specialize=["Lk", "tiles"])
def live_tiles_kernel(p_pad, p_tiles, p_before, s_pb, s_tb, Lk, tiles, BN: tl.constexpr, CH: tl.constexpr):
    """One program: one row of a padding mask [B, Lk] uint8. Which of its tiles of BN keys have a key to see.

    Leaves in p_tiles[b] their numbers, in order, and in p_before[b, t], t = 0 .. tiles, how many come before tile t.
    """
    i_b = tl.program_id(0).to(tl.int64)
    p_pad, p_tiles, p_before = p_pad + i_b * s_pb, p_tiles + i_b * s_tb, p_before + i_b * s_tb
    o_c, o_n = tl.arange(0, CH), tl.arange(0, BN)
    live = 0
    tl.store(p_before, 0)
    for first in tl.range(0, tiles, CH):
        o_t = first + o_c
        o_k = o_t[:, None] * BN + o_n[None, :]
        b_live = tl.max(tl.load(p_pad + o_k, mask=o_k < Lk, other=0).to(tl.int32), 1)  # [CH]
        b_live = (b_live != 0).to(tl.int32)
        b_count = live + tl.cumsum(b_live, 0)
        tl.store(p_tiles + b_count - 1, o_t, mask=b_live != 0)
        tl.store(p_before + o_t + 1, b_count, mask=o_t < tiles)
        live += tl.sum(b_live, 0)
