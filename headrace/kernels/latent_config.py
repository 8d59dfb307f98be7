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
    ("cuda", 2, 16): AttentionConfig(16, 32, 4, 3),
    ("cuda", 2, 32): AttentionConfig(32, 32, 8, 3),
    ("cuda", 4, 16): AttentionConfig(16, 16, 8, 1),
    ("hip", 1, 16): AttentionConfig(16, 16, 4, 1),
    ("hip", 2, 16): AttentionConfig(16, 32, 4, 1),
    ("hip", 4, 16): AttentionConfig(16, 16, 4, 1),
}
RESIDENT = {16: 2, 32: 1}
"""rows of a tile -> programs wanted for each multiprocessor: as many as are resident at once"""


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
    """that of the requests behind them"""


def pick_launch(
    tokens: int, requests: int, longest: int, num_heads: int, element_size: int, family: str, num_sms: int,
    decode: bool, one_query: bool,
) -> LatentLaunch:  # fmt: skip
    """Return the launch for `requests` of `tokens` in all, `longest` keys at most; `one_query`: in a tile."""
    most = max(rows for *key, rows in ABSORBED if key == [family, element_size])
    blocks = -(-num_heads // most)
    group = -(-num_heads // blocks)
    wanted = group if decode or one_query else max(group, min(most, group * -(-tokens // requests)))
    rows = 16 if wanted <= 16 else most
    config = ABSORBED[family, element_size, rows]
    tiles = requests if decode else tokens // (1 if one_query else config.block_m // group) + requests
    useful = -(-longest // config.block_n)
    splits = max(1, min(RESIDENT[rows] * num_sms // (tiles * blocks), useful, MAX_SPLITS))
    return LatentLaunch(config, group, tiles, splits, decode)


@lru_cache(maxsize=1024)
def plan_latent(
    num_reqs: int, num_tokens: int, num_decodes: int, max_seq_len: int, num_heads: int, element_size: int, family: str,
    num_sms: int, num_chosen: int | None = None,
) -> LatentPlan:  # fmt: skip
    """Return the launches for a step of these sizes. `max_seq_len` is an upper bound, which for a graph holds for all
    later steps. `element_size` is that of the cache, `num_chosen` how many keys are listed for each query."""
    longest = max_seq_len if num_chosen is None else min(num_chosen, max_seq_len)
    decode = chunk = None
    if num_decodes:
        decode = pick_launch(
            num_decodes, num_decodes, longest, num_heads, element_size, family, num_sms, True, num_chosen is not None
        )
    if num_reqs > num_decodes:
        chunk = pick_launch(
            num_tokens - num_decodes, num_reqs - num_decodes, longest, num_heads, element_size, family, num_sms, False,
            num_chosen is not None,
        )  # fmt: skip
    return LatentPlan(num_decodes, decode, chunk)
