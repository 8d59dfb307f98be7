"""Lists the model families: the description and the class that serve each architecture.

A family is one entry of `MODELS`. Planner, server and command line read this table too, so it imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from headrace.errors import UnsupportedModelError
from headrace.models import dense_families as families
from headrace.models import (
    descriptions,
    expert_families,
    gpt_families,
    hybrid_families,
    latent_families,
    scaled_families,
    text_encoders,
    text_parts,
)
from headrace.models import gemma_families as gemmas
from headrace.models.descriptions import Describe
from headrace.models.encoders import gemma3_vision
from headrace.models.entry import ModelEntry
from headrace.models.poolers import BARE, CAUSAL, CLASSIFIER

LLAMA = ("headrace.models.llama", "LlamaForCausalLM")
"""Module and class of the families shaped like Llama"""
PLAIN_BIASES: dict[str, Any] = {"qkv_bias": False, "o_bias": False, "mlp_bias": False}
QWEN2_BIASES: dict[str, Any] = {**PLAIN_BIASES, "qkv_bias": True}
KV_HEADS, PER_TOKEN, WIDTH = "num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size"
"""Fields that several families need"""


def _llama(architecture: str, *needs: str, **quirks: Any) -> ModelEntry:
    """Return the entry of a family that models/llama.py serves."""
    return ModelEntry(architecture, partial(descriptions.llama, **quirks), *LLAMA, needs)


MISTRAL: Describe = partial(descriptions.llama, windows=descriptions.same_window, **PLAIN_BIASES)
MISTRALS: dict[str, Describe] = {
    "mistral": MISTRAL,
    "ministral3": partial(descriptions.llama, windows=descriptions.raw_window, **PLAIN_BIASES),
}
MISTRAL3 = text_parts.text_part_of({**MISTRALS, "mistral4": latent_families.mistral_large3})
QWEN2: Describe = partial(descriptions.llama, windows=descriptions.upper_window, **QWEN2_BIASES)
QWEN3: Describe = partial(descriptions.llama, windows=descriptions.upper_window, mlp_bias=False, qk_norm="head")
OF_VICUNA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAVA: dict[str, Describe] = {"llama": descriptions.llama, "qwen2": QWEN2, **MISTRALS}
INTERNVL: dict[str, Describe] = {"qwen2": QWEN2, "qwen3": QWEN3, "llama": descriptions.llama, **MISTRALS}
TIED = {"tie_word_embeddings": True}
HELIUM = partial(families.interleaved, theta=100000.0, eps=1e-8, bias="attention_bias", o_bias=False, rounds_once=True)
ERNIE = partial(families.interleaved, theta=500000.0, eps=1e-5, bias="use_bias", o_bias=True)

GLM_VISION = text_parts.text_part_of({"glm4v_text": families.glm4, "glm4v_moe_text": expert_families.glm4_moe})
GEMMA3_VISION = text_parts.text_part_of({"gemma3_text": gemmas.gemma3}, gemma3_vision)

QWEN_EXPERTS = descriptions.qwen_experts_and_shared
QWEN3_NEXT: Describe = partial(hybrid_families.qwen_hybrid, by_key_head=True, feed_forwards=QWEN_EXPERTS)
QWEN3_5: Describe = partial(hybrid_families.qwen_hybrid, by_key_head=False)
QWEN3_5_MOE: Describe = partial(hybrid_families.qwen_hybrid, by_key_head=False, feed_forwards=QWEN_EXPERTS)
DELTA = (KV_HEADS, "head_dim", "linear_num_key_heads", "linear_num_value_heads")
OF_DELTA = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "norm_topk_prob": True,
}

GRANITE_MOE_SWA: Describe = partial(scaled_families.granite_swa, sparse=True)
EXAONE_MOE = {"moe_intermediate_size": 1024, "routed_scaling_factor": 2.5}
COHERE_MOE = {**TIED, "head_dim": 128}
OF_LLAMA4 = {PER_TOKEN: 1, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
LLAMA4 = (expert_families.llama4, *LLAMA, (KV_HEADS, "head_dim"), OF_LLAMA4, expert_families.CHUNKS)
INDEXED = ("indexed_attention", "deepseek_sparse_attention")

MODELS = (
    _llama("LlamaForCausalLM"),
    ModelEntry("MistralForCausalLM", MISTRAL, *LLAMA, (KV_HEADS,)),
    ModelEntry("Qwen2ForCausalLM", QWEN2, *LLAMA, (KV_HEADS,)),
    ModelEntry("Qwen3ForCausalLM", QWEN3, *LLAMA, (KV_HEADS, "head_dim")),
    ModelEntry("MiMoForCausalLM", partial(families.with_mimo_head, QWEN2), *LLAMA, (KV_HEADS,)),
    _llama(
        "MixtralForCausalLM", KV_HEADS, "num_local_experts", PER_TOKEN, windows=descriptions.raw_window,
        feed_forwards=descriptions.mixtral_experts, **PLAIN_BIASES,
    ),
    _llama(
        "Qwen2MoeForCausalLM", KV_HEADS, PER_TOKEN, WIDTH, "shared_expert_intermediate_size",
        windows=descriptions.alternate_window, feed_forwards=descriptions.qwen_experts_and_shared, **QWEN2_BIASES,
    ),
    _llama(
        "Qwen3MoeForCausalLM", KV_HEADS, PER_TOKEN, WIDTH, windows=descriptions.switched_window,
        feed_forwards=descriptions.qwen_experts, mlp_bias=False, qk_norm="head",
    ),
    ModelEntry("Qwen3NextForCausalLM", QWEN3_NEXT, *LLAMA, DELTA, OF_DELTA, hybrid_families.KINDS),
    ModelEntry("Qwen3_5ForCausalLM", QWEN3_5, *LLAMA, DELTA, OF_DELTA, hybrid_families.KINDS),
    ModelEntry("Qwen3_5ForConditionalGeneration", QWEN3_5, *LLAMA, DELTA, OF_DELTA, hybrid_families.KINDS),
    ModelEntry("Qwen3_5MoeForCausalLM", QWEN3_5_MOE, *LLAMA, DELTA, OF_DELTA, hybrid_families.KINDS),
    ModelEntry("Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE, *LLAMA, DELTA, OF_DELTA, hybrid_families.KINDS),
    ModelEntry(
        "GptOssForCausalLM", descriptions.gpt_oss, *LLAMA,
        needs=(KV_HEADS, "head_dim", "num_local_experts", PER_TOKEN, "rms_norm_eps"),
    ),
    ModelEntry("GemmaForCausalLM", gemmas.gemma, *LLAMA, defaults=gemmas.GEMMA1),
    ModelEntry("Gemma2ForCausalLM", gemmas.gemma2, *LLAMA, defaults=gemmas.GEMMA_DEFAULTS),
    ModelEntry("Gemma3ForCausalLM", gemmas.gemma3, *LLAMA, defaults=gemmas.GEMMA3),
    ModelEntry("Gemma3ForConditionalGeneration", GEMMA3_VISION, *LLAMA, defaults=gemmas.GEMMA3),
    ModelEntry("Gemma4ForCausalLM", gemmas.gemma4, *LLAMA, (KV_HEADS,), gemmas.GEMMA4),
    ModelEntry("Gemma4ForConditionalGeneration", gemmas.gemma4, *LLAMA, (KV_HEADS,), gemmas.GEMMA4),
    ModelEntry("Gemma4UnifiedForCausalLM", gemmas.gemma4, *LLAMA, (KV_HEADS,), gemmas.GEMMA4_UNIFIED),
    ModelEntry("Gemma4UnifiedForConditionalGeneration", gemmas.gemma4, *LLAMA, (KV_HEADS,), gemmas.GEMMA4_UNIFIED),
    ModelEntry("Mistral3ForConditionalGeneration", MISTRAL3, *LLAMA, (KV_HEADS,)),
    ModelEntry("Qwen2VLForConditionalGeneration", QWEN2, *LLAMA, (KV_HEADS,)),
    ModelEntry("Qwen2_5_VLForConditionalGeneration", QWEN2, *LLAMA, (KV_HEADS,)),
    ModelEntry("Qwen3VLForConditionalGeneration", text_parts.qwen3_vl, *LLAMA, (KV_HEADS, "head_dim")),
    ModelEntry("InternVLForConditionalGeneration", text_parts.text_part_of(INTERNVL), *LLAMA, (KV_HEADS,)),
    ModelEntry("LlavaForConditionalGeneration", text_parts.text_part_of(LLAVA), *LLAMA, defaults=OF_VICUNA),
    ModelEntry("LlavaNextForConditionalGeneration", text_parts.text_part_of(LLAVA), *LLAMA, defaults=OF_VICUNA),
    ModelEntry("LlavaNextVideoForConditionalGeneration", text_parts.text_part_of(LLAVA), *LLAMA, defaults=OF_VICUNA),
    ModelEntry("LlavaOnevisionForConditionalGeneration", text_parts.text_part_of(INTERNVL), *LLAMA, (KV_HEADS,)),
    ModelEntry("VipLlavaForConditionalGeneration", text_parts.text_part_of(LLAVA), *LLAMA, defaults=OF_VICUNA),
    ModelEntry("Idefics3ForConditionalGeneration", text_parts.text_part_of(LLAVA), *LLAMA, (KV_HEADS,)),
    ModelEntry("SmolVLMForConditionalGeneration", text_parts.text_part_of(LLAVA), *LLAMA, (KV_HEADS,)),
    ModelEntry("Exaone4_5_ForConditionalGeneration", families.exaone4, *LLAMA, (KV_HEADS,)),
    ModelEntry("Glm46VForConditionalGeneration", GLM_VISION, *LLAMA, (KV_HEADS,)),
    ModelEntry("Glm4vForConditionalGeneration", families.glm4, *LLAMA, (KV_HEADS,)),
    ModelEntry("Glm4vMoeForConditionalGeneration", expert_families.glm4_moe, *LLAMA, (KV_HEADS,)),
    ModelEntry("CohereForCausalLM", families.cohere, *LLAMA, defaults=TIED),
    ModelEntry("Cohere2ForCausalLM", families.cohere2, *LLAMA, defaults=TIED),
    ModelEntry("GlmForCausalLM", families.glm, *LLAMA, (KV_HEADS, "head_dim")),
    ModelEntry("Glm4ForCausalLM", families.glm4, *LLAMA, (KV_HEADS, "head_dim")),
    ModelEntry("Phi3ForCausalLM", families.phi3, *LLAMA),
    ModelEntry("PhiForCausalLM", families.phi, *LLAMA),
    ModelEntry("GraniteForCausalLM", scaled_families.granite, *LLAMA),
    ModelEntry("OlmoForCausalLM", families.olmo, *LLAMA),
    ModelEntry("Olmo2ForCausalLM", families.olmo2, *LLAMA),
    ModelEntry("Olmo3ForCausalLM", families.olmo3, *LLAMA),
    _llama("MinistralForCausalLM", KV_HEADS, windows=families.ministral_window, **PLAIN_BIASES),
    ModelEntry("Ministral3ForCausalLM", MISTRALS["ministral3"], *LLAMA, (KV_HEADS,)),
    ModelEntry("SmolLM3ForCausalLM", families.smollm3, *LLAMA, (KV_HEADS,), TIED),
    ModelEntry("Exaone4ForCausalLM", families.exaone4, *LLAMA, (KV_HEADS,)),
    ModelEntry("StableLmForCausalLM", families.stablelm, *LLAMA, (KV_HEADS,)),
    ModelEntry(
        "SeedOssForCausalLM", partial(descriptions.llama, o_bias_field="attention_out_bias"), *LLAMA,
        (KV_HEADS, "head_dim"), {"attention_bias": True},
    ),
    ModelEntry("ArceeForCausalLM", families.arcee, *LLAMA, (KV_HEADS,), {"hidden_act": "relu2", "rms_norm_eps": 1e-5}),
    ModelEntry("ApertusForCausalLM", families.apertus, *LLAMA, (KV_HEADS,), {"hidden_act": "xielu"}),
    ModelEntry("NemotronForCausalLM", families.nemotron, *LLAMA, defaults={"hidden_act": "relu2"}),
    ModelEntry("Starcoder2ForCausalLM", families.starcoder2, *LLAMA, (KV_HEADS,), families.STARCODER2),
    ModelEntry("HeliumForCausalLM", HELIUM, *LLAMA, (KV_HEADS, "head_dim")),
    ModelEntry("Ernie4_5ForCausalLM", ERNIE, *LLAMA, (KV_HEADS, "head_dim"), TIED),
    ModelEntry("Glm4MoeForCausalLM", expert_families.glm4_moe, *LLAMA, (KV_HEADS,)),
    ModelEntry("MiniMaxM2ForCausalLM", expert_families.minimax_m2, *LLAMA, (KV_HEADS,)),
    ModelEntry(
        "Dots1ForCausalLM", expert_families.dots1, *LLAMA, (KV_HEADS, PER_TOKEN, WIDTH), {"norm_topk_prob": False}
    ),
    ModelEntry("Ernie4_5_MoeForCausalLM", expert_families.ernie_moe, *LLAMA, (KV_HEADS,), TIED),
    ModelEntry("GraniteMoeForCausalLM", scaled_families.granite_moe, *LLAMA, (KV_HEADS,)),
    ModelEntry("GraniteMoeSharedForCausalLM", scaled_families.granite_moe, *LLAMA, (KV_HEADS,)),
    ModelEntry(
        "GraniteMoeHybridForCausalLM", scaled_families.granite_hybrid, *LLAMA, (KV_HEADS,),
        layer_kinds=("attention", "full_attention"),
    ),
    ModelEntry(
        "PhimoeForCausalLM", expert_families.phimoe, *LLAMA, (KV_HEADS,),
        {PER_TOKEN: 2, "num_local_experts": 16, "rms_norm_eps": 1e-5},
    ),
    ModelEntry("OlmoeForCausalLM", expert_families.olmoe, *LLAMA),
    ModelEntry(
        "Qwen3VLMoeForConditionalGeneration", text_parts.qwen3_vl_moe, *LLAMA, (KV_HEADS, PER_TOKEN, WIDTH),
        {"norm_topk_prob": True},
    ),
    _llama(
        "CwmForCausalLM", KV_HEADS, "head_dim", windows=families.cwm_window, qkv_bias=False, o_bias=False, theta=1e6,
    ),
    ModelEntry("VaultGemmaForCausalLM", gemmas.vaultgemma, *LLAMA, defaults=gemmas.GEMMA_DEFAULTS),
    ModelEntry("Jais2ForCausalLM", families.jais2, *LLAMA, (KV_HEADS,), {"hidden_act": "relu2"}),
    ModelEntry("HunYuanDenseV1ForCausalLM", families.hunyuan, *LLAMA),
    ModelEntry("HunYuanMoEV1ForCausalLM", expert_families.hunyuan_moe, *LLAMA, ("num_experts", "moe_topk")),
    ModelEntry("BailingMoeV2ForCausalLM", expert_families.bailing_moe2, *LLAMA, (KV_HEADS, PER_TOKEN, WIDTH)),
    ModelEntry("HYV3ForCausalLM", expert_families.hunyuan3, *LLAMA, (KV_HEADS, "num_experts", PER_TOKEN)),
    ModelEntry(
        "SolarOpenForCausalLM", partial(expert_families.glm4_moe, share=1.0, dense_layers=0), *LLAMA,
        (KV_HEADS, "head_dim", PER_TOKEN),
    ),
    ModelEntry("AfmoeForCausalLM", expert_families.afmoe, *LLAMA, (KV_HEADS, "head_dim", PER_TOKEN)),
    ModelEntry("ExaoneMoeForCausalLM", expert_families.exaone_moe, *LLAMA, (KV_HEADS, PER_TOKEN), EXAONE_MOE),
    ModelEntry("MellumForCausalLM", expert_families.mellum, *LLAMA, (KV_HEADS, "head_dim", PER_TOKEN)),
    ModelEntry("Cohere2MoeForCausalLM", expert_families.cohere2_moe, *LLAMA, (PER_TOKEN,), COHERE_MOE),
    ModelEntry("FlexOlmoForCausalLM", expert_families.flex_olmo, *LLAMA, (PER_TOKEN,)),
    ModelEntry("GraniteSWAForCausalLM", scaled_families.granite_swa, *LLAMA, (KV_HEADS,), TIED),
    ModelEntry("GraniteMoeSWAForCausalLM", GRANITE_MOE_SWA, *LLAMA, (KV_HEADS, PER_TOKEN)),
    ModelEntry("GPT2LMHeadModel", gpt_families.gpt2, *LLAMA, defaults=gpt_families.TIED),
    ModelEntry("GPTBigCodeForCausalLM", gpt_families.gpt_bigcode, *LLAMA, defaults=gpt_families.TIED),
    ModelEntry("GPTNeoForCausalLM", gpt_families.gpt_neo, *LLAMA, defaults=gpt_families.TIED),
    ModelEntry("GPTJForCausalLM", gpt_families.gptj, *LLAMA, defaults=gpt_families.GELU_NEW),
    ModelEntry("GPTNeoXForCausalLM", gpt_families.gpt_neox, *LLAMA, defaults={"hidden_act": "gelu"}),
    ModelEntry("OPTForCausalLM", gpt_families.opt, *LLAMA, defaults=gpt_families.OPT),
    ModelEntry("FalconForCausalLM", gpt_families.falcon, *LLAMA, defaults=gpt_families.FALCON),
    ModelEntry("InternLM2ForCausalLM", gpt_families.internlm2, *LLAMA, (KV_HEADS,)),
    ModelEntry("HyperCLOVAXForCausalLM", scaled_families.hyperclovax, *LLAMA),
    ModelEntry("MiniCPMForCausalLM", scaled_families.minicpm, *LLAMA),
    ModelEntry("MiniCPM3ForCausalLM", scaled_families.minicpm3, *LLAMA),
    ModelEntry("AXK1ForCausalLM", latent_families.axk1, *LLAMA, (PER_TOKEN,), {"n_group": 8, "topk_group": 4}),
    ModelEntry("Llama4ForCausalLM", *LLAMA4),
    ModelEntry("Llama4ForConditionalGeneration", *LLAMA4),
    ModelEntry("DeepseekV2ForCausalLM", latent_families.deepseek_v2, *LLAMA, (PER_TOKEN,)),
    ModelEntry("DeepseekV3ForCausalLM", latent_families.deepseek_v3, *LLAMA),
    ModelEntry("Glm4MoeLiteForCausalLM", latent_families.glm4_moe_lite, *LLAMA),
    ModelEntry("YoutuForCausalLM", latent_families.youtu, *LLAMA, defaults=TIED),
    ModelEntry("KimiK25ForConditionalGeneration", latent_families.deepseek_v3, *LLAMA),
    ModelEntry("MistralLarge3ForCausalLM", latent_families.mistral_large3, *LLAMA, (PER_TOKEN,)),
    ModelEntry("Mistral4ForCausalLM", latent_families.mistral_large3, *LLAMA, (PER_TOKEN,)),
    ModelEntry("DeepseekV32ForCausalLM", latent_families.deepseek_v32, *LLAMA, (PER_TOKEN,), layer_kinds=INDEXED),
    ModelEntry(
        "GlmMoeDsaForCausalLM", partial(latent_families.deepseek_v32, interleaved=True), *LLAMA, (PER_TOKEN,),
        layer_kinds=INDEXED,
    ),
)  # fmt: skip

ENCODERS = (
    ModelEntry(
        "BertModel", text_encoders.bert, *LLAMA, has_head=False, pools_by="cls", segments=True,
        classifier=text_encoders.bert_classifier,
    ),
    *(
        ModelEntry(
            name, text_encoders.roberta, *LLAMA, has_head=False, pools_by="cls",
            classifier=text_encoders.roberta_classifier, taken_positions=text_encoders.taken_positions,
        )
        for name in ("RobertaModel", "XLMRobertaModel", "CamembertModel")
    ),
    ModelEntry(
        "ModernBertModel", text_encoders.modern_bert, *LLAMA, has_head=False, pools_by="cls",
        classifier=text_encoders.modern_classifier,
    ),
)  # fmt: skip
"""Families whose tokens see all others, so that they never generate"""
DESCRIBED = {entry.architecture: entry for entry in MODELS}
ON_TOP = (CLASSIFIER, "ForMaskedLM")
"""How architectures of encoders with a head end"""
SERVED = {name: entry for name, entry in DESCRIBED.items() if entry.module}
OWN_NAMES = {"PhiMoEForCausalLM": "PhimoeForCausalLM", "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM"}
"""Architectures as published files name them, after code older than transformers' -> as transformers does"""
PLUGINS = "headrace.models"
"""Group of entry points with which an installed package adds families: architecture -> its ModelEntry"""


