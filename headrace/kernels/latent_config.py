"""Plans how attention over latents is launched (latent.py, latent_prompt.py): which tokens are served in which form,
and tile sizes, warps, stages and splits by shape and device family.

Imports no torch. Tests compile what the tables say ahead of time for GPUs that are not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from headrace.kernels.attention_config import MAX_SPLITS, AttentionConfig

ABSORBED: dict[tuple[str, int, int], AttentionConfig] = {
    # (family, bytes of an element of the cache, rows of a tile): registers hold sums as wide as the latent for each row
    ("cuda", 1, 16): AttentionConfig(16, 32, 8, 2),
    ("cuda", 2, 16): AttentionConfig(16, 64, 4, 2),
    ("cuda", 2, 32): AttentionConfig(32, 64, 4, 2),
    ("cuda", 2, 64): AttentionConfig(64, 64, 8, 2),
    ("cuda", 4, 16): AttentionConfig(16, 16, 8, 1),
    ("hip", 1, 16): AttentionConfig(16, 16, 4, 1),
    ("hip", 2, 16): AttentionConfig(16, 32, 4, 1),
    ("hip", 4, 16): AttentionConfig(16, 16, 4, 1),
}
RESIDENT = {16: 2, 32: 2, 64: 1}
"""rows of a tile -> programs wanted for each multiprocessor: as many as are resident at once"""


WIDE_HEAD = 128
"""numbers of a head's unrotated key or of its value, beyond which tiles are smaller (GLM has 192 and 256)"""
EXPANDED: dict[tuple[str, int, bool], AttentionConfig] = {
    # (family, bytes of an element of queries, wide heads): tiles of queries of one head
    ("cuda", 2, False): AttentionConfig(128, 64, 8, 3),
    ("cuda", 2, True): AttentionConfig(128, 32, 8, 2),
    ("cuda", 4, False): AttentionConfig(16, 32, 8, 1),
    ("cuda", 4, True): AttentionConfig(16, 16, 8, 1),
    ("hip", 2, False): AttentionConfig(64, 32, 4, 1),
    ("hip", 2, True): AttentionConfig(64, 32, 4, 1),
    ("hip", 4, False): AttentionConfig(32, 32, 4, 1),
    ("hip", 4, True): AttentionConfig(16, 32, 4, 1),
}
EXPANDED_BYTES = 128 << 20
"""of the memory into which keys and values of heads are projected, allocated once"""
MOST_SCORES = 1 << 25
"""scores of an index that are held at once; queries of a step that have more are served one part after the other"""
SELECTED = 4096
"""scores of a chunk of those among which the highest are looked for"""
SELECTING_NUMBERS = 2 * 256 / SELECTED
"""numbers that are kept for each score meanwhile: each chunk's counts of a byte's values, twice"""


@dataclass(frozen=True)
class LatentSizes:
    """Holds the sizes of a layer of latent attention on one rank."""

    num_heads: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    latent_dim: int

    @property
    def expanded(self) -> int:
        """Numbers for a key in memory: its row of the cache, and keys and values of all heads."""
        return self.rope_dim + self.latent_dim + self.num_heads * (self.nope_dim + self.v_head_dim)

    def expands(self, tokens: int, prompts: int, keys: int) -> bool:
        """Tell whether prompts of `tokens` new tokens in all and `keys` known ones cost fewer operations with each
        head's own keys and values."""
        pairs = tokens * max(1.0, (keys - tokens / 2) / prompts)
        projection = self.latent_dim * (self.nope_dim + self.v_head_dim)
        absorbed = pairs * (2 * self.latent_dim + self.rope_dim) + tokens * projection
        return pairs * (self.nope_dim + self.rope_dim + self.v_head_dim) + keys * projection < absorbed


@dataclass(frozen=True)
class ExpandedLaunch:
    """Describes launches over each head's own keys and values."""

    config: AttentionConfig
    tiles: int
    """an upper bound of the tiles of queries"""
    keys: int
    """an upper bound of the keys of all prompts"""
    piece: int
    """keys that are projected at once"""


