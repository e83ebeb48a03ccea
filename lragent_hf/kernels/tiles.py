"""What the kernels do with one tile: load it, rotate key LR into it, fold it into a running softmax.

Letters: i_ numbers of programs and tiles, o_ offsets, p_ pointers, s_ strides, b_ blocks in registers, m_ masks. Sizes of
blocks: BM rows, BN keys, BD >= D and BR >= R (BRK >= RK) powers of two, whose excess is masked.
"""

import triton
import triton.language as tl

__all__ = ["load_b", "load_rows", "rotary_columns", "sweep"]


@triton.jit
def load_rows(p, s_row, row, rows, COLS: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr, CHECK: tl.constexpr):
    """[N, WIDTH] of a matrix with unit column stride, from row `row` on; 0 beyond COLS and (CHECK) from `rows` on."""
    o_n, o_c = tl.arange(0, N), tl.arange(0, WIDTH)
    p_block = p + row.to(tl.int64) * s_row + (o_n[:, None] * s_row + o_c[None, :])
    if CHECK:
        m_n = (row + o_n < rows)[:, None]
        if COLS == WIDTH:
            b_rows = tl.load(p_block, mask=m_n, other=0.0)
        else:
            b_rows = tl.load(p_block, mask=m_n & (o_c < COLS)[None, :], other=0.0)
    else:
        if COLS == WIDTH:
            b_rows = tl.load(p_block)
        else:
            b_rows = tl.load(p_block, mask=(o_c < COLS)[None, :], other=0.0)
    return b_rows


@triton.jit
def load_b(p, s_row, o_d, m_d, R: tl.constexpr, BR: tl.constexpr):
    """[BR, BD] of an adapter's B [R, D]: its columns o_d; 0 where not m_d and beyond rank R."""
    o_r = tl.arange(0, BR)
    return tl.load(p + o_r[:, None] * s_row + o_d[None, :], mask=(o_r < R)[:, None] & m_d[None, :], other=0.0)


