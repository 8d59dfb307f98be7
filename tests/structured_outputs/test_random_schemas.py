"""Schemas at random: whatever their grammars write or take is valid to the jsonschema library."""

import json
import random
from collections import Counter

import jsonschema

from headrace.errors import RequestError
from headrace.structured_outputs.conversion import of_params
from headrace.structured_params import StructuredOutputsParams
from tests.structured_outputs.random_schemas import SchemaMaker, random_value
from tests.structured_outputs.support import accepts, matcher_of, write

SCHEMAS = 300
DRAFTS = (
    jsonschema.Draft4Validator,
    jsonschema.Draft6Validator,
    jsonschema.Draft7Validator,
    jsonschema.Draft201909Validator,
    *[jsonschema.Draft202012Validator] * 4,
)


def test_grammars_of_random_schemas_are_sound_and_nearly_complete() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    maker, counts = SchemaMaker(rng), Counter[str]()
    for index in range(SCHEMAS):
        draft = rng.choice(DRAFTS)
        schema = {"$schema": draft.ID_OF(draft.META_SCHEMA), **maker.whole()}
        told = f"seed {seed}, schema {index}: {json.dumps(schema)}"
        judge = draft(schema)
        if not draft(draft.META_SCHEMA).is_valid(schema):  # in draft 4, true is no schema and 3 no exclusiveMinimum
            continue
        try:
            matcher = matcher_of(of_params(StructuredOutputsParams(json=schema), {}))
        except RequestError:
            counts["refused"] += 1
            continue
        counts["taken"] += 1
        for _ in range(2):
            text = write(matcher, rng, 150)
            if text is not None:
                assert judge.is_valid(json.loads(text)), (text, told)
                counts["written"] += 1
        for _ in range(3):
            value = random_value(rng)
            fits, taken = judge.is_valid(value), accepts(matcher, json.dumps(value, ensure_ascii=False))
            assert fits or not taken, (value, told)
            counts[f"fits {fits}, taken {taken}"] += 1
    assert counts["taken"] > SCHEMAS / 4, (counts, seed)
    assert counts["written"] > counts["taken"], (counts, seed)
    # What fits and is not taken: negations that say too little, and keys in another order than the schema's.
    assert counts["fits True, taken False"] <= 0.05 * counts["fits True, taken True"], (counts, seed)
