"""What goes to the experts of other engines and comes back: as many rows of each, its own tokens first."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.distributed.mesh import Group
from headrace.layers.exchange import Exchange


def second_of_two() -> Group:
    """The first brings what the second does, less 100."""
    return Group(1, 2, gather_rows=lambda x: torch.cat((x - 100, x)), scatter_rows=lambda sums: sums.chunk(2)[1])


def test_rows_are_padded_to_those_of_the_largest_step() -> None:
    exchange, x = Exchange(second_of_two(), most_rows=8), torch.arange(1.0, 3)[:, None]
    address, everything = exchange.is_token.data_ptr(), [True] * 16  # type: ignore[union-attr]

    def tokens() -> list[bool]:
        assert exchange.is_token is not None
        assert exchange.is_token.data_ptr() == address
        return exchange.is_token.tolist()

    assert tokens() == everything
    exchange.begin([3, 2], 4)
    gathered = exchange.gather(x)
    assert gathered.flatten().tolist() == [-99, -98, -100, -100, 1, 2, 0, 0]
    assert tokens()[:8] == [True, True, True, False, True, True, False, False]
    assert exchange.own_rows(gathered).tolist() == x.tolist()
    assert exchange.scatter(gathered, 2).tolist() == x.tolist()
    exchange.begin([], 0)
    assert tokens() == everything
    assert exchange.gather(x).flatten().tolist() == [-99, -98, 1, 2]
    assert exchange.own_rows(exchange.gather(x)).tolist() == x.tolist()


def test_with_one_engine_nothing_travels() -> None:
    exchange, x = Exchange(), torch.ones(2, 3)
    exchange.begin([], 0)
    assert exchange.is_token is None
    assert exchange.own_rows(x) is exchange.gather(x) is x

    def same(tensor: Tensor) -> bool:
        return torch.equal(exchange.scatter(tensor, 2), tensor)

    assert same(x)
