"""`python -m tests.kernels.compile_kernels TARGET [sweep]`: compile, through the very functions that launch them, every
kernel at configurations that the tables pick for TARGET: at all of them in a sweep, otherwise at so few that every
dtype, branch of a kernel and so on comes up for its vendor, though not each beside each other: AMD's two targets, for
which the tables pick the same, take turns, and compile what they share once. Of those few the first of each kernel in
each part of this file is compiled to the end; the others no further than Triton's own program, a quarter of the time.
One JSON line a kernel: what it is, and of those compiled to the end spills, shared memory, and whether it loads before
it waits."""

import itertools
import json
import sys
from dataclasses import replace

import torch

from headrace.kernels import (
    activation,
    adapters,
    attention,
    attention_config,
    batch,
    decode,
    delta_scan,
    elementwise,
    exchange,
    filter,
    fp8,
    fp8_cache,
    gated_delta,
    gemm,
    index,
    latent,
    latent_cache,
    latent_prompt,
    logsumexp,
    matmul,
    moe,
    moe_config,
    moe_route,
    moe_tiled,
    moe_vector,
    narrow,
    ngram,
    norm,
    peers,
    qk_norm,
    rotary,
    sampling,
    tiled,
    tiled_gemm,
    tiled_vector,
    tiled_widen,
)
from headrace.kernels.attention_config import plan_attention, plan_decode
from headrace.kernels.gemm_config import BUCKETS, CANDIDATES, TILED
from headrace.kernels.latent_config import plan_latent
from headrace.kernels.moe_adapters import ExpertAdapters
from headrace.kernels.paged import Sequences
from tests.kernels.coded_weights import KINDS, OF_EXPERTS, random_coded
from tests.kernels.offline_target import (
    TARGETS,
    compiled,
    loads_before_it_waits,
    reached_the_end,
    shorten_all_but_first,
    spills,
    trusts_its_cache_early,
    use_target,
)

DTYPES = (torch.bfloat16, torch.float16)
TARGET, SWEEP = sys.argv[1], sys.argv[2:] == ["sweep"]
FAMILY = TARGETS[TARGET][0].backend
E4M3 = torch.float8_e4m3fnuz if TARGET == "gfx942" else torch.float8_e4m3fn
EPS = 1e-5
SEQUENCES = Sequences(torch.zeros(4, 16, dtype=torch.int32), *torch.zeros(3, 16, dtype=torch.int32))


TURN = {"sm_90": slice(None), "gfx942": slice(0, None, 2), "gfx950": slice(1, None, 2)}[TARGET]


def grid(*axes, most=None):
    """All combinations in a sweep, otherwise this target's share of as many as the longest axis has values, of which
    the first `most`."""
    if SWEEP:
        return list(itertools.product(*axes))
    return [tuple(axis[place % len(axis)] for axis in axes) for place in range(max(map(len, axes)))][TURN][:most]


def turns(kinds):
    """All kinds in a sweep, otherwise this target's share of them; each with its place."""
    return list(enumerate(kinds))[slice(None) if SWEEP else TURN]


def one_of(kinds, place):
    """All kinds in a sweep, otherwise the one whose turn it is."""
    return list(kinds) if SWEEP else [kinds[place % len(kinds)]]


def report(label, kernel, known):
    fresh = [found for found in compiled(kernel) if id(found) not in known]
    known.update(map(id, fresh))
    for found in fresh:
        entry = {"kernel": label, "to_the_end": reached_the_end(found)}
        if entry["to_the_end"]:
            entry |= {"spills": spills(found), "shared": found.metadata.shared, "early": loads_before_it_waits(found)}
            entry["cached"] = trusts_its_cache_early(found)
        print(json.dumps(entry), flush=True)


def compile_attention():
    known = set(map(id, compiled(attention._attention_kernel)))
    for place, (dtype, head_dim, group) in enumerate(grid(DTYPES, (128, 96, 64, 256), (1, 4, 8), most=2)):
        kv_heads = 2
        q = torch.zeros(64, group * kv_heads, head_dim, dtype=dtype)
        cache = torch.zeros(2, 4, 16, kv_heads, head_dim, dtype=dtype)
        for decodes, counts in one_of(((16, 16), (0, 64)), place):
            plan = plan_attention(16, counts, decodes, 1 << 17, group * kv_heads, kv_heads, head_dim, 2, FAMILY, 132)
            kind = "decode" if decodes else "prefill"
            attention.paged_attention(q[:counts], cache, SEQUENCES, 1.0, plan=plan)
            report(f"attention {kind} {dtype} head_dim {head_dim} group {group}", attention._attention_kernel, known)