@triton.jit
def rotary_columns(o_d, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each column the one it turns with, the sign of that one, and the number of its pair's angle: three [BD].

    rot(x) = x * cos + sign * x[partner] * sin, for both layouts. Columns from ROTARY on do not turn.
    """
    if INTERLEAVED:  # pairs (0, 1), (2, 3), ...
        o_partner, o_pair = o_d ^ 1, o_d // 2
        b_sign = tl.where(o_d % 2 == 0, -1.0, 1.0)
    else:  # pairs (0, ROTARY/2), (1, ROTARY/2 + 1), ...
        HALF: tl.constexpr = ROTARY // 2
        o_partner = tl.where(o_d < HALF, o_d + HALF, o_d - HALF)
        o_pair = tl.where(o_d < HALF, o_d, o_d - HALF)
        b_sign = tl.where(o_d < HALF, -1.0, 1.0)
    return o_partner, b_sign, o_pair


@triton.jit
def _turned_keys(
    b_k, p_klr, p_cos, p_sin, s_kln, s_cn, b_bk, b_bkt, row, Lk,
    RK: tl.constexpr, BRK: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """K + rot(K_lr B_k): b_k [BN, BD]; b_bk, b_bkt [BRK, BD] are B_k and B_k with its columns turned by a right angle."""
    b_klr = load_rows(p_klr, s_kln, row, Lk, RK, BRK, BN, CHECK)  # [BN, BRK]
    b_lr = tl.dot(b_klr, b_bk, input_precision="ieee")  # [BN, BD] float32
    if ROTARY > 0:
        o_n, o_d = tl.arange(0, BN), tl.arange(0, BD)
        _, _, o_pair = rotary_columns(o_d, ROTARY, INTERLEAVED)
        m_angle = (row + o_n < Lk)[:, None] & (o_d < ROTARY)[None, :]
        o_angle = row.to(tl.int64) * s_cn + (o_n[:, None] * s_cn + o_pair[None, :])
        b_cos = tl.load(p_cos + o_angle, mask=m_angle, other=1.0).to(tl.float32)
        b_sin = tl.load(p_sin + o_angle, mask=m_angle, other=0.0).to(tl.float32)
        b_lr = b_lr * b_cos + tl.dot(b_klr, b_bkt, input_precision="ieee") * b_sin
    return (b_k.to(tl.float32) + b_lr).to(b_k.dtype)


@triton.jit
def _tanh(b_x, PRECISE: tl.constexpr):
    """tanh through exp, good to 1e-7. PRECISE: near zero by a polynomial, so that small scores keep all their bits."""
    b_x = tl.minimum(tl.maximum(b_x, -20.0), 20.0)
    b_tanh = 1.0 - 2.0 / (tl.exp2(b_x * 2.885390081777927) + 1.0)  # 2 / ln 2
    if PRECISE:  # least-squares fit of (tanh(x) / x - 1) / x^2 in x^2, relative error 4e-9 for x^2 < 0.376
        b_y = b_x * b_x
        b_p = 0.02071477833951363 - 0.00579480217612073 * b_y
        b_p = -0.33333290180431424 + b_y * (0.13331684522361073 + b_y * (-0.05376144827010779 + b_y * b_p))
        b_tanh = tl.where(b_y < 0.375, b_x + b_x * b_y * b_p, b_tanh)
    return b_tanh


@triton.jit
def sweep(
    b_acc, b_acc_lr, b_max, b_sum, b_q, b_bk, b_bkt, o_pos,
    p_k, p_v, p_lr, p_klr, p_cos, p_sin, p_pad, p_tiles, s_kn, s_vn, s_ln, s_kln, s_cn,
    t_from, t_to, Lk, window, scale, cap,
    D: tl.constexpr, R: tl.constexpr, RK: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr, CAPPED: tl.constexpr, CHECK: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BRK: tl.constexpr,
):  # fmt: skip
    """Fold tiles t_from .. t_to of the keys into b_acc [BM, BD], b_acc_lr [BM, BR], b_max and b_sum [BM], all float32.

    PADDED: tile t is number p_tiles[t], the list of tiles with a key to see. CHECK: some key of some tile is hidden from
    some row; without it every row sees every key, and no mask is computed. Scores are in units of log 2.
    """
    for t in tl.range(t_from, t_to):
        if PADDED:
            row = tl.load(p_tiles + t) * BN
        else:
            row = t * BN
        b_k = load_rows(p_k, s_kn, row, Lk, D, BD, BN, CHECK)  # [BN, BD]
        if RK > 0:
            b_k = _turned_keys(
                b_k, p_klr, p_cos, p_sin, s_kln, s_cn, b_bk, b_bkt, row, Lk,
                RK, BRK, ROTARY, INTERLEAVED, BN, BD, CHECK,
            )  # fmt: skip
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale  # [BM, BN]
        if CAPPED:
            b_s = cap * _tanh(b_s, PRECISE=b_q.dtype == tl.float32)
        if CHECK:
            o_n = row + tl.arange(0, BN)
            m_n = o_n < Lk
            if PADDED:
                m_n = m_n & (tl.load(p_pad + o_n, mask=m_n, other=0) != 0)
            m_s = m_n[None, :]
            if CAUSAL:
                m_s = m_s & (o_n[None, :] <= o_pos[:, None])
            if WINDOW:
                m_s = m_s & (o_pos[:, None] - o_n[None, :] < window)
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))  # [BM]
        b_ref = b_new
        if CHECK:  # rows that have seen nothing yet: exp2(-inf - 0) = 0, not exp2(-inf + inf)
            b_ref = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_ref[:, None])  # [BM, BN]
        b_scale = tl.exp2(b_max - b_ref)
        b_sum = b_sum * b_scale + tl.sum(b_p, 1)
        b_max = b_new
        b_v = load_rows(p_v, s_vn, row, Lk, D, BD, BN, CHECK)  # [BN, BD]
        b_p = b_p.to(b_v.dtype)
        b_acc = tl.dot(b_p, b_v, b_acc * b_scale[:, None], input_precision="ieee")
        if R > 0:
            b_lr = load_rows(p_lr, s_ln, row, Lk, R, BR, BN, CHECK)  # [BN, BR]
            b_acc_lr = tl.dot(b_p, b_lr, b_acc_lr * b_scale[:, None], input_precision="ieee")
    return b_acc, b_acc_lr, b_max, b_sum
