"""Real schemas and grammars in ../shared/data: instances are taken and refused as they are marked.

Of 894 instances of 199 schemas, 98.7% are. Not taken are 10 with properties in another order than the schema's, and
one that breaks an `if` in a schema of draft 4, which that draft ignores and which is held.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.structured_outputs.conversion import of_grammar, of_params
from headrace.structured_params import StructuredOutputsParams
from tests.structured_outputs.support import accepts, matcher_of

DATA = Path(__file__).parents[2].parent / "shared" / "data"


def rows(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"no ../shared/data/{name} beside the repository")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_grammars_take_and_refuse_what_is_marked() -> None:
    for row in rows("grammars/grammars.jsonl"):
        if row["kind"] == "regex":
            grammar = of_params(StructuredOutputsParams(regex=row["grammar"]), {})
        else:
            grammar = of_grammar(row["grammar"], {}, "grammar")
        matcher = matcher_of(grammar)
        assert [text for text in row["accept"] if not accepts(matcher, text)] == [], row["name"]
        assert [text for text in row["reject"] if accepts(matcher, text)] == [], row["name"]


def test_schemas_take_and_refuse_what_is_marked() -> None:
    counts = Counter[str]()
    wrong = []
    for row in rows("json-schemas/schemas.jsonl"):
        tests = [test for test in row["tests"] if not test.get("unchecked")]
        try:
            matcher = matcher_of(of_params(StructuredOutputsParams(json=row["schema"]), {}))
        except RequestError as error:
            counts["refused"] += len(tests)
            wrong.append(f"{row['id']}: {error}")
            continue
        for test in tests:
            taken = accepts(matcher, json.dumps(test["data"], ensure_ascii=False))
            counts[f"valid {test['valid']}, taken {taken}"] += 1
            if taken != test["valid"]:
                wrong.append(f"{row['id']}: valid {test['valid']}, taken {taken}")
    right = counts["valid True, taken True"] + counts["valid False, taken False"]
    assert right >= 0.987 * counts.total(), wrong
    assert counts["valid False, taken True"] == 0, wrong
