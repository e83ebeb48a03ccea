"""The attention kernel: O = P V_base + (P V_lr) B for a tile of query rows, in one pass over the keys they see.

Prefill and decode are this one kernel. The rows of a tile are consecutive queries times PACK query heads of one kv head:
PACK = 1 for prefill; for decode all heads of the group, so that a key is read once for all of them. With SPLIT, a tile
sweeps one share of its keys and leaves its part in rank space, for `combine.py` to merge and expand by B; without, it
expands by B itself and is done. Letters as in `tiles.py`.
"""

import triton
import triton.language as tl

from .tiles import load_b, rotary_columns, sweep

__all__ = ["attend_kernel"]


@triton.jit(do_not_specialize=["Lq", "Lk", "heads", "splits", "window"])
def attend_kernel(
    p_q, p_k, p_v, p_lr, p_b, p_klr, p_bk, p_cos, p_sin, p_pad, p_tiles, p_before, p_o, p_o_lr, p_lse,
    s_qb, s_qh, s_qm, s_kb, s_kh, s_kn, s_vb, s_vh, s_vn, s_lb, s_ln, s_bb, s_bh, s_br,
    s_klb, s_kln, s_bkb, s_bkh, s_bkr, s_cb, s_cn, s_pb, s_tb, s_ob, s_oh, s_om,
    Lq, Lk, heads, splits, window, scale, cap,
    GROUP: tl.constexpr, PACK: tl.constexpr, SPLIT: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, RK: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr, CAPPED: tl.constexpr, LSE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BRK: tl.constexpr,
    LR_ALIGN: tl.constexpr, KLR_ALIGN: tl.constexpr,
):  # fmt: skip
    """One program: tile i_m of the rows of head i_h (one of `heads`, PACK query heads each) of batch row i_b, share i_s.

    q [B, Hq, Lq, D], k and v [B, Hkv, Lk, D], lr [B, Lk, R], b [B, Hkv, R, D]; klr, bk likewise, cos and sin
    [B, Lk, ROTARY / 2]; pad [B, Lk] uint8, tiles and before as `live_tiles` leaves them; o [B, Hq, Lq, D] and lse
    [B, Hq, Lq], or with SPLIT parts [splits, B, Hq, Lq, D | R | 1] contiguous in float32, divided by their sums.
    Strides of size-1 dimensions that are shared (b, cos) are 0. s_ln and s_kln count in units of LR_ALIGN, KLR_ALIGN:
    so the compiler knows that a column slice of a stacked LR can be read in wide words. scale and cap: see `sweep`.
    """
    rows = Lq * PACK
    tiles_m = tl.cdiv(rows, BM)
    i_s = tl.program_id(0) % splits
    i_m = tiles_m - 1 - tl.program_id(0) // splits % tiles_m  # causal: the longest first
    i_bh = tl.program_id(0) // splits // tiles_m
    i_b, i_h = (i_bh // heads).to(tl.int64), i_bh % heads
    i_kv = (i_h * PACK // GROUP).to(tl.int64)

    o_m, o_d = i_m * BM + tl.arange(0, BM), tl.arange(0, BD)
    m_m, m_d = o_m < rows, o_d < D
    o_i, o_h = o_m // PACK, i_h * PACK + o_m % PACK  # query and query head of each row
    o_pos = Lk - Lq + o_i  # the key it stands at
    p_q += i_b * s_qb + (o_h.to(tl.int64) * s_qh + o_i.to(tl.int64) * s_qm)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=m_m[:, None] & m_d[None, :], other=0.0)  # [BM, BD]

    # Tiles of keys that some row sees: [t_from, t_to). All rows see all of the tiles in [full_from, full_to).
    first, last = Lk - Lq + i_m * BM // PACK, Lk - Lq + (tl.minimum(i_m * BM + BM, rows) - 1) // PACK
    t_from, full_from, t_to, full_to = 0, 0, tl.cdiv(Lk, BN), Lk // BN
    if CAUSAL:
        t_to = tl.minimum(t_to, tl.cdiv(tl.maximum(last + 1, 0), BN))
        full_to = tl.minimum(full_to, tl.maximum(first + 1, 0) // BN)
    if WINDOW:
        t_from = tl.minimum(tl.maximum(first - window + 1, 0) // BN, t_to)
        full_from = tl.cdiv(tl.maximum(last - window + 1, 0), BN)
    if PADDED:  # from tile numbers to places in the list of tiles that hold a key to see
        t_from, t_to = tl.load(p_before + i_b * s_tb + t_from), tl.load(p_before + i_b * s_tb + t_to)
        p_pad += i_b * s_pb
        p_tiles += i_b * s_tb
    if SPLIT:
        share = tl.cdiv(t_to - t_from, splits)
        t_from = tl.minimum(t_from + i_s * share, t_to)
        t_to = tl.minimum(t_from + share, t_to)

    p_k += i_b * s_kb + i_kv * s_kh
    p_v += i_b * s_vb + i_kv * s_vh
    if R > 0:
        p_lr += i_b * s_lb
        p_b += i_b * s_bb + i_kv * s_bh
    b_bk, b_bkt = b_q, b_q  # not read unless RK
    if RK > 0:
        p_klr += i_b * s_klb
        p_bk += i_b * s_bkb + i_kv * s_bkh
        b_bk = load_b(p_bk, s_bkr, o_d, m_d, RK, BRK)  # [BRK, BD]
        if ROTARY > 0:
            p_cos += i_b * s_cb
            p_sin += i_b * s_cb
            o_partner, b_sign, _ = rotary_columns(o_d, ROTARY, INTERLEAVED)
            b_bkt = load_b(p_bk, s_bkr, o_partner, o_d < ROTARY, RK, BRK)
            b_bkt = (b_bkt * b_sign[None, :]).to(b_bk.dtype)

    b_acc = tl.zeros([BM, BD], tl.float32)
    b_acc_lr = tl.zeros([BM, BR], tl.float32)
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    ONE_LOOP: tl.constexpr = SPLIT or PADDED  # decode waits for memory, masks are free; padding is anywhere
    full_from = tl.minimum(tl.maximum(full_from, t_from), t_to)
    full_to = tl.minimum(tl.maximum(full_to, full_from), t_to)
    if ONE_LOOP:
        full_to = t_from
    if WINDOW and not ONE_LOOP:
        b_acc, b_acc_lr, b_max, b_sum = sweep(
            b_acc, b_acc_lr, b_max, b_sum, b_q, b_bk, b_bkt, o_pos,
            p_k, p_v, p_lr, p_klr, p_cos, p_sin, p_pad, p_tiles,
            s_kn, s_vn, s_ln * LR_ALIGN, s_kln * KLR_ALIGN, s_cn,
            t_from, full_from, Lk, window, scale, cap, D, R, RK, ROTARY, INTERLEAVED,
            CAUSAL, WINDOW, PADDED, CAPPED, True, BN, BD, BR, BRK,
        )  # fmt: skip
    if not ONE_LOOP:
        b_acc, b_acc_lr, b_max, b_sum = sweep(
            b_acc, b_acc_lr, b_max, b_sum, b_q, b_bk, b_bkt, o_pos,
            p_k, p_v, p_lr, p_klr, p_cos, p_sin, p_pad, p_tiles,
            s_kn, s_vn, s_ln * LR_ALIGN, s_kln * KLR_ALIGN, s_cn,
            full_from, full_to, Lk, window, scale, cap, D, R, RK, ROTARY, INTERLEAVED,
            CAUSAL, WINDOW, PADDED, CAPPED, False, BN, BD, BR, BRK,
        )  # fmt: skip
    b_acc, b_acc_lr, b_max, b_sum = sweep(
        b_acc, b_acc_lr, b_max, b_sum, b_q, b_bk, b_bkt, o_pos,
        p_k, p_v, p_lr, p_klr, p_cos, p_sin, p_pad, p_tiles,
        s_kn, s_vn, s_ln * LR_ALIGN, s_kln * KLR_ALIGN, s_cn,
        full_to, t_to, Lk, window, scale, cap, D, R, RK, ROTARY, INTERLEAVED,
        CAUSAL, WINDOW, PADDED, CAPPED, True, BN, BD, BR, BRK,
    )  # fmt: skip

    m_seen = b_sum > 0.0  # rows that saw a key; the others give zeros and -inf
    b_inverse = tl.where(m_seen, 1.0 / tl.where(m_seen, b_sum, 1.0), 0.0)
    b_acc = b_acc * b_inverse[:, None]
    b_acc_lr = b_acc_lr * b_inverse[:, None]
    b_lse = tl.where(m_seen, b_max + tl.log2(tl.where(m_seen, b_sum, 1.0)), float("-inf"))  # base 2
    o_row = (i_b * heads * PACK + o_h) * Lq + o_i  # [BM] int64: row of [B, Hq, Lq]
    if SPLIT:
        o_row += i_s.to(tl.int64) * (tl.num_programs(0) // (splits * tiles_m) * rows)
        tl.store(p_lse + o_row, b_lse, mask=m_m)
        tl.store(p_o + o_row[:, None] * D + o_d[None, :], b_acc, mask=m_m[:, None] & m_d[None, :])
        if R > 0:
            o_r = tl.arange(0, BR)
            tl.store(p_o_lr + o_row[:, None] * R + o_r[None, :], b_acc_lr, mask=m_m[:, None] & (o_r < R)[None, :])
    else:
        if R > 0:
            b_b = load_b(p_b, s_br, o_d, m_d, R, BR)  # [BR, BD]
            b_acc = tl.dot(b_acc_lr.to(b_b.dtype), b_b, b_acc, input_precision="ieee")
        if LSE:
            tl.store(p_lse + o_row, b_lse * 0.6931471805599453, mask=m_m)  # ln 2
        p_o += i_b * s_ob + (o_h.to(tl.int64) * s_oh + o_i.to(tl.int64) * s_om)[:, None] + o_d[None, :]
        tl.store(p_o, b_acc.to(p_o.dtype.element_ty), mask=m_m[:, None] & m_d[None, :])
