"""The memory map: held against what GPUs reported, against the layers that headrace builds, and against itself."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_configs import VARIANTS, tiny_config

from headrace.cache_groups import cache_layout
from headrace.distributed.mesh import Group, Mesh
from headrace.graph_sizes import LAYER_BYTES, PIECE_BYTES, WORKSPACE_BYTES, GraphSettings
from headrace.kernels import filter
from headrace.kernels.attention_config import UNPACKED_BYTES
from headrace.kernels.table import REFERENCE_KERNELS
from headrace.layers import embedding
from headrace.layers.adapters import Adapters
from headrace.layers.latent_attention import HeadsOfLatents
from headrace.layers.layer import Layer
from headrace.model_config import ModelConfig
from headrace.models.adapters import adapted_linears
from headrace.models.loader import attach_schemes, build_model, multiplied_weights, weight_bytes
from headrace.models.registry import SERVED
from headrace.models.served import attention_specs, describe
from headrace.parameters import total
from headrace.planner import memory_map as this
from headrace.planner.catalogue import catalogue, find_model
from headrace.planner.chips import CHIPS, GIB
from headrace.planner.memory_map import MemoryMap
from headrace.planner.parallel import Parallel
from headrace.planner.shapes import ModelShape, rank_shares, shape_of
from headrace.planner.weights import layer_bytes
from headrace.runner.kv_cache import cache_shape
from headrace.stages import Stage, divide_layers
from tests.models.driver import make_context
from tests.planner.planner_cases import mapped
from tests.sampled import sampled

H200, MI300X, H100 = CHIPS["h200"], CHIPS["mi300x"], CHIPS["h100"]
ONE = Parallel()
REPORTED = {
    # KV tokens at gpu_memory_utilization 0.9, max_model_len 8192, max_num_seqs 1024 on one H200
    ("vllm", "llama-3.1-8b", "bf16", 16384): 891_392,
    ("vllm", "llama-3.1-8b", "fp8", 16384): 944_288,
    ("vllm", "qwen3-30b-a3b", "bf16", 16384): 708_336,
    ("headrace", "qwen3-30b-a3b", "bf16", 8192): 736_384,
    ("headrace", "qwen3-30b-a3b", "bf16", 16384): 1_443_648,  # the cache in fp8, max_model_len 40,960
}


@dataclasses.dataclass(frozen=True)
class Reported:
    """By an H200, in bytes, where `serve` had no flags (2026-11-22)."""

    budget: int
    """tokens a step"""
    weights: int
    tables: int
    step: int
    """the largest"""
    pool: int
    """what the largest step of those that graphs are captured of takes"""
    graphs: int
    """all of them, when captured"""
    libraries: int
    cache: int
    """what was left for KV"""
    most_libraries: int
    """what they took in another start, the day before"""


PARTS_REPORTED = {
    "llama-3.1-8b": Reported(
        8192, 16_060_522_496, 942_290_432, 914_939_392, 104_879_104, 350 << 20, 1_186_988_032, 115_598_948_352,
        1_256_194_048,
    ),
    "qwen3-30b-a3b": Reported(
        16384, 61_064_245_248, 537_714_688, 1_061_552_128, 109_817_856, 632 << 20, 857_735_168, 70_958_350_336,
        1_191_182_336,
    ),
}  # fmt: skip


def on(chip: Any, name: str, parallel: Parallel = ONE, **settings: Any) -> MemoryMap:
    return mapped(find_model(name), chip, parallel, **{"max_model_len": 8192, **settings})


def test_kv_tokens_are_those_that_an_h200_reported() -> None:
    print()
    for (engine, name, weight_format, budget), tokens in REPORTED.items():
        kv = 1.0 if (engine, budget) == ("headrace", 16384) else 2.0
        found = on(
            H200, name, engine=engine, weight_format=weight_format, max_num_batched_tokens=budget, kv_dtype_bytes=kv
        )
        print(
            f"{engine:9}{name:15}{weight_format:5}{tokens:9,}{found.kv_tokens:9,}{found.kv_tokens / tokens - 1:+8.2%}"
        )
        assert found.kv_tokens == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize("name", PARTS_REPORTED)
def test_every_part_is_what_an_h200_reported(name: str) -> None:
    """Within 3% or 100 MB, and most of it nearer. Libraries (0.65 to 1.26 GB, by what is loaded when) are a guess: the
    cache is held beside them."""
    reported = PARTS_REPORTED[name]
    shape = find_model(name)
    found = mapped(shape, H200, ONE, max_num_batched_tokens=reported.budget, kv_dtype_bytes=1.0)
    settings = GraphSettings.of(
        {"cudagraph_mode": "FULL_AND_PIECEWISE"}, 1024, reported.budget, 8192, shape.most_in_pieces("bf16", 1)
    )
    assert found.weight_bytes == reported.weights
    assert found.tables == pytest.approx(reported.tables, abs=2e6)
    assert found.activations == pytest.approx(reported.step, abs=2e6)
    assert found.graphs - settings.bytes_beside_pool(shape.num_layers) == pytest.approx(reported.pool, abs=1e6)
    assert found.graphs == pytest.approx(reported.graphs, abs=30e6)
    assert found.reserve == pytest.approx(reported.most_libraries, abs=100e6)
    assert found.kv_pool + found.reserve == pytest.approx(reported.cache + reported.libraries, abs=100e6)
    assert found.kv_pool == pytest.approx(reported.cache, rel=0.01)


def test_communication_takes_memory_where_there_is_any() -> None:
    shape = find_model("llama-3.1-8b")
    reserves = [mapped(shape, H200, parallel).reserve for parallel in (ONE, Parallel(dp=2), Parallel(tp=2))]
    assert [reserve - reserves[0] for reserve in reserves] == [0, 0, this.COMMUNICATION]


def test_checkpoints_of_known_size() -> None:
    """gpt-oss-120b's files hold 60.8 GiB (model card), Kimi K2.5's 554.3 GiB. headrace fills gpt-oss's experts up to
    whole tiles, 2880 to 2944."""
    oss, kimi = find_model("gpt-oss-120b"), find_model("kimi-k2.5")
    assert mapped(oss, MI300X, ONE, engine="vllm").weight_bytes / GIB == pytest.approx(60.8, rel=0.001)
    assert mapped(oss, MI300X, ONE).weight_bytes / GIB == pytest.approx(62.2, rel=0.001)
    assert mapped(kimi, MI300X, Parallel(tp=8)).weight_bytes * 8 / GIB == pytest.approx(554.3, rel=0.05)


SERVED_HERE = [name for name, entry in catalogue().items() if entry.config["architectures"][0] in SERVED]


@sampled(("name", "tp"), SERVED_HERE, [1, 2, 4, 8])
def test_weights_are_those_of_the_layers_that_headrace_builds(name: str, tp: int) -> None:
    """To the byte, on the first rank, of each model of the catalogue that is served, as if it were unquantized; and
    rounded to fp8."""
    config = copy.deepcopy(catalogue()[name].config)
    for fields in (config, config.get("text_config", {})):
        fields.pop("quantization_config", None)
        if "max_position_embeddings" in fields:  # tables of angles are no weights, and are as long
            fields["max_position_embeddings"] = min(fields["max_position_embeddings"], 32768)
    built = ModelConfig.from_dict(config, defaults=SERVED[config["architectures"][0]].defaults)
    context = make_context(built, Mesh(Group(0, tp)), torch.bfloat16)
    model = build_model(built, context)
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, Layer)]
    shape = shape_of(config, name)

    def held() -> int:
        for _, layer in layers:
            layer.create_weights(torch.device("meta"))
            if isinstance(layer, HeadsOfLatents):
                layer.finalize()  # which widens what attention multiplies
        return sum(weight_bytes(layer) for _, layer in layers)

    assert mapped(shape, H200, Parallel(tp=tp)).weight_bytes == held()
    assert multiplied_weights(model) == pytest.approx(shape.multiplied_weights("bf16", tp), rel=0.07)
    attach_schemes(built, layers, context, "fp8")
    assert multiplied_weights(model) == pytest.approx(shape.multiplied_weights("fp8", tp), rel=0.07)
    counted = mapped(shape, H200, Parallel(tp=tp), weight_format="fp8").weight_bytes
    assert counted == held()


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("name", [name for name in SERVED_HERE if find_model(name).groups[0].mixer.kind == "mla"])
def test_a_token_of_latents_takes_what_the_cache_that_is_allocated_gives_it(name: str, kv: str) -> None:
    """To the byte, on every rank, with the keys of an index."""
    config = catalogue()[name].config
    built = ModelConfig.from_dict(config, defaults=SERVED[config["architectures"][0]].defaults)
    given = {"tp_size": 8, "block_size": 64, "dtype": "bfloat16", "device_type": "cuda", "kv_cache_dtype": kv}
    dtype = torch.bfloat16 if kv == "auto" else torch.float8_e4m3fn
    shape = cache_shape(describe(built), attention_specs(built, **given), 8, 64, dtype)
    held = (of_layer for layer in range(shape.num_layers) for of_layer in shape.blocks(layer))
    allocated = sum(math.prod(sizes) * stored.itemsize for sizes, stored in held)
    counted = on(H200, name, Parallel(tp=8), kv_dtype_bytes=dtype.itemsize).kv_bytes_per_token
    assert 64 * counted == allocated


@pytest.mark.parametrize(
    ("name", "tp", "experts"),
    [("llama-3.1-8b", 1, False), ("llama-3.1-8b", 4, True), ("qwen3-30b-a3b", 2, False), ("qwen3-30b-a3b", 2, True)],
)
def test_adapters_take_what_their_seats_take(name: str, tp: int, experts: bool) -> None:
    config = catalogue()[name].config
    built = ModelConfig.from_dict(config, defaults=SERVED[config["architectures"][0]].defaults)
    model = build_model(built, make_context(built, Mesh(Group(0, tp)), torch.bfloat16))
    meta = torch.device("meta")
    names = adapted_linears(describe(built), experts).keys()
    seats = Adapters(3, 20, names, REFERENCE_KERNELS, torch.bfloat16, meta)
    for path, layer in model.named_modules():
        seats.seat(path, layer)
    plain, adapted = (
        mapped(shape_of(config, name), H200, Parallel(tp=tp), adapters=adapters).tables
        for adapters in ((0, 0, False), (3, 20, experts))
    )
    assert adapted - plain == seats.num_bytes


@sampled(("architecture", "tp"), SERVED, [1, 2])
def test_weights_of_every_family_are_those_of_the_layers_that_are_built(architecture: str, tp: int) -> None:
    config = tiny_config(architecture, next(iter(VARIANTS[architecture].values()))).to_dict()
    config["architectures"] = [architecture]
    built = ModelConfig.from_dict(config)
    model = build_model(built, make_context(built, Mesh(Group(0, tp)), torch.bfloat16))
    layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
    for layer in layers:
        layer.create_weights(torch.device("meta"))
    assert mapped(shape_of(config, "tiny"), H200, Parallel(tp=tp)).weight_bytes == sum(map(weight_bytes, layers))


@pytest.mark.parametrize(("tp", "fullest"), [(1, 0), (2, 0), (4, 1), (8, 3)])
def test_experts_that_stay_packed_are_counted_on_the_rank_that_has_most(tp: int, fullest: int) -> None:
    """They are loaded as the checkpoint has them; tiles add what fills them up, more on ranks that hold less."""
    config = {**catalogue()["gpt-oss-120b"].config, "num_hidden_layers": 2}
    built = ModelConfig.from_dict(config)

    def made(rank: int) -> Any:
        context = make_context(built, Mesh(Group(rank, tp)), torch.bfloat16)
        model = build_model(built, context)
        layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, Layer)]
        attach_schemes(built, layers, context, None)
        for _, layer in layers:
            layer.create_weights(torch.device("meta"))
        return sum(weight_bytes(layer) for _, layer in layers), multiplied_weights(model)

    loaded, multiplied = made(fullest)
    counted = mapped(shape_of(config, "oss"), H200, Parallel(tp=tp)).weight_bytes
    assert 1.01 * loaded < counted < 1.03 * loaded
    assert multiplied == made(0)[1], "ranks would capture other graphs"


def test_numbers_of_the_engine_are_its_own() -> None:
    assert this.VOCAB_ALIGNMENT == embedding.VOCAB_ALIGNMENT
    assert (this.FILTER_BINS, this.FILTER_GROUP) == (filter._BINS, filter._GROUP)


@sampled(
    ("mode", "form"), ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"], ["bf16", "ptpc_fp8"]
)
def test_graphs_are_counted_as_the_runner_counts_them(mode: str, form: str) -> None:
    shape = find_model("llama-3.1-8b")
    found = mapped(shape, H200, ONE, graph_mode=mode, max_num_seqs=256, max_model_len=8192, weight_format=form)
    most = 512 if form == "bf16" else 2048
    counted = GraphSettings.of({"cudagraph_mode": mode}, 256, 8192, 8192, most)
    if counted is None:
        assert found.graphs == 0
        return
    driver = counted.num_full * 32 * LAYER_BYTES + len(counted.token_sizes("piecewise")) * 33 * PIECE_BYTES
    pool = counted.most_tokens * (2 * 4096 + 3 * 14336) * 2
    assert found.graphs == driver + pool + WORKSPACE_BYTES


def test_parts_add_up() -> None:
    found = on(H200, "llama-3.1-8b")
    assert sum(found.parts().values()) == found.usable == int(0.9 * found.total)
    assert found.weight_bytes == 2 * 8_030_261_248
    assert found.kv_bytes_per_token == 131_072
    assert found.fits
    assert found.max_concurrency == found.kv_tokens / 8192


def test_parts_of_a_sparse_model() -> None:
    weights = on(H200, "qwen3-30b-a3b").weights
    assert weights["experts"] == 48 * 128 * 3 * 2048 * 768 * 2
    assert weights["router"] == 48 * 128 * 2048 * 2
    assert weights["attention"] == 48 * (2 * 2048 * (4096 + 512) + 256) * 2
    assert (weights["dense"], weights["extra"]) == (0, 0)


def test_kv_heads_are_copied_where_ranks_outnumber_them() -> None:
    attention = find_model("qwen3-235b-a22b").groups[0].mixer  # 4 KV heads
    assert [attention.cache_share(tp) for tp in (1, 2, 4, 8)] == [1, 0.5, 0.25, 0.25]
    assert rank_shares(attention, 8) == {"heads": 1 / 8, "kv_heads": 1 / 4, "width": 1 / 8, "whole": 1}
    latent = find_model("deepseek-v3").groups[0].mixer
    assert latent.cache_share(8) == 1
    assert total(latent.parameters, split="whole") > 0


def test_latents_are_copied_by_tensor_parallelism_and_dealt_out_by_data_parallel_attention() -> None:
    split = on(H200, "deepseek-v3", Parallel(tp=8), engine="vllm")
    dealt = on(H200, "deepseek-v3", Parallel(dp=8, ep=True, dp_attention=True), engine="vllm")
    assert split.kv_bytes_per_token == dealt.kv_bytes_per_token == 61 * 576 * 2
    assert 8 * dealt.kv_tokens > 3 * split.kv_tokens  # each rank caches its own requests alone
    assert dealt.weights["experts"] == pytest.approx(split.weights["experts"], rel=1e-6)
    assert dealt.weights["attention"] > 5 * split.weights["attention"]


def test_experts_whole_or_in_slices_weigh_the_same_where_they_divide() -> None:
    shape = find_model("qwen3-30b-a3b")
    sliced, whole = (mapped(shape, H200, Parallel(tp=8, ep=ep)).weights["experts"] for ep in (False, True))
    assert sliced == whole
    (group,) = shape.groups
    one = 3 * 2048 * 768 * 2
    for chip in (H200, None):
        assert layer_bytes(shape, group, Parallel(tp=8, ep=True), "bf16", chip)["experts"] == 16 * one
        assert layer_bytes(shape, group, Parallel(tp=6, ep=True), "bf16", chip)["experts"] == 22 * one


def test_replicas_share_nothing() -> None:
    assert on(H200, "llama-3.1-8b", Parallel(dp=8)) == on(H200, "llama-3.1-8b")


def test_pipelines_split_layers_and_their_cache() -> None:
    whole, halves = on(H200, "llama-3.1-70b"), on(H200, "llama-3.1-70b", Parallel(pp=2))
    assert not whole.fits
    assert halves.fits
    layers = 80  # the first stage has one more: the head reads as many weights as a layer and a quarter
    assert halves.kv_bytes_per_token == whole.kv_bytes_per_token * 41 // layers
    assert halves.weights["dense"] == whole.weights["dense"] * 41 // layers
    assert (halves.weights["embedding"], halves.weights["head"]) == (whole.weights["embedding"], 0)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "GptOssForCausalLM", "YoutuForCausalLM", "Qwen3_5ForCausalLM"]
)
def test_weights_of_a_stage_are_those_of_the_layers_that_are_built(architecture: str, tp: int) -> None:
    """To the byte, and the map is that of the stage whose cache holds least."""
    config = tiny_config(architecture, next(iter(VARIANTS[architecture].values()))).to_dict()
    config["architectures"] = [architecture]
    built, shape = ModelConfig.from_dict(config), shape_of(config, "tiny")
    spec = describe(built)
    partition = divide_layers(spec.layers, spec.vocab_size * spec.hidden_size, 2)
    whole, held = make_context(built, Mesh(Group(0, tp)), torch.bfloat16), []
    for stage in (Stage(0, partition), Stage(1, partition)):
        groups = cache_layout(spec, tp, 2, 16, stage).group_of
        model = build_model(
            built, dataclasses.replace(whole, specs=whole.specs[stage.layers], stage=stage, groups=groups)
        )
        layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
        for layer in layers:
            layer.create_weights(torch.device("meta"))
        held.append(sum(map(weight_bytes, layers)))
    assert mapped(shape, H200, Parallel(tp=tp, pp=2)).weight_bytes in held
    small = dataclasses.replace(H200, memory_bytes=2 * GIB)
    assert mapped(shape, small, Parallel(tp=tp, pp=2)).weight_bytes in held


def test_formats() -> None:
    plain = on(H200, "llama-3.1-8b")
    for weight_format, share in {"fp8": 1 / 2, "int8": 1 / 2, "mxfp4": 4.25 / 16, "int4": 4.25 / 16}.items():
        found = on(H200, "llama-3.1-8b", weight_format=weight_format)
        assert found.weights["dense"] == pytest.approx(plain.weights["dense"] * share, rel=2e-3)
        assert [found.weights[part] for part in ("embedding", "head", "norms")] == [
            plain.weights[part] for part in ("embedding", "head", "norms")
        ]
    halved = on(H200, "llama-3.1-8b", kv_dtype_bytes=1.0)
    assert halved.kv_bytes_per_token == plain.kv_bytes_per_token / 2
    lost = UNPACKED_BYTES // halved.kv_bytes_per_token
    assert halved.kv_tokens == pytest.approx(2 * plain.kv_tokens - lost, abs=32)
    halved, plain = (on(CHIPS["l40s"], "llama-3.1-8b", kv_dtype_bytes=size) for size in (1.0, 2.0))
    assert halved.tables < plain.tables  # it has no kernel that unpacks


def test_what_a_chip_cannot_multiply_is_widened_by_headrace() -> None:
    """fp8 on a GPU without its units, and everything on a CPU; blocks of experts stay, in tiles."""
    a100, cpu = CHIPS["a100"], CHIPS["cpu"]
    plain = on(H200, "llama-3.1-8b").weights["dense"]
    assert on(a100, "llama-3.1-8b", weight_format="fp8").weights["dense"] == plain
    assert on(a100, "llama-3.1-8b", weight_format="fp8", engine="vllm").weights["dense"] < 0.51 * plain
    for weight_format in ("fp8", "int8", "mxfp4", "int4"):
        assert on(cpu, "llama-3.1-8b", weight_format=weight_format).weights["dense"] == plain
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    shape = shape_of({**catalogue()["qwen3-30b-a3b"].config, "quantization_config": blocks}, "blocks")
    there, here = mapped(shape, a100, ONE).weights, mapped(shape, H200, ONE).weights
    assert there["experts"] == here["experts"]
    assert there["attention"] > 1.9 * here["attention"]


def test_experts_are_rounded_too_and_the_router_is_not() -> None:
    plain, rounded = on(H200, "qwen3-30b-a3b").weights, on(H200, "qwen3-30b-a3b", weight_format="fp8").weights
    scales = 4 * 48 * 128 * (2 * 768 + 2048)  # one an output
    assert rounded["experts"] == plain["experts"] / 2 + scales
    assert rounded["router"] == plain["router"]


def test_what_windows_have_passed_goes_back() -> None:
    """gpt-oss-120b: 36 layers, of which 18 see 128 keys, which lie in 9 blocks of 16 at worst."""
    found = on(MI300X, "gpt-oss-120b", max_model_len=131072)
    assert found.kv_bytes_per_token == 36 * 2 * 8 * 64 * 2
    assert found.layout.sequence_bytes(8192) == (18 * 8192 + 18 * 9 * 16) * 2 * 8 * 64 * 2
    assert found.layout.sequence_bytes(96) == 96 * found.kv_bytes_per_token
    assert found.kv_tokens == found.tokens_in(131072) == pytest.approx(1.99 * found.tokens_in(96), rel=0.01)


def test_what_does_not_fit_says_by_how_much() -> None:
    found = on(H100, "llama-3.1-70b", max_model_len=16)
    assert not found.fits
    assert (found.kv_pool, found.kv_tokens) == (0, 0)
    over = found.weight_bytes + found.tables + found.activations + found.graphs + found.reserve - found.usable
    assert found.missing == over + 16 * found.kv_bytes_per_token
    tight = on(H200, "llama-3.1-8b", max_model_len=131072, max_num_seqs=8, gpu_memory_utilization=0.2)
    assert 0 < tight.kv_pool < 131072 * tight.kv_bytes_per_token
    assert tight.missing == 131072 * tight.kv_bytes_per_token - tight.kv_pool


def test_speculation_loads_the_layer_for_further_tokens() -> None:
    without, beside = (on(H200, "deepseek-v3", Parallel(tp=8), speculates=yes) for yes in (False, True))
    assert without.weights["extra"] == 0
    assert beside.weights["extra"] / GIB == pytest.approx(11.6e9 / 8 / GIB, rel=0.01)


def test_a_cpu_caches_less_and_has_no_graphs() -> None:
    found = mapped(find_model("demo"), CHIPS["cpu"], ONE, max_num_seqs=64, max_num_batched_tokens=2048)
    assert (found.kv_pool, found.graphs) == (4 * GIB, 0)
    assert found.fits


def test_maps_of_every_model_take_no_time(tmp_path: Path) -> None:
    for name in catalogue():
        found = on(CHIPS["mi355x"], name, Parallel(tp=8), engine="vllm")
        assert found.fits, name
        assert json.dumps(dataclasses.asdict(found))


SHAPES = st.sampled_from(sorted(catalogue())).map(find_model)
SPREADS = st.builds(
    Parallel,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2]),
    ep=st.booleans(),
    dp_attention=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(
    SHAPES,
    st.sampled_from([CHIPS[name] for name in CHIPS if name != "cpu"]),
    SPREADS,
    st.sampled_from(["bf16", "fp8", "mxfp4", "int4"]),
    st.sampled_from(["headrace", "vllm"]),
    st.integers(64, 131072),
)
def test_whatever_is_asked_the_map_is_consistent(
    shape: ModelShape, chip: Any, parallel: Parallel, weight_format: str, engine: str, length: int
) -> None:
    def find(**changes: Any) -> MemoryMap:
        wanted = {"weight_format": weight_format, "engine": engine, "max_model_len": length, **changes}
        return mapped(shape, chip, wanted.pop("parallel", parallel), **wanted)

    found = find()
    assert all(size >= 0 for size in (*found.weights.values(), found.tables, found.activations, found.graphs))
    if found.fits:
        assert found.kv_tokens >= length
        assert sum(found.parts().values()) == found.usable
    else:
        assert found.missing > 0
    assert find(gpu_memory_utilization=0.95).kv_tokens >= found.kv_tokens
    # states in pages of their own leave more of a page unused where blocks are small
    loss = 0.95 if any(layer.mixer.kind == "state" for layer in shape.spec.layers) else 1.0
    assert find(kv_dtype_bytes=1.0).kv_tokens >= loss * found.kv_tokens
    assert find(max_num_batched_tokens=16384).kv_pool <= found.kv_pool
    wider = find(parallel=dataclasses.replace(parallel, tp=2 * parallel.tp))
    assert wider.weight_bytes <= found.weight_bytes
