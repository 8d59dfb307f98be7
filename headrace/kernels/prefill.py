"""Computes prompts' attention on NVIDIA GPUs of compute capability 9.0, after FlashAttention-3 (arXiv 2407.08608).

One warp asks the copy engine (TMA) for keys and values out of the paged cache; two groups of warps multiply, each for
its own rows. A tile's weights are multiplied with its values while the softmax of the next tile is computed. Written in
Gluon, since Triton orders such loops otherwise: 460 TFLOP/s against 290. It has no windows and no splits, for which
kernels/attention.py serves; an fp8 cache is unpacked first (fp8_cache.py).
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.attention_config import AttentionConfig
from headrace.kernels.attention_tiles import LOG2_E
from headrace.kernels.launch import launch
from headrace.kernels.paged import Sequences, find_request, rows_between

async_load = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared  # Triton 3.6 and 3.7

COLUMNS = 64
"""of a box that the copy engine loads: 128 bytes, which is the width of its swizzle"""
BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _fetch(
    cache, blocks_ptr, first_row, column, start, last_block, full, buffer,
    block_rows, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Load the keys or values of positions start : start + BLOCK_N; beyond the last block, load that one again."""
    hopper.mbarrier.expect(full, BLOCK_N * HEAD_DIM * 2)
    ROWS: gl.constexpr = cache.block_shape[0]
    COLUMNS: gl.constexpr = cache.block_shape[1]
    for i in gl.static_range(BLOCK_N // ROWS):
        position = start + i * ROWS
        block = gl.load(blocks_ptr + gl.minimum(position // BLOCK_SIZE, last_block))
        row = first_row + block * block_rows + position % BLOCK_SIZE
        for j in gl.static_range(HEAD_DIM // COLUMNS):
            part = buffer.slice(i * ROWS, ROWS, 0).slice(j * COLUMNS, COLUMNS, 1)
            async_load(cache, [row, column + j * COLUMNS], full, part)


@gluon.jit
def _produce(
    cache, blocks_ptr, value_rows, block_rows, column, tiles, last_block, keys, values,
    key_full, key_free, value_full, value_free, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Load all tiles, the last one first, since that is the one with a mask."""
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    for i in range(tiles):
        stage = i % STAGES
        free = (i // STAGES) & 1 ^ 1
        start = (tiles - 1 - i) * BLOCK_N
        hopper.mbarrier.wait(key_free.index(stage), free)
        _fetch(
            cache, blocks_ptr, 0, column, start, last_block, key_full.index(stage), keys.index(stage),
            block_rows, BLOCK_N, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip
        hopper.mbarrier.wait(value_free.index(stage), free)
        _fetch(
            cache, blocks_ptr, value_rows, column, start, last_block, value_full.index(stage), values.index(stage),
            block_rows, BLOCK_N, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip


@gluon.jit
def _softmax(scores, row_max, row_sum, qk_scale, row_position, start, MASKED: gl.constexpr):
    """Return weights, row_max, row_sum, and the factor for what was accumulated before."""
    if MASKED:
        BLOCK_N: gl.constexpr = scores.shape[1]
        position = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(position[None, :] <= row_position[:, None], scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * qk_scale)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = gl.exp2(scores * qk_scale - shift[:, None])
    decay = gl.exp2(row_max - shift)
    return weights, new_max, row_sum * decay + gl.sum(weights, 1), decay


@gluon.jit
def _attend(
    q, acc, weights, row_max, row_sum, first, last, tiles, keys, values, key_full, key_free, value_full, value_free,
    qk_scale, row_position, MASKED: gl.constexpr,
):  # fmt: skip
    """Fold tiles last - 1 down to first into the running softmax. A tile's weights are multiplied with its values after
    the next tile's scores have been started: `weights` are those of the tile before the first on entry, and those of
    the last one on return."""
    STAGES: gl.constexpr = keys.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    ROWS: gl.constexpr = q.shape[0]
    SCORES: gl.constexpr = row_max.type.layout.parent
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    for tile in range(last - 1, first - 1, -1):
        i = tiles - 1 - tile
        stage = i % STAGES
        before = (i - 1) % STAGES
        hopper.mbarrier.wait(key_full.index(stage), (i // STAGES) & 1)
        scores = hopper.warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        hopper.mbarrier.wait(value_full.index(before), ((i - 1) // STAGES) & 1)
        acc = hopper.warpgroup_mma(weights, values.index(before), acc, is_async=True)
        scores = hopper.warpgroup_mma_wait(1, deps=(scores,))
        hopper.mbarrier.arrive(key_free.index(stage), count=1)
        new, row_max, row_sum, decay = _softmax(
            scores, row_max, row_sum, qk_scale, row_position, tile * BLOCK_N, MASKED
        )
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        hopper.mbarrier.arrive(value_free.index(before), count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, acc.type.layout))[:, None]
        weights = gl.convert_layout(new.to(keys.dtype), weights.type.layout)
    return acc, weights, row_max, row_sum


@gluon.jit
def _consume(
    out_ptr, q_ptr, sinks_ptr, query_start, query_len, seq_len, first_query, kv_head, tiles, keys, values,
    key_full, key_free, value_full, value_free, qk_scale,
    FIRST_LANE: gl.constexpr, ROWS: gl.constexpr, BLOCK_Q: gl.constexpr,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, LOG2_E: gl.constexpr = LOG2_E,
):  # fmt: skip
    """Compute rows FIRST_LANE : FIRST_LANE + ROWS of the tile, with four warps."""
    BLOCK_N: gl.constexpr = keys.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    OUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    lane = FIRST_LANE + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MEMORY))
    query = first_query + lane // GROUP
    mask = ((lane < BLOCK_Q * GROUP) & (query < query_len))[:, None]
    target = (query_start + query).to(gl.int64) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + lane % GROUP
    place = target[:, None] * HEAD_DIM + gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, MEMORY))[None, :]
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], keys.dtype)
    q = gl.allocate_shared_memory(keys.dtype, [ROWS, HEAD_DIM], q_layout, gl.load(q_ptr + place, mask=mask, other=0.0))
    hopper.fence_async_shared()

    row_position = seq_len - query_len + first_query + (FIRST_LANE + gl.arange(0, ROWS, layout=ROW)) // GROUP
    first_position = seq_len - query_len + first_query + FIRST_LANE // GROUP
    whole = gl.minimum(gl.maximum(first_position + 1, 0) // BLOCK_N, tiles - 1)  # tiles that every row sees: no masks
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    hopper.mbarrier.wait(key_full.index(0), 0)
    scores = hopper.warpgroup_mma(q, keys.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = hopper.warpgroup_mma_wait(0, deps=(scores,))
    hopper.mbarrier.arrive(key_free.index(0), count=1)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    row_sum = gl.zeros([ROWS], gl.float32, ROW)
    if sinks_ptr is not None:  # a score without a value, before all keys
        head = kv_head * GROUP + (FIRST_LANE + gl.arange(0, ROWS, layout=ROW)) % GROUP
        row_max = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
        row_sum += 1.0
    start = (tiles - 1) * BLOCK_N
    weights, row_max, row_sum, _ = _softmax(scores, row_max, row_sum, qk_scale, row_position, start, True)
    weights = gl.convert_layout(weights.to(keys.dtype), WEIGHTS)
    hopper.mbarrier.wait(value_full.index(0), 0)
    if start + BLOCK_N > seq_len:  # memory behind the last key may hold NaN, which a weight of 0 would not undo
        position = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, MEMORY))
        value = values.index(0).load(MEMORY)
        values.index(0).store(gl.where((position < seq_len)[:, None], value, 0.0).to(keys.dtype))
        hopper.fence_async_shared()
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)
    acc, weights, row_max, row_sum = _attend(
        q, acc, weights, row_max, row_sum, whole, tiles - 1, tiles, keys, values,
        key_full, key_free, value_full, value_free, qk_scale, row_position, True,
    )  # fmt: skip
    acc, weights, row_max, row_sum = _attend(
        q, acc, weights, row_max, row_sum, 0, whole, tiles, keys, values,
        key_full, key_free, value_full, value_free, qk_scale, row_position, False,
    )  # fmt: skip
    STAGES: gl.constexpr = keys.shape[0]
    hopper.mbarrier.wait(value_full.index((tiles - 1) % STAGES), ((tiles - 1) // STAGES) & 1)
    acc = hopper.warpgroup_mma(weights, values.index((tiles - 1) % STAGES), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    total = gl.convert_layout(gl.where(row_sum == 0.0, 1.0, row_sum), gl.SliceLayout(1, OUT))
    out = gl.convert_layout((acc / total[:, None]).to(keys.dtype), MEMORY)
    gl.store(out_ptr + place, out, mask=mask)


@gluon.jit(
    do_not_specialize=["value_rows", "block_rows", "block_table_stride", "first_req", "num_reqs", "search_steps"]
)
def _prefill_kernel(
    out_ptr, q_ptr, cache, block_table_ptr, rows_ptr, query_start_loc_ptr, seq_lens_ptr, sinks_ptr, qk_scale,
    value_rows, block_rows, block_table_stride, first_req, num_reqs, search_steps,
    NUM_KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Attend; grid (KV heads, tiles of queries as in kernels/attention.py). Three groups of warps: two that multiply,
    for half the rows each, and one of which a warp loads."""
    kv_head = gl.program_id(0)
    BLOCK_Q: gl.constexpr = BLOCK_M // GROUP
    HALF: gl.constexpr = BLOCK_M // 2
    # late tiles see most keys: start them first
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    request, query_start, query_len, tile = find_request(
        tile, query_start_loc_ptr, first_req, num_reqs, search_steps, BLOCK_Q
    )
    if tile * BLOCK_Q >= query_len:
        return
    seq_len = gl.load(seq_lens_ptr + request)
    blocks_ptr = block_table_ptr + gl.load(rows_ptr + request).to(gl.int64) * block_table_stride
    first_query = tile * BLOCK_Q
    limit = gl.minimum(seq_len - query_len + first_query + BLOCK_Q, seq_len)
    tiles = gl.maximum(gl.cdiv(limit, BLOCK_N), 1)
    last_block = gl.maximum(seq_len - 1, 0) // BLOCK_SIZE

    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], cache.dtype)
    keys = gl.allocate_shared_memory(cache.dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    values = gl.allocate_shared_memory(cache.dtype, [STAGES, BLOCK_N, HEAD_DIM], layout)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(key_full.index(stage), count=1)
        hopper.mbarrier.init(key_free.index(stage), count=2)
        hopper.mbarrier.init(value_full.index(stage), count=1)
        hopper.mbarrier.init(value_free.index(stage), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                out_ptr, q_ptr, sinks_ptr, query_start, query_len, seq_len, first_query, kv_head, tiles, keys, values,
                key_full, key_free, value_full, value_free, qk_scale,
                0, HALF, BLOCK_Q, NUM_KV_HEADS, GROUP, HEAD_DIM,
            )),
            (_consume, (
                out_ptr, q_ptr, sinks_ptr, query_start, query_len, seq_len, first_query, kv_head, tiles, keys, values,
                key_full, key_free, value_full, value_free, qk_scale,
                HALF, HALF, BLOCK_Q, NUM_KV_HEADS, GROUP, HEAD_DIM,
            )),
            (_produce, (
                cache, blocks_ptr, value_rows, block_rows, kv_head * HEAD_DIM, tiles, last_block, keys, values,
                key_full, key_free, value_full, value_free, HEAD_DIM, BLOCK_SIZE,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def prefill_attention(
    out: Tensor, q: Tensor, kv_cache: Tensor, sequences: Sequences, sinks: Tensor | None, qk_scale: float,
    first_req: int, end_req: int, tiles: int, config: AttentionConfig,
) -> None:  # fmt: skip
    """Launch the kernel for requests first_req : end_req, whose tokens begin at first_req. Arguments are those of
    kernels/attention.py; q and the cache have the same 16-bit type."""
    num_heads, head_dim = q.shape[1:]
    num_blocks, block_size, num_kv_heads = kv_cache.shape[1:4]
    box, width = [min(block_size, config.block_n), COLUMNS], num_kv_heads * head_dim
    value_rows, block_rows = rows_between(kv_cache)
    num_rows = value_rows + (num_blocks - 1) * block_rows + block_size
    cache = TensorDescriptor(kv_cache, [num_rows, width], [width, 1], box, BOX_LAYOUT)
    arguments = (
        out, q, cache, *sequences, sinks, qk_scale, value_rows, block_rows, sequences.block_table.stride(0), first_req,
        end_req, (end_req - first_req - 1).bit_length(),
    )  # fmt: skip
    constants = {
        "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "GROUP": num_heads // num_kv_heads,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_SIZE": block_size, "STAGES": config.num_stages,
        "num_warps": 4,
    }  # fmt: skip
    launch(_prefill_kernel, (num_kv_heads, tiles, 1), arguments, constants)