def find_entry(architecture: str) -> ModelEntry | None:
    """Return the entry of an architecture, ours or an installed package's; None: there is none. A decoder that is bare,
    or has a head that classifies, is that of the family that generates. Raises UnsupportedModelError for one that
    cannot be imported."""
    if architecture in DESCRIBED:
        return DESCRIBED[architecture]
    if architecture in OWN_NAMES:
        return replace(DESCRIBED[OWN_NAMES[architecture]], architecture=architecture)
    for encoder in ENCODERS:
        if architecture in (encoder.architecture, *(encoder.architecture.removesuffix(BARE) + end for end in ON_TOP)):
            return replace(encoder, architecture=architecture)
    for end in (CLASSIFIER, BARE):
        family = architecture.removesuffix(end)
        generating = DESCRIBED.get(f"{family}{CAUSAL}") or DESCRIBED.get(f"{family.removesuffix('Text')}{CAUSAL}")
        if family != architecture and generating is not None:
            return replace(generating, architecture=architecture, has_head=False)
    for plugin in entry_points(group=PLUGINS, name=architecture):
        try:
            entry: ModelEntry = plugin.load()
        except (ImportError, AttributeError) as error:
            raise UnsupportedModelError(
                f"architecture {architecture!r:.80}: {plugin.value} of entry point {PLUGINS} cannot be loaded: {error}"
            ) from None
        return entry
    return None


def served_entry(architecture: str) -> ModelEntry | None:
    """Return the entry of an architecture if it has modules; else None."""
    entry = find_entry(architecture)
    return entry if entry is not None and entry.module else None