def compile_prefill():
    """What only NVIDIA's 9.0 has the instructions for."""
    if TARGET != "sm_90":
        return
    from headrace.kernels import prefill

    known = set(map(id, compiled(prefill._prefill_kernel)))
    for dtype, head_dim, group, block_size in grid(DTYPES, (128, 64), (7, 4, 1), (16, 64), most=1):  # 64: gpt-oss's too
        q = torch.zeros(64, group * 2, head_dim, dtype=dtype)
        cache = torch.zeros(2, 4, block_size, 2, head_dim, dtype=dtype)
        plan = plan_attention(16, 64, 0, 1 << 17, group * 2, 2, head_dim, 2, "cuda", 1, copy_engine=True)
        attention.paged_attention(q, cache, SEQUENCES, 1.0, plan=plan)
        report(f"prefill {dtype} head_dim {head_dim} group {group} block {block_size}", prefill._prefill_kernel, known)


def compile_gpt_oss():
    """Sinks, with and without windows, and chunks, in heads of 64: prompts, decodes among them and the fused decode, of
    16-bit and fp8 caches."""
    known = set()
    numbers, sinks, angles = torch.zeros(64, dtype=torch.int32), torch.zeros(64).bfloat16(), torch.zeros(8, 64)
    q, k, v = torch.zeros(64, 80, 64, dtype=torch.bfloat16).split((64, 8, 8), dim=1)
    kernels = {"decode": decode._decode_kernel, "attention": attention._attention_kernel}
    for place, (window, chunked, dtype) in turns(
        ((128, False, torch.bfloat16), (None, False, E4M3), (96, True, torch.bfloat16))
    ):
        quantized = dtype.itemsize == 1
        cache, scale = torch.zeros(2, 4, 16, 8, 64).to(dtype), torch.ones(2) if quantized else None
        sizes = (64, 8, 64, 1 if quantized else 2, FAMILY, 132)
        for requests in one_of((64, 1), place):
            config, splits = plan_decode(requests, *sizes, window)
            decode.decode_attention(
                q[:requests], k[:requests], v[:requests], None if chunked else angles, cache, SEQUENCES, numbers, 1.0,
                config, splits, window, kv_scale=scale, sinks=sinks, chunked=chunked,
            )  # fmt: skip
        for decodes, tokens in one_of(((0, 64), (16, 16)), place):
            plan = plan_attention(16, tokens, decodes, 1 << 17, *sizes, window=window)
            attention.paged_attention(q[:tokens], cache, SEQUENCES, 1.0, window, scale, None, sinks, chunked, plan=plan)
        for name, kernel in kernels.items():
            report(f"gpt-oss {name} {dtype} window {window} {'chunked' if chunked else ''}", kernel, known)
    if TARGET == "sm_90":
        from headrace.kernels import prefill

        cache = torch.zeros(2, 4, 16, 8, 64, dtype=torch.bfloat16)
        plan = plan_attention(16, 64, 0, 1 << 17, 64, 8, 64, 2, "cuda", 1, copy_engine=True)
        attention.paged_attention(q, cache, SEQUENCES, 1.0, None, None, None, sinks, plan=plan)
        report("gpt-oss prefill", prefill._prefill_kernel, set())


def compile_soft_caps():
    """Scores held within a cap, in heads of 256 whose neighbours are turned: a prompt, decodes and the fused decode."""
    known, numbers = set(), torch.zeros(64, dtype=torch.int32)
    q, k, v = torch.zeros(64, 16, 256, dtype=torch.bfloat16).split((8, 4, 4), dim=1)
    cache, angles, grown = torch.zeros(2, 4, 16, 4, 256, dtype=torch.bfloat16), torch.zeros(8, 128), torch.zeros(256)
    sizes = (8, 4, 256, 2, FAMILY, 132)
    for _, window in turns((4096, None)[: None if SWEEP else 1]):
        config, splits = plan_decode(64, *sizes, window)
        decode.decode_attention(
            q, k, v, angles, cache, SEQUENCES, numbers, 1.0, config, splits, window, grown, grown, 1e-6, None, None,
            None, False, 50.0, True, grown, grown,
        )  # fmt: skip
        report(f"soft cap decode window {window}", decode._decode_kernel, known)
        for decodes in one_of((0, 64), 0):
            plan = plan_attention(64, 64, decodes, 1 << 17, *sizes, window=window)
            attention.paged_attention(q, cache, SEQUENCES, 1.0, window, None, None, None, False, 50.0, plan=plan)
        report(f"soft cap attention window {window}", attention._attention_kernel, known)


def compile_decode():
    """Launches of the fused decode kernel for few and for many requests."""
    known, numbers = set(map(id, compiled(decode._decode_kernel))), torch.zeros(64, dtype=torch.int32)
    for dtype, head_dim, requests in grid(DTYPES, (64, 128, 256), (1, 64), most=2):
        q, k, v = torch.zeros(requests, 12, head_dim, dtype=dtype).split((8, 2, 2), dim=1)
        cache, angles = torch.zeros(2, 4, 16, 2, head_dim, dtype=dtype), torch.zeros(8, head_dim)
        config, splits = plan_decode(requests, 8, 2, head_dim, 2, FAMILY, 132)
        decode.decode_attention(q, k, v, angles, cache, SEQUENCES, numbers, 1.0, config, splits)
        report(f"decode {dtype} head_dim {head_dim} requests {requests}", decode._decode_kernel, known)


