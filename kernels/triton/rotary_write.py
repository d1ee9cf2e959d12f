"""Rotary embedding fused with the write of keys and values into the paged pool; see kernels/rotary.py.

One program takes some heads of one token: normalises them where the model does, turns queries and keys, stores queries
for attention and keys and values in the pool, quantised where the pool is (kernels/kv_quantisation.py). A row depends
on nothing but itself, so exact mode needs nothing here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_quantisation import LARGEST, is_quantised
from kernels.triton.device_batch import DeviceBatch
from kernels.triton.fp8 import to_e4m3
from kernels.triton.registry import KernelConfig, pointer

BLOCK_HEADS = 8
NUM_WARPS = 4
_VARYING = ("heads", "kv_heads", "layers", "layer")


@triton.jit(do_not_specialize=_VARYING)
def rotate_and_write(
    qkv: tl.tensor,
    positions: tl.tensor,
    write_slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    query: tl.tensor,
    pool: tl.tensor,
    scales: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    layers: tl.tensor,
    layer: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NORM: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Grid (T, tiles of all heads). HALF: of the elements that turn. LARGEST: of the quantised pool's dtype, else 0."""
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, PADDED_DIM)
    is_query = head < heads
    is_key = (head >= heads) & (head < heads + kv_heads)
    turns = head < heads + kv_heads
    is_kv = (head >= heads) & (head < heads + 2 * kv_heads)
    present = (head < heads + 2 * kv_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    partner = tl.where(dims < HALF, dims + HALF, tl.where(dims < 2 * HALF, dims - HALF, dims))
    row = qkv + token.to(tl.int64) * row_stride + head[:, None] * HEAD_DIM
    x = tl.load(row + dims[None, :], mask=present, other=0.0).to(tl.float32)
    turning = present & turns[:, None] & (dims < 2 * HALF)[None, :]
    other = tl.load(row + partner[None, :], mask=turning, other=0.0).to(tl.float32)
    if NORM:
        q_weight = tl.load(q_norm + dims, mask=dims < HEAD_DIM, other=0.0)
        k_weight = tl.load(k_norm + dims, mask=dims < HEAD_DIM, other=0.0)
        q_partner = tl.load(q_norm + partner, mask=dims < HEAD_DIM, other=0.0)
        k_partner = tl.load(k_norm + partner, mask=dims < HEAD_DIM, other=0.0)
        shrink = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        weight = tl.where(is_query[:, None], q_weight[None, :], k_weight[None, :])
        partner_weight = tl.where(is_query[:, None], q_partner[None, :], k_partner[None, :])
        x = tl.where(turns[:, None], x * shrink * weight, x)
        other = other * shrink * partner_weight
    position = tl.load(positions + token)
    angle = position.to(tl.int64) * HALF + tl.where(dims < HALF, dims, partner)
    c = tl.load(cos + angle, mask=dims < 2 * HALF, other=1.0)[None, :]
    s = tl.load(sin + angle, mask=dims < 2 * HALF, other=0.0)[None, :]
    turned = tl.where(dims < HALF, 0.0 - other * s, other * s)
    x = tl.where(turning, x * c + turned, x)
    query_at = query + (token.to(tl.int64) * heads + head[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(query_at, x.to(query.dtype.element_ty), mask=present & is_query[:, None])

    slot = tl.load(write_slots + token).to(tl.int64)
    kv_head = tl.where(is_key, head - heads, head - heads - kv_heads)
    kind = tl.where(is_key, 0, 1)
    # Of (block, kv_head, layer, k|v, token).
    place = (((slot * kv_heads + kv_head) * layers + layer) * 2 + kind) * 16 + position % 16
    written = is_kv & (slot >= 0)
    pool_at = pool + place[:, None] * HEAD_DIM + dims[None, :]
    in_pool = present & written[:, None]
    if LARGEST > 0:
        peak = tl.max(tl.abs(x), 1)
        scale = tl.where(peak > 0.0, tl.div_rn(peak, tl.zeros_like(peak) + LARGEST), 1.0)
        scaled = tl.div_rn(x, tl.zeros_like(x) + scale[:, None])
        tl.store(scales + place, scale, mask=written)
        if pool.dtype.element_ty == tl.uint8:
            tl.store(pool_at, to_e4m3(scaled), mask=in_pool)
        else:
            # Adding 1.5 * 2 ** 23 rounds to the nearest integer, ties to even.
            whole = (scaled + 12582912.0) - 12582912.0
            tl.store(pool_at, whole.to(tl.int8), mask=in_pool)
    else:
        tl.store(pool_at, x.to(pool.dtype.element_ty), mask=in_pool)


def rotary_write(
    qkv: torch.Tensor,
    batch: DeviceBatch,
    *,
    heads: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    pool: torch.Tensor,
    layer: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
    query_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Write each token's rotated keys and its values to the pool; return its rotated queries.

    qkv [T, (heads + 2 * kv_heads) * head_dim] in any float dtype, rows may lie apart; cos, sin float32
    [positions, rotary_dim / 2]; pool [blocks, kv_heads, layers, 2, 16, head_dim]; q_norm, k_norm float32 [head_dim],
    both or none. A quantised pool comes with kv_scales, float32 [blocks, kv_heads, layers, 2, 16]. Returns
    [T, heads, head_dim] in query_dtype, by default the pool's. Raises ValueError for what does not belong together.
    """
    tokens, kv_heads, head_dim = len(qkv), pool.shape[1], pool.shape[5]
    if qkv.shape[1] != (heads + 2 * kv_heads) * head_dim or qkv.stride(1) != 1:
        raise ValueError(f"qkv {tuple(qkv.shape)} for {heads} heads over a pool {tuple(pool.shape)}")
    if (q_norm is None) != (k_norm is None) or is_quantised(pool.dtype) != (kv_scales is not None):
        raise ValueError("one of q_norm and k_norm is missing, or scales and a quantised pool are not together")
    if query_dtype is None and kv_scales is not None:
        raise ValueError("a quantised pool does not say which dtype queries have")
    query = torch.empty((tokens, heads, head_dim), dtype=query_dtype or pool.dtype, device=qkv.device)
    if not tokens:
        return query
    rotate_and_write[(tokens, triton.cdiv(heads + 2 * kv_heads, BLOCK_HEADS))](
        qkv,
        batch.positions,
        batch.write_slots,
        cos,
        sin,
        q_norm,
        k_norm,
        query,
        pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool,
        kv_scales,
        heads,
        kv_heads,
        pool.shape[2],
        layer,
        qkv.stride(0),
        eps,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        HALF=cos.shape[1],
        BLOCK_HEADS=BLOCK_HEADS,
        NORM=q_norm is not None,
        LARGEST=LARGEST.get(pool.dtype, 0.0),
        num_warps=NUM_WARPS,
    )
    return query


def _form(dtype: torch.dtype, head_dim: int, *, norm: bool = False, pool: torch.dtype | None = None) -> KernelConfig:
    stored = pool or dtype
    quantised = is_quantised(stored)
    missing = {**({} if quantised else {"scales": None}), **({} if norm else {"q_norm": None, "k_norm": None})}
    stored_type = "*u8" if stored == torch.float8_e4m3fn else pointer(stored)
    pointers = {
        **dict.fromkeys(("qkv", "query"), pointer(dtype)),
        **dict.fromkeys(("positions", "write_slots"), "*i32"),
        **dict.fromkeys(("cos", "sin", "q_norm", "k_norm", "scales"), "*fp32"),
        "pool": stored_type,
    }
    given = {name: kind for name, kind in pointers.items() if name not in missing}
    return KernelConfig(
        name="-".join(["rotary-write", stored_type[1:], f"d{head_dim}", *(("norm",) if norm else ())]),
        kernel=rotate_and_write,
        signature={**given, **dict.fromkeys((*_VARYING, "row_stride"), "i32"), "eps": "fp32"},
        constants={
            **missing,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": triton.next_power_of_2(head_dim),
            "HALF": head_dim // 2,
            "BLOCK_HEADS": BLOCK_HEADS,
            "NORM": norm,
            "LARGEST": LARGEST.get(stored, 0.0),
        },
        aligned=(*given, "row_stride"),
        num_warps=NUM_WARPS,
    )


SHIPPED = [
    _form(torch.bfloat16, 64),
    _form(torch.bfloat16, 128),
    _form(torch.bfloat16, 128, norm=True),
    _form(torch.bfloat16, 128, pool=torch.float8_e4m3fn),
    _form(torch.bfloat16, 128, pool=torch.int8),
]
