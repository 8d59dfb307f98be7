"""Which sizes of steps are captured as CUDA graphs, in what order, how many graphs that makes, and what those take. For
the planner too: captures nothing, and knows no torch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from headrace.config import GRAPH_MODES
from headrace.graph_sizes import LAYER_BYTES, MOST_TOKENS, PIECE_BYTES, WORKSPACE_BYTES, capture_sizes


@dataclass(frozen=True)
class GraphSettings:
    """What is captured: `none`, `piecewise` or `full`, for steps of decodes and for all others, and at which sizes."""

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
    decode_len: int = 1
    """tokens of a decode, drafts included"""

    @staticmethod
    def of(
        compilation_config: dict[str, Any], max_num_seqs: int, max_tokens: int, max_model_len: int,
        most_in_pieces: int = MOST_TOKENS,
    ) -> GraphSettings | None:  # fmt: skip
        """`compilation_config` is resolved by the planner. None: nothing is captured."""
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
        )

    @property
    def most_tokens(self) -> int:
        """of a captured step"""
        decode = [size * self.decode_len for size in self.decode_sizes] if self.decode != "none" else ()
        return max((*decode, *(self.other_sizes if self.other != "none" else ())), default=0)

    @property
    def alone_sizes(self) -> tuple[int, ...]:
        """tokens of prompts that are captured whole where they run alone: between pieces the device waits 10 us a layer
        for the next launch, and where the host is slower than a layer, for the host. (An attention backend takes
        either all steps in graphs or none; one that takes decodes alone would be asked here.)"""
        if (self.decode, self.other, self.alone) != ("full", "piecewise", "full"):
            return ()
        return tuple(size for size in self.other_sizes if 2 < size <= MOST_TOKENS)

    @property
    def num_full(self) -> int:
        """graphs of whole steps, if every size comes up"""
        decode = len(self.decode_sizes) + len(self.alone_sizes) if self.decode == "full" else 0
        widths = (self.max_num_seqs + 1).bit_length()  # numbers of requests that a mixed step is padded to
        return decode + (len(self.other_sizes) * widths if self.other == "full" else 0)

    @property
    def num_piecewise(self) -> int:
        """sizes captured in pieces, if every one comes up"""
        return len(self._pieces())

    def bytes_beside(self, num_layers: int) -> int:
        """What all graphs of such a model take beside the pool that they compute in, if every one comes up."""
        pieces = self.num_piecewise * (num_layers + 1)
        return self.num_full * num_layers * LAYER_BYTES + pieces * PIECE_BYTES + WORKSPACE_BYTES

    @property
    def warmup_sizes(self) -> list[tuple[int, int]]:
        """(requests, tokens) of a step of each size, by turns the next larger number of decodes and the next smaller of
        prompt tokens, from what may stand beside decodes, and then the larger ones: what is likely to come up first.
        But the very largest of both is the first of all: the memory that its capture takes holds what the others need,
        while each that is larger than all before it takes its own. Where one request runs at a time pieces are captured
        as they come up: of prompts that go on."""
        decodes = [(size, size * self.decode_len) for size in self.decode_sizes] if self.decode != "none" else []
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

    def _pieces(self) -> set[int]:
        decode = [size * self.decode_len for size in self.decode_sizes] if self.decode == "piecewise" else ()
        return {*decode, *(self.other_sizes if self.other == "piecewise" else ())}