def compile_latents():
    """Attention over latents of DeepSeek's size, whole and of chosen keys, by heads of every number of rows, and what
    writes them; of 16-bit and fp8 caches."""
    known = set()
    rows = grid((*DTYPES, torch.float32), (None, E4M3, None), (128, 16, 20), most=2)
    for place, (dtype, cache_dtype, heads) in enumerate(rows):
        cache = torch.zeros(1, 4, 16, 1, 576).to(cache_dtype or dtype)
        size = 1 if cache_dtype is not None and dtype.itemsize == 2 else dtype.itemsize
        label = f"latents {cache_dtype or dtype} {heads} heads"
        nope, value = (192, 256) if heads == 16 else (128, 128)  # GLM-5's heads, on one of four ranks, and DeepSeek's
        q, numbers = torch.zeros(64, heads, nope + 64, dtype=dtype), torch.zeros(64, dtype=torch.int64)
        absorbed, turned, scale = torch.zeros(64, heads, 512, dtype=dtype), q[..., nope:], torch.ones(2)
        of_layer = latent.LatentHeads(torch.zeros(heads, nope + value, 512, dtype=dtype), nope)
        listed = torch.zeros(64, 2048, dtype=torch.int32)
        for step in one_of((((None, 16), (listed, 0)), ((listed, 16), (None, 0))), place):
            for chosen, decodes in step:
                tokens = decodes or 64
                plan = plan_latent(
                    16, tokens, decodes, 1 << 17, 0, of_layer.sizes(q), size, dtype.itemsize, FAMILY, 132,
                    None if chosen is None else 2048,
                )  # fmt: skip
                how = plan.decode if decodes else plan.chunk
                latent.latent_attention(
                    absorbed[:tokens], turned[:tokens], cache, SEQUENCES, 1.0, how, scale, chosen, 0, 16
                )
                report(f"{label} {how.config} {'all' if chosen is None else 'chosen'}", latent._latent_kernel, known)
        kv = torch.zeros(64, 576, dtype=dtype)
        latent_cache.latent_rotary_and_cache(
            q, kv, kv[0, :512], 1e-6, torch.zeros(8, 64), numbers, cache, numbers, scale, True
        )
        report(f"{label} write", latent_cache._latent_cache_kernel, known)
        plan = plan_latent(16, 64, 0, 1 << 17, 64, of_layer.sizes(q), size, dtype.itemsize, FAMILY, 132)
        memory = torch.zeros(8 * of_layer.sizes(q).expanded, dtype=dtype)
        for piece in one_of((8, 64), place):
            how = replace(plan.expanded, keys=16, piece=piece)
            latent_prompt.expanded_attention(
                q, of_layer, cache, SEQUENCES, SEQUENCES.rows, 1.0, how, memory.repeat(piece // 8), scale, 0
            )
            report(f"{label} prompt in {'one piece' if piece > 8 else 'pieces'}", latent_prompt._expanded_kernel, known)
        report(f"{label} gathered", latent_prompt._gather_kernel, known)


def compile_fp8_cache():
    """Attention over an fp8 cache, whole and fused into a decode step; the kernel that writes it."""
    known = {id(found) for kernel in (attention._attention_kernel, decode._decode_kernel) for found in compiled(kernel)}
    numbers, scale = torch.zeros(64, dtype=torch.int32), torch.ones(2)
    rows = grid((E4M3, torch.float8_e5m2), (64, 128, 256), (1, 8), (64, 1), most=2)
    for place, (dtype, head_dim, group, requests) in enumerate(rows):
        label = f"fp8 cache {dtype} head_dim {head_dim} group {group}"
        q = torch.zeros(64, group * 2, head_dim, dtype=torch.bfloat16)
        cache, angles = torch.zeros(2, 4, 16, 2, head_dim).to(dtype), torch.zeros(8, head_dim)
        for decodes, counts in one_of(((0, 64), (16, 16)), place):
            plan = plan_attention(16, counts, decodes, 1 << 17, group * 2, 2, head_dim, 1, FAMILY, 132)
            attention.paged_attention(q[:counts], cache, SEQUENCES, 1.0, None, scale, plan=plan)
            report(f"{label} attention", attention._attention_kernel, known)
        wide = torch.zeros(64, dtype=torch.int64)
        config, splits = plan_decode(requests, group * 2, 2, head_dim, 1, FAMILY, 132)
        config = replace(config, early_keys=requests == 1)  # which no table says of fp8 yet
        decode.decode_attention(
            q[:requests], q[:requests, :2], q[:requests, :2], angles, cache, SEQUENCES, numbers, 1.0, config, splits,
            kv_scale=scale,
        )  # fmt: skip
        report(f"{label} decode of {requests}", decode._decode_kernel, known)
        if TARGET == "sm_90":
            room = torch.zeros(2, 4, attention_config.UNPACKED_BLOCK, 2, head_dim, dtype=q.dtype)
            plan = plan_attention(16, 64, 0, 1 << 17, group * 2, 2, head_dim, 1, FAMILY, 132)
            plan = replace(plan, unpacked_blocks=1)
            unpacked = fp8_cache.UnpackedCache.within(room, plan, 3)
            fp8_cache.unpack(unpacked, cache, SEQUENCES, scale, 0)
            report(f"{label} unpacked", fp8_cache._unpack_kernel, known)
        rotary.rotary_and_cache(q, q[:, :2], q[:, :2], angles, wide, cache, wide, kv_scale=scale)
        report(f"{label} write", rotary._rotary_and_cache_kernel, known)


def compile_linears():
    known = set()
    for place, bucket in turns(BUCKETS):
        for config in one_of(CANDIDATES[FAMILY, 2, bucket], place):
            gemm.skinny_linear(torch.zeros(bucket, 4096).bfloat16(), torch.zeros(64, 4096).bfloat16(), None, config)
            report(f"linear {config}", gemm._gemv_kernel if bucket == 1 else gemm._skinny_kernel, known)


def compile_tiled():
    """Linears by tiled weights of each format, and what widens them."""
    known = set()
    for _, (kind, bucket, dtype) in turns((
        ("int4 wide groups", 16, torch.bfloat16), ("mxfp4", 16, torch.bfloat16), ("nvfp4", 1, torch.float16),
        ("int8 groups", 32, torch.bfloat16), ("int8 per output", 64, torch.float16),
        ("int4 zeros", 128, torch.bfloat16),
    )):  # fmt: skip
        weight = tiled.tile(random_coded(64, 4096, **KINDS[kind]), dtype)
        configs = TILED[FAMILY, bucket]
        for config in configs if SWEEP else configs[:1]:
            gemm.skinny_linear(torch.zeros(bucket, 4096, dtype=dtype), weight, None, config)
            kernel = tiled_vector._tiled_vector_kernel if config.block_m == 1 else tiled_gemm._tiled_kernel
            report(f"tiled linear {kind} {config}", kernel, known)
        tiled_widen.widen_tiled(weight, dtype)
        report(f"widened {kind}", tiled_widen._widen_kernel, known)


def compile_experts():
    """Layers like Qwen3-30B-A3B's, Mixtral's and Qwen1.5-MoE's (with a shared expert), from one token to thousands."""
    known, moe.DEVICE_FAMILY = set(), FAMILY
    kernels = (
        moe_route._router_kernel, moe_route._route_kernel, moe_route._sort_kernel,
        moe.up_one_by_one_kernel, moe.down_one_by_one_kernel, moe.tiles_kernel, moe.sum_kernel,
        moe_tiled.tiled_experts_kernel, moe_vector.vector_up_kernel, moe_vector.vector_down_kernel,
    )  # fmt: skip
    for _, (num_experts, top_k, hidden, n, has_shared) in turns((
        (128, 8, 2048, 768, False), (8, 2, 4096, 14336, False), (60, 4, 2048, 1408, True),
    )):  # fmt: skip
        one, scale = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
        narrow = torch.zeros(1).to(E4M3)
        w13, w2 = one.expand(num_experts, 2 * n, hidden), one.expand(num_experts, hidden, n)
        in_fp8 = {
            "w13": narrow.expand(w13.shape), "w13_scale": scale.expand(w13.shape[:2]),
            "w2": narrow.expand(w2.shape), "w2_scale": scale.expand(w2.shape[:2]),
        }  # fmt: skip
        router = one.expand(num_experts + has_shared, hidden)
        few = (1, 32) if SWEEP else (32,) if has_shared else (1,)
        for num_tokens in (1, 8, 32, 128, 2048) if num_experts == 128 and SWEEP else few:
            x = one.expand(num_tokens, hidden).contiguous()
            experts = moe.Experts(router[0], 1e-6, router, w13, w2, top_k, True)
            moe.fused_moe(x, experts, x if has_shared else None, x)
            moe.fused_moe(x, replace(experts, next_norm=router[0]), x if has_shared else None, x)
            if has_shared:  # and with a sigmoid's router and a norm in float32, without a gate of the shared expert
                groups = max(1, num_experts // 32)
                scoring = moe_route.Scoring(True, router[0, :num_experts].float(), 2.5, groups, max(1, groups // 2))
                ungated = replace(experts, norm_weight=router[0].float(), router=router[:-1], scoring=scoring)
                moe.fused_moe(x, ungated, x, x)
                scaled = replace(experts, router=router[:-1], scoring=moe_route.Scoring(True), scales_input=True)
                moe.fused_moe(x[:1], scaled, x[:1], x[:1])
                own = {"router_norm": router[0], "activation": "gelu_tanh"}
                factored = moe_route.Scoring(factors=router[0, :num_experts].float(), near=0.02)
                moe.fused_moe(x, replace(experts, scoring=factored, **own), x, x)
                moe.fused_moe(x, replace(scaled, **in_fp8), x, x)
                joined = moe.Joined(4, one.expand(8 * n, hidden), one.expand(hidden, 4 * n), None, None)
                for kind, number, tokens in (({}, 4, 1), (in_fp8, 4, 1), ({}, 4, 32), (in_fp8, 4, 32), (in_fp8, 1, 32)):
                    held = replace(experts, joined=joined._replace(number=number), **kind)
                    moe.fused_moe(x[:tokens], held, None, x[:tokens])
            moe.fused_moe(x, replace(experts, **in_fp8), x if has_shared else None, x)
            if num_experts == 128:
                moe.fused_moe(x, experts, None, x, None, expert_adapters(experts))
            if num_experts == 8:
                sorted_pairs = moe_config.pick_moe_config(40, 1, 1, "fp8", FAMILY)
                moe.fused_moe(x, replace(experts, **in_fp8), None, x, sorted_pairs)
            for kernel in kernels:
                report(f"experts {kernel.__name__} {num_experts} {num_tokens}", kernel, known)
    kinds = ("mxfp4", "int4 zeros", "int4 wide groups", "nvfp4", "fp8 blocks", "int8 groups", "int4 per output")
    counts = (1, 8, 128, 512, 2048)  # for each row of the tables
    if not SWEEP:  # so many for each target; what sets kinds apart is the linears' too
        kinds, counts = ("mxfp4", "fp8 blocks", "int4 zeros"), (2048, 8, 1)
    for kind, dtype, num_tokens in grid(kinds, DTYPES, counts):
        experts = replace(tiled_experts(kind, dtype), scales_input=kind in ("nvfp4", "fp8 blocks"))
        moe.fused_moe(torch.zeros(num_tokens, 2880, dtype=dtype), experts, None)
        if SWEEP or (TARGET == "sm_90" and kind == kinds[0]):
            x = torch.zeros(num_tokens, 2880, dtype=dtype)
            moe.fused_moe(x, experts, None, None, None, expert_adapters(experts))
        for kernel in kernels:
            report(f"experts {kernel.__name__} {kind} {dtype} {num_tokens}", kernel, known)


def expert_adapters(experts, slots=2, rank=16):
    """Adapters of all experts, of no token's choice."""
    number, n, hidden = experts.num_experts, experts.inner_size, experts.router.shape[1]
    one, numbers, held = torch.zeros(1, dtype=experts.router.dtype), torch.zeros(1, dtype=torch.int32), []
    for parts, inputs, outputs in ((2, hidden, n), (1, n, hidden)):
        a = one.expand(slots * number * parts * rank * inputs).view(slots, -1, inputs)
        b = one.expand(slots * number * parts * rank * outputs).view(slots, -1, rank)
        held.append(adapters.AdapterWeights(a, b, numbers, numbers, (outputs,) * (number * parts), numbers))
    return ExpertAdapters(numbers, *held)


def tiled_experts(kind, dtype):
    """Experts like gpt-oss's, with biases, in any tiled form."""
    num_experts, size, one = 32, 2880, torch.zeros(1, dtype=dtype)
    rows, weights = random_coded(1, 64, size, **OF_EXPERTS[kind]), []
    for outputs in (2 * size, size):
        row = tiled.tile(rows, dtype, gated=outputs > size)
        tensors = {"codes": row.codes.expand(num_experts, outputs // 64, *row.codes.shape[2:])}
        if row.words is not None:
            tensors["words"] = row.words.expand(num_experts, outputs // 64, *row.words.shape[2:])
        if row.factors is not None:
            tensors["factors"] = row.factors[:, :1].expand(num_experts, outputs)
        arrived = torch.zeros(num_experts * outputs // 8, dtype=torch.int32)
        weights.append(replace(row, out_features=outputs, arrived=arrived, **tensors))
    biases = {"w13_bias": one.expand(num_experts, 2 * size), "w2_bias": one.expand(num_experts, size)}
    router = one.expand(num_experts, size)
    clamp = moe.SwigluClamp(1.702, 7.0)
    return moe.Experts(router[0], 1e-5, router, *weights, 4, True, router_bias=router[:, 0], clamp=clamp, **biases)


def compile_rest():
    numbers, wide = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
    x, ones = torch.zeros(16, 4096, dtype=torch.bfloat16), torch.ones(16)
    both = norm.Unsummed(x, x)
    qkv = torch.zeros(16, 48, 128, dtype=torch.bfloat16)
    q, k, v = qkv.split((32, 8, 8), dim=1)
    cache, angles = torch.zeros(2, 4, 16, 8, 128, dtype=torch.bfloat16), torch.zeros(8, 128)
    commit = wide, x.int(), wide, x[:, 0], x[:, 0], wide, wide, -1, -2
    some, words = torch.zeros(17, dtype=torch.int32), torch.zeros(16, 128, dtype=torch.int32)
    wider = [(norm.Unsummed(x, x, weight, 1e-6), weight) for weight in (x[0], x[0].float())]
    gates = [(x, kind, gated) for kind in activation.GATES for gated in (True, False)]
    gates += [(x, "xielu", False, torch.zeros(4))]
    rotate = q, k, v, angles, wide, cache, wide
    normed = norm._rms_norm_kernel
    own = peers.Peers(0, torch.zeros(2, dtype=torch.int64), 1 << 20, torch.clone)
    shared = norm.Unsummed(x, x, peers=own)
    launches = (
        (norm.rms_norm, [normed], [(x, x[0], EPS), (both, x[0], EPS), (both, x[0].float(), EPS)]),
        (norm.rms_norm, [normed], [(*given, EPS) for given in wider]),
        (norm.layer_norm, [normed], [(both, x[0], None, EPS), (x, x[0], x[0], EPS), (both, None, None, EPS)]),
        (norm.add_up, [normed], [given[:1] for given in wider]),
        (norm.rms_norm, [normed], [(shared, x[0], EPS), (shared._replace(weight=x[0]), x[0], EPS)]),
        (peers.all_reduce, [peers._all_reduce_kernel], [(x, own), (x.float(), own)]),
        (exchange.gather_rows, [exchange._gather_rows_kernel], [(x, own), (x.float(), own)]),
        (exchange.scatter_rows, [exchange._scatter_rows_kernel], [(x, own), (x.float(), own)]),
        (peers.all_reduce_in_two, [peers._two_shot_kernel], [(x, own, bits) for bits in peers.QUICK_BITS.values()]),
        (activation.gate_and_mul, [activation._gate_and_mul_kernel], gates),
        (batch.copy_words, [batch._copy_words_kernel], [(numbers, numbers)]),
        (batch.scatter_words, [batch._scatter_words_kernel], [(numbers, wide, numbers)]),
        (batch.commit_tokens, [batch._commit_tokens_kernel], [commit, (*commit, numbers, wide, 4, -3)]),
        (
            batch.settle_lengths, [batch._settle_lengths_kernel],
            [(numbers, numbers, numbers, wide, wide, wide, numbers)],
        ),
        (
            ngram.propose_ngram, [ngram._find_matches_kernel, ngram._copy_drafts_kernel],
            [(x.int(), numbers, numbers, 4000, 5, 2, 5)],
        ),
        (batch.prepare_batch, [batch._prepare_batch_kernel], [(numbers, numbers, some, x.int(), x.int(), 16, 16)]),
        (
            rotary.rotary_and_cache, [rotary._rotary_and_cache_kernel],
            [
                rotate, (*rotate, x[0, :128], x[0, :128]),
                (q, k, v, angles[:, :64], wide, cache, wide, ones, ones, 1e-6, None, True, ones, ones),
            ],
        ),
        (qk_norm.qk_squares, [qk_norm._squares_kernel], [(qkv, (32, 8))]),
        (
            qk_norm.qk_norm, [qk_norm._qk_norm_kernel],
            [(qkv, qkv[0, :40], (32, 8), EPS, True), (qkv, qkv[0, :40], (32, 8), EPS, False, torch.zeros(16, 2))],
        ),
        (elementwise.clip, [elementwise._clip_kernel], [(x, 8.0)]),
        (elementwise.scale, [elementwise._scale_kernel], [(x, x[0, :1])]),
        (elementwise.gate_heads, [elementwise._gate_heads_kernel], [(q.contiguous(), qkv.repeat(1, 2, 1)[:, 1:64:2])]),
        (sampling.gumbel_argmax, [sampling._gumbel_kernel, sampling._pick_kernel], [(x, ones, wide, wide)]),
        (sampling.mask_tokens, [sampling._mask_kernel], [(scores, words, wide) for scores in (x, x.float())]),
        (
            filter.filter_floor, [filter._groups_kernel, filter._histogram_kernel, filter._limit_kernel],
            [(torch.zeros(16, 128256), ones, numbers, ones, ones)],
        ),
        (None, [attention._combine_kernel], ()),  # which attention launches
    )  # fmt: skip
    known = set()
    for launch, kernels, given in launches:
        for _, arguments in turns(given):
            launch(*arguments)
        for kernel in kernels:
            report(kernel.__name__, kernel, known)


def compile_batch_invariant():
    """Linears of few and of many tokens, whole and in parts; attention; logsumexp."""
    matmul.DEVICE_FAMILY = FAMILY
    for dtype, (n, k), tokens in grid(DTYPES, ((4096, 4096), (28672, 100)), (1, 500)):
        x, weight = torch.zeros(tokens, k, dtype=dtype), torch.zeros(n, k, dtype=dtype)
        matmul.matmul(x, weight)
        matmul.matmul(x[:, : k // 8], weight[:, : k // 8], dtype=torch.float32)
    logsumexp.logsumexp(torch.zeros(2, 128256))
    for kernel in (matmul._matmul_kernel, matmul._add_parts_kernel, logsumexp._logsumexp_kernel):
        report(f"batch-invariant {kernel.__name__}", kernel, set())
    known = set(map(id, compiled(attention._attention_kernel)))
    for head_dim, group in grid((64, 128), (1, 4, 8), most=1):
        q = torch.zeros(64, group * 2, head_dim, dtype=torch.bfloat16)
        cache = torch.zeros(2, 4, 16, 2, head_dim, dtype=torch.bfloat16)
        plan = plan_attention(16, 64, 0, 1 << 17, group * 2, 2, head_dim, 2, FAMILY, 132, True)
        attention.paged_attention(q, cache, SEQUENCES, 1.0, plan=plan)
        report(f"batch-invariant attention head_dim {head_dim} group {group}", attention._attention_kernel, known)


def compile_narrow():
    """Linears of 8 bits for few tokens, and for many where the library serves none."""
    narrow.DEVICE_FAMILY = FAMILY
    known = {id(found) for kernel in (gemm._gemv_kernel, gemm._skinny_kernel) for found in compiled(kernel)}
    for _, (kind, dtype, block, zeros) in turns((
        ("fp8 blocks", E4M3, (128, 128), False),
        ("int8", torch.int8, (0, 0), True),
        ("fp8", E4M3, (0, 0), False),
    )):  # fmt: skip
        codes = torch.zeros(256, 4096, dtype=torch.uint8).view(dtype)
        scales = torch.zeros(2, 32) if block[0] else torch.zeros(256)
        weight = fp8.NarrowWeight(codes, scales, *block, torch.zeros(256) if zeros else None)
        to = fp8.Rounding(dtype, block[1], zeros=zeros)
        for bucket in BUCKETS if SWEEP else (1, 16, 128):
            for config in CANDIDATES.get((FAMILY, kind, bucket), ())[: None if SWEEP else 1]:
                plain = torch.zeros(bucket, 4096, dtype=torch.bfloat16)
                x = plain if bucket == 1 else fp8.empty_quantized(bucket, 4096, to, torch.device("cpu"))
                gemm.skinny_linear(x, weight, None, config, torch.bfloat16)
                report(f"narrow {kind} {config}", gemm._gemv_kernel if bucket == 1 else gemm._skinny_kernel, known)
        many = fp8.empty_quantized(500, 4096, to, torch.device("cpu"))
        narrow.narrow_linear(many, weight, None, torch.bfloat16)
        report(f"narrow {kind} 500 tokens", gemm._skinny_kernel, known)


def compile_fp8():
    """Quantization of rows as wide as those of models of 8B and 70B, alone and inside norm and activation."""
    fp8.DEVICE_FAMILY = FAMILY
    kernels = (fp8._quantize_kernel, norm._rms_norm_kernel, activation._gate_and_mul_kernel)
    known = {id(found) for kernel in kernels for found in compiled(kernel)}
    pair, one = torch.zeros(2), torch.zeros(1)
    ways = (
        fp8.Rounding(E4M3), fp8.Rounding(E4M3, group=128), fp8.Rounding(E4M3, given=pair),
        fp8.Rounding(E4M3, bound=one), fp8.Rounding(torch.int8), fp8.Rounding(torch.int8, given=pair, zeros=True),
        fp8.Rounding(torch.int8, zeros=True),
    )  # fmt: skip
    for width, to in grid((4096, 14336, 28672), ways):
        x = torch.zeros(2, 2 * width, dtype=torch.bfloat16)
        fp8.quantize(x[:, :width], to)
        if width <= 16384:  # wider than hidden states are
            norm.rms_norm_quantized(x[:, :width], x[0, :width], 1e-5, to)
        activation.gate_and_mul_quantized(x, to)
        for kernel in kernels:
            report(f"quantized {kernel.__name__} {width}", kernel, known)


def compile_recurrent():
    """Gated delta-nets with heads of the sizes of Qwen3-Next, and smaller ones."""
    delta_scan.DEVICE_FAMILY, known = FAMILY, set()
    sizes = ((16, 32, 128, 2), (2, 2, 64, 1))
    for dtype, (key_heads, value_heads, dim, slots) in grid(DTYPES, sizes, most=1):
        apart = 2 * dim + 2 * dim * value_heads // key_heads
        places = gated_delta.Places(0, dim, 2 * dim, 3 * dim, apart, apart, 0, 2, 4)
        heads = gated_delta.DeltaHeads(key_heads, value_heads, dim, dim, 4, places, slots)
        numbers = torch.zeros(value_heads)
        weights = gated_delta.DeltaWeights(
            torch.zeros(heads.channels, 4, dtype=dtype), numbers, numbers, torch.zeros(dim, dtype=dtype), 1e-6
        )
        projected, gates = (
            torch.zeros(64, key_heads * apart, dtype=dtype),
            torch.zeros(64, 2 * value_heads, dtype=dtype),
        )
        states = torch.zeros(2, heads.numbers)
        gated_delta.gated_delta_step(projected, gates, heads, weights, states, SEQUENCES)
        for in_turn in (False, True):
            delta_scan.gated_delta_scan(projected, gates, heads, weights, states, SEQUENCES, 1, None, in_turn)
        for kernel in (
            gated_delta._delta_step_kernel, delta_scan._convolve_kernel, delta_scan._delta_chunks_kernel,
            delta_scan._delta_scan_kernel, delta_scan._gated_norm_kernel, delta_scan._keep_window_kernel,
        ):  # fmt: skip
            report(f"recurrent {kernel.__name__} {dtype} heads of {dim}", kernel, known)


def compile_adapters():
    """Adapters of a fused linear of three parts and of one alone, for the largest ranks and the smallest; and linears
    that add them by themselves."""
    known, ranks, slots = set(), torch.zeros(99, dtype=torch.int32), adapters.StepSlots(*torch.zeros(2, 64).int())
    for dtype, rank, parts in grid(DTYPES, (16, 64), (3, 1), most=1):
        a, b = torch.zeros(4, parts * rank, 4096, dtype=dtype), torch.zeros(4, parts * 1024, rank, dtype=dtype)
        weights = adapters.AdapterWeights(a, b, ranks, ranks[: parts + 1], (1024,) * parts, ranks)
        s = adapters.shrink_adapters(torch.zeros(64, 4096, dtype=dtype), slots, weights)
        adapters.expand_adapters(torch.zeros(64, parts * 1024, dtype=dtype), s, slots, weights)
        for kernel in (adapters._shrink_kernel, adapters._expand_kernel):
            report(f"adapters {kernel.__name__} {dtype} rank {rank} parts {parts}", kernel, known)
        if dtype != torch.bfloat16 or (rank, parts) == (64, 1):
            continue
        given = adapters.Adapted(slots, weights, s)
        known |= {id(found) for kernel in (gemm._skinny_kernel, tiled_gemm._tiled_kernel) for found in compiled(kernel)}
        outputs, gated = parts * 1024, parts == 1
        for bucket in BUCKETS[1:] if SWEEP else (16,):
            for config in one_of(CANDIDATES[FAMILY, 2, bucket], parts):
                x, weight = torch.zeros(bucket, 4096).bfloat16(), torch.zeros(outputs, 4096).bfloat16()
                gemm.skinny_linear(x, weight, None, config, gated=gated, adapters=given)
                report(f"adapters {gemm._skinny_kernel.__name__} {config} rank {rank}", gemm._skinny_kernel, known)
            for config in one_of(TILED[FAMILY, bucket], parts):
                tile = tiled.tile(random_coded(outputs, 4096, **KINDS["int4 wide groups"]), dtype, gated)
                gemm.skinny_linear(x, tile, None, config, gated=gated, adapters=given)
                report(
                    f"adapters {tiled_gemm._tiled_kernel.__name__} {config} rank {rank}",
                    tiled_gemm._tiled_kernel,
                    known,
                )


def compile_index():
    """Indexes of the sizes of DeepSeek V3.2 and GLM-5, over 16-bit and fp8 keys: decodes, prompts, and the choice."""
    known, numbers = set(), torch.zeros(16, 1 << 14)
    for place, (dtype, heads, block_size) in enumerate(grid((torch.bfloat16, E4M3), (64, 32), (64, 1))):
        q, keys = torch.zeros(16, heads, 128).bfloat16(), torch.zeros(1, 4, block_size, 1, 128).to(dtype)
        for decodes in one_of((True, False), place):
            index.index_scores(q, q[:, :, 0], keys, SEQUENCES, numbers, 0, 2048, decodes)
            index.top_keys(numbers, SEQUENCES, torch.zeros(16, 2048, dtype=torch.int32), 0)
        for kernel in (index._index_scores_kernel, index._top_keys_kernel):
            report(f"index {kernel.__name__} {dtype} {heads} heads, blocks of {block_size}", kernel, known)


if __name__ == "__main__":
    use_target(TARGET)
    begun = set()
    if not SWEEP:
        shorten_all_but_first(begun)
    for part in (
        compile_gpt_oss, compile_attention, compile_prefill, compile_decode, compile_soft_caps, compile_fp8_cache,
        compile_latents, compile_linears, compile_tiled, compile_experts, compile_batch_invariant, compile_rest,
        compile_fp8, compile_narrow, compile_recurrent, compile_index, compile_adapters,
    ):  # fmt: skip
        begun.clear()
        part()
