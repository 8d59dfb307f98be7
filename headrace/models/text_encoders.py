"""Describes encoders of text, in which each token sees all others: BERT, RoBERTa, XLM-RoBERTa and ModernBERT.

It imports no torch.
"""

from __future__ import annotations

from headrace.layer_parts import Norm, Norms, TextEmbedding
from headrace.model_config import Fields, num_layers
from headrace.models.dense_families import rope_of_type
from headrace.models.descriptions import Described, LayerSpec, attention, dense, layer_types
from headrace.pooling import HeadLayer

OF_LAYER = (
    ("LayerNorm.gamma", "LayerNorm.weight"),
    ("LayerNorm.beta", "LayerNorm.bias"),
    ("encoder.layer.", "layers."),
    ("attention.self.query.", "self_attn.q_proj."),
    ("attention.self.key.", "self_attn.k_proj."),
    ("attention.self.value.", "self_attn.v_proj."),
    ("attention.output.dense.", "self_attn.o_proj."),
    ("attention.output.LayerNorm.", "attention_norm."),
    ("intermediate.dense.", "mlp.up_proj."),
    (".output.dense.", ".mlp.down_proj."),
    (".output.LayerNorm.", ".output_norm."),
    ("embeddings.word_embeddings.", "embed_tokens."),
    ("embeddings.position_embeddings.weight", "embeddings.positions"),
    ("embeddings.token_type_embeddings.weight", "embeddings.types"),
    ("embeddings.LayerNorm.", "embeddings.norm."),
)
"""What parts of tensors' names are in BERT's checkpoints, and here"""
BERT_NAMES = (("bert.", ""), *OF_LAYER, ("pooler.dense.", "pooler_dense."))
ROBERTA_NAMES = (
    ("xlm_roberta.", ""), ("roberta.", ""), *OF_LAYER, ("classifier.dense.", "classifier_dense."),
    ("classifier.out_proj.", "classifier_out."),
)  # fmt: skip
MODERN_NAMES = (
    ("model.embeddings.", "embeddings."),
    ("embeddings.tok_embeddings.", "embed_tokens."),
    (".attn.Wqkv.", ".self_attn.qkv_proj."),
    (".attn.Wo.", ".self_attn.o_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    (".mlp.Wi.", ".mlp.gate_up_proj."),
    (".mlp.Wo.", ".mlp.down_proj."),
    ("final_norm.", "norm."),
    ("head.dense.", "head_dense."),
    ("head.norm.", "head_norm."),
)


def bert(c: Fields) -> Described:
    """Describe BERT (arXiv 1810.04805)."""
    return _post_normed(c, 0, BERT_NAMES)


def roberta(c: Fields) -> Described:
    """Describe RoBERTa (arXiv 1907.11692) and XLM-RoBERTa, whose positions begin behind that of padding."""
    return _post_normed(c, taken_positions(c), ROBERTA_NAMES)


def taken_positions(c: Fields) -> int:
    """Return how many of `max_position_embeddings` rows no token of RoBERTa has."""
    return c.integer("pad_token_id", 1, minimum=0) + 1


def _post_normed(c: Fields, first_position: int, names: tuple[tuple[str, str], ...]) -> Described:
    if c.text("position_embedding_type", "absolute") != "absolute":
        raise c.refusal("position_embedding_type", "absolute")
    for name in ("is_decoder", "add_cross_attention"):
        if c.flag(name):
            raise c.refusal(name, "false")
    norm = Norm("layer", c.number("layer_norm_eps", 1e-12, above=0), bias=True)
    mixer = attention(c, rope=None, causal=False, qkv_bias=True, o_bias=True, norm=norm)
    block = dense(c, bias=True, gated=False)
    norms = Norms("", "", "attention_norm", "output_norm", of_sums=True, norm=norm)
    added = TextEmbedding(
        norm, c.integer("max_position_embeddings", 512), first_position, c.integer("type_vocab_size", 2, minimum=0)
    )
    layers = (LayerSpec(mixer, block, norms),) * num_layers(c)
    return Described(layers, norm=norm, ends_normed=True, text_embedding=added, names=names)


def modern_bert(c: Fields) -> Described:
    """Describe ModernBERT (arXiv 2412.13663), with windows in all but every third layer."""
    norm = Norm("layer", c.number("norm_eps", 1e-5, above=0), bias=c.flag("norm_bias"))
    every, bias = c.integer("global_attn_every_n_layers", 3), c.flag("attention_bias")
    usual = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers(c))]
    window = c.integer("local_attention", 128) // 2 + 1  # on each side, the token itself included
    thetas = {
        "full_attention": c.number("global_rope_theta", 160000.0, above=1),
        "sliding_attention": c.number("local_rope_theta", 10000.0, above=1),
    }
    local = thetas["sliding_attention"]
    mixers = {
        kind: attention(
            c, window if kind == "sliding_attention" else None, rope=rope_of_type(c, kind, theta, local),
            causal=False, qkv_bias=bias, o_bias=bias, norm=norm,
        )
        for kind, theta in thetas.items()
    }  # fmt: skip
    block = dense(c, c.flag("mlp_bias"), activation="hidden_activation")
    first = Norms("", norm=norm)  # the embeddings are normed already
    kinds = layer_types(c) or usual
    layers = [LayerSpec(mixers[kind], block, Norms(norm=norm) if i else first) for i, kind in enumerate(kinds)]
    return Described(tuple(layers), norm=norm, text_embedding=TextEmbedding(norm), names=MODERN_NAMES)


def bert_classifier(c: Fields, num_labels: int) -> tuple[HeadLayer, ...]:
    """Describe what follows the first token's state in a BERT that classifies."""
    hidden = c.integer("hidden_size")
    return (
        HeadLayer("pooler_dense", hidden, hidden, True, "tanh"),
        HeadLayer("classifier", hidden, num_labels, True),
    )


def roberta_classifier(c: Fields, num_labels: int) -> tuple[HeadLayer, ...]:
    """Describe the same of RoBERTa."""
    hidden = c.integer("hidden_size")
    return (
        HeadLayer("classifier_dense", hidden, hidden, True, "tanh"),
        HeadLayer("classifier_out", hidden, num_labels, True),
    )


def modern_classifier(c: Fields, num_labels: int) -> tuple[HeadLayer, ...]:
    """Describe the same of ModernBERT, whose head has a norm."""
    hidden = c.integer("hidden_size")
    if c.text("classifier_activation", "gelu") != "gelu":
        raise c.refusal("classifier_activation", "gelu")
    norm = Norm("layer", c.number("norm_eps", 1e-5, above=0), bias=c.flag("norm_bias"))
    return (
        HeadLayer("head_dense", hidden, hidden, c.flag("classifier_bias"), "gelu", norm),
        HeadLayer("classifier", hidden, num_labels, True),
    )
