"""Decides which steps are captured as CUDA graphs, in what order, and what memory the graphs take.

Planner and ranks use the same figures. Nothing here captures, or imports torch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from headrace.config import GRAPH_MODES

MOST_TOKENS = 512
"""Tokens of the largest step with prompts that is captured, unless pieces go further because a layer is small"""
MOST_IN_PIECES = 2048
LAUNCHED = 1.2e11
"""Tokens times weights of a layer above which it takes longer to compute than to launch. (H200: an 8B in bf16 takes 14
ms for both at 600 tokens, Qwen3-30B-A3B 36 ms at 2048; in fp8 a step takes 24 ms to launch, and to compute at 1800
tokens)"""
LAYER_BYTES = 9 << 12
"""Bytes that the driver keeps of a layer in a graph of a whole step, outside the pool (H200, 67 graphs after the first:
28 KiB each of an 8B, 36 of Qwen3-30B-A3B)"""
PIECE_BYTES = 1 << 17
"""The same of one piece of a step (29 sizes after the first of an 8B: 128 KiB a piece, 53 of Qwen3-30B-A3B: 130)"""
WORKSPACE_BYTES = 64 << 20
"""Bytes that the matrix libraries allocate once more, on the stream of the captures"""


def most_in_pieces(layer_weights: float) -> int:
    """Return the tokens of the largest step with prompts that is captured in pieces.

    `layer_weights` is how many weights a token is multiplied with in a layer, on one rank, each counted as its format
    says (`WeightFormat.launched_as`).
    """
    tokens = LAUNCHED / max(1.0, layer_weights)
    return max(MOST_TOKENS, int(min(MOST_IN_PIECES, tokens)) // 64 * 64)


def capture_sizes(largest: int) -> list[int]:
    """Return the sizes worth a graph: 1, 2, 4, then every 8 up to 64, 16 up to 256, 32 up to 512, and 64 above."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, largest + 64, 64)]
    return sorted({min(size, largest) for size in sizes})


@dataclass(frozen=True)
class GraphSettings:
    """Says what is captured and at which sizes: steps of decodes and all other steps, each `none`, `piecewise` or
    `full`."""

    decode: str
    other: str
    decode_sizes: tuple[int, ...]
    """numbers of requests"""
    other_sizes: tuple[int, ...]
    """numbers of tokens"""
    max_num_seqs: int
    max_model_len: int
    alone: str = "full"
    """prompts that run alone, where decodes are captured whole and other steps in pieces: `full` or `none`"""
    decode_lens: tuple[int, ...] = (1,)
    """numbers of tokens that each request of a step of decodes has, drafts included"""

    @staticmethod
    def of(
        compilation_config: dict[str, Any], max_num_seqs: int, max_tokens: int, max_model_len: int,
        most_in_pieces: int = MOST_TOKENS, decode_lens: tuple[int, ...] = (1,),
    ) -> GraphSettings | None:  # fmt: skip
        """Return what a `compilation_config` that the planner has resolved asks for; None: nothing is captured."""
        decode, other = GRAPH_MODES[compilation_config["cudagraph_mode"]]
        if decode == other == "none":
            return None
        sizes = compilation_config.get("cudagraph_capture_sizes")
        most = compilation_config.get("max_cudagraph_capture_size")
        decode_sizes = sizes or capture_sizes(max_num_seqs)
        worthwhile = most_in_pieces if other == "piecewise" else MOST_TOKENS
        other_sizes = sizes or capture_sizes(min(most or worthwhile, max_tokens))
        return GraphSettings(
            decode,
            other,
            tuple(size for size in decode_sizes if size <= min(most or max_num_seqs, max_num_seqs)),
            tuple(size for size in other_sizes if size <= min(most or max_tokens, max_tokens)),
            max_num_seqs,
            max_model_len,
            decode_lens=decode_lens,
        )

    def token_sizes(self, *modes: str) -> set[int]:
        """Return the numbers of tokens of all sizes that are captured in one of `modes`."""
        decode = self._decode_steps if self.decode in modes else ()
        return {*(tokens for _, tokens in decode), *(self.other_sizes if self.other in modes else ())}

    @property
    def _decode_steps(self) -> list[tuple[int, int]]:
        """The (requests, tokens) of all steps of decodes that are captured."""
        return [(size, size * length) for size in self.decode_sizes for length in self.decode_lens]

    @property
    def most_tokens(self) -> int:
        """The tokens of the largest captured step."""
        return max(self.token_sizes("piecewise", "full"), default=0)

    @property
    def alone_sizes(self) -> tuple[int, ...]:
        """The sizes, in tokens, of prompts that are captured whole where they run alone.

        Between pieces the device waits 10 us a layer for the next launch, and for the host where that is slower. (An
        attention backend takes either all steps in graphs or none; one that takes only decodes would be asked here.)
        """
        if (self.decode, self.other, self.alone) != ("full", "piecewise", "full"):
            return ()
        return tuple(size for size in self.other_sizes if 2 < size <= MOST_TOKENS)

    @property
    def num_full(self) -> int:
        """The number of graphs of whole steps, if every size comes up."""
        decode = len(self._decode_steps) + len(self.alone_sizes) if self.decode == "full" else 0
        widths = (self.max_num_seqs + 1).bit_length()  # numbers of requests that a mixed step is padded to
        return decode + (len(self.other_sizes) * widths if self.other == "full" else 0)

    def bytes_beside_pool(self, num_layers: int) -> int:
        """Return what all graphs of a model take outside the pool of memory that they compute in, if every size comes
        up."""
        pieces = len(self.token_sizes("piecewise")) * (num_layers + 1)
        return self.num_full * num_layers * LAYER_BYTES + pieces * PIECE_BYTES + WORKSPACE_BYTES

    @property
    def warmup_sizes(self) -> list[tuple[int, int]]:
        """The (requests, tokens) of a step of each size, those that are likely to come up first before others.

        The next larger number of decodes and the next smaller number of prompt tokens take turns; steps of more than
        MOST_TOKENS prompt tokens come last. But the largest step of all is the first: the memory that its capture takes
        serves the others too, while a capture that is larger than all before it takes memory of its own. If only one
        request can run at a time, pieces (for prompts that continue) are left to be captured as they come up.
        """
        decodes = self._decode_steps if self.decode != "none" else []
        likely = sorted(self.other_sizes, key=lambda size: (size > MOST_TOKENS, -size))
        fewest = [(-(-size // self.max_model_len), size) for size in likely if self.other != "none"]
        alone = set(self.alone_sizes)
        others = []
        for few, size in fewest:
            others += [(max(2, few), size) if size in alone else (few, size)]
            others += [(1, size)] if size in alone and few == 1 else []
        others = [step for step in others if step[0] < step[1] and step[0] <= self.max_num_seqs]
        largest = max([*others, *decodes], key=lambda step: step[1], default=None)
        turns = itertools.zip_longest(decodes, others)
        return ([largest] if largest else []) + [step for turn in turns for step in turn if step and step != largest]