@dataclass(frozen=True)
class LatentLaunch:
    """Describes a launch of the absorbed form."""

    config: AttentionConfig
    group: int
    """heads of a program"""
    tiles: int
    """an upper bound of the tiles of queries; of decodes, their number"""
    splits: int
    decode: bool
    """each of the requests runs one token"""


@dataclass(frozen=True)
class LatentPlan:
    """Describes a step's launches of attention over latents, which are the same for all layers of a shape."""

    num_decodes: int
    """requests at the front of the batch that run one token each"""
    decode: LatentLaunch | None
    """theirs"""
    chunk: LatentLaunch | None
    """that of the requests behind them, in the absorbed form"""
    expanded: ExpandedLaunch | None = None
    """the same with each head's own keys and values"""


def pick_launch(
    tokens: int, requests: int, longest: int, num_heads: int, element_size: int, family: str, num_sms: int,
    decode: bool, one_query: bool,
) -> LatentLaunch:  # fmt: skip
    """Return the launch for `requests` of `tokens` in all, `longest` keys at most; `one_query`: in a tile."""
    sizes = sorted(rows for *key, rows in ABSORBED if key == [family, element_size])
    most = sizes[-1]
    blocks = -(-num_heads // most)
    group = -(-num_heads // blocks)
    wanted = group if decode or one_query else max(group, min(most, group * -(-tokens // requests)))
    rows = next(rows for rows in sizes if wanted <= rows)
    config = ABSORBED[family, element_size, rows]
    tiles = requests if decode else tokens // (1 if one_query else config.block_m // group) + requests
    useful = -(-longest // config.block_n)
    splits = max(1, min(RESIDENT[rows] * num_sms // (tiles * blocks), useful, MAX_SPLITS))
    return LatentLaunch(config, group, tiles, splits, decode)


def expanded_launch(
    tokens: int, prompts: int, keys: int, sizes: LatentSizes, width: int, family: str
) -> ExpandedLaunch:  # fmt: skip
    """Return the launches for prompts of `tokens` new tokens in all and at most `keys` known ones, whatever they
    cost."""
    config = EXPANDED[family, width, max(sizes.nope_dim, sizes.v_head_dim) > WIDE_HEAD]
    piece = EXPANDED_BYTES // width // sizes.expanded // 64 * 64
    return ExpandedLaunch(config, tokens // config.block_m + prompts, keys, piece)


@lru_cache(maxsize=1024)
def plan_latent(
    num_reqs: int, num_tokens: int, num_decodes: int, max_seq_len: int, prompt_keys: int, sizes: LatentSizes,
    element_size: int, width: int, family: str, num_sms: int, num_chosen: int | None = None,
) -> LatentPlan:  # fmt: skip
    """Return the launches for a step of these sizes. `max_seq_len` is an upper bound, which for a graph holds for all
    later steps; so is `prompt_keys`, of the keys of all requests behind the decodes, and 0 if none is known.
    `element_size` is that of the cache, `width` that of queries, `num_chosen` how many keys are listed for each
    query."""
    num_heads = sizes.num_heads
    longest = max_seq_len if num_chosen is None else min(num_chosen, max_seq_len)
    decode = chunk = None
    if num_decodes:
        decode = pick_launch(
            num_decodes, num_decodes, longest, num_heads, element_size, family, num_sms, True, num_chosen is not None
        )
    tokens, prompts = num_tokens - num_decodes, num_reqs - num_decodes
    if prompts and prompt_keys and num_chosen is None and sizes.expands(tokens, prompts, prompt_keys):
        return LatentPlan(
            num_decodes, decode, None, expanded_launch(tokens, prompts, prompt_keys, sizes, width, family)
        )
    if prompts:
        chunk = pick_launch(
            tokens, prompts, longest, num_heads, element_size, family, num_sms, False, num_chosen is not None
        )
    return LatentPlan(num_decodes, decode, chunk)
