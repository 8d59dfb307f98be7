"""Makes JSON schemas and values at random, dense in keywords that meet each other."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "b", "c")
TYPES: tuple[Any, ...] = (
    "null", "boolean", "integer", "number", "string", "array", "object", ["string", "null"], ["integer", "object"],
)  # fmt: skip
PATTERNS = (
    "^a", "b$", "^[a-c]{1,3}$", "x", "^\\d+$", "a|^b", "[^a]", "^$", "\\w", "(^a$|^b$)", "a($|b)", "(^|x)(a|b$)*",
    "^(?!\\.)", "^(?!\\.)(?!.*\\.\\.)[ab.]", "^(?=.*b)[ab]", "\\s", "\\W",
)  # fmt: skip
FORMATS = ("date", "email", "ipv4", "uuid", "uri-reference", "json-pointer", "time", "nonsense")


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randint(0, 9 if depth < 2 else 6)
    if kind < 2:
        return rng.choice([0, 1, 2, -1, 1.5, 3, 5, 10])
    if kind < 5:
        return rng.choice(["a", "b", "ab", "x", "", "abc", 'é"'])
    if kind < 7:
        return rng.choice([True, False, None])
    if kind == 7:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {name: random_value(rng, depth + 1) for name in rng.sample(NAMES, rng.randint(0, 3))}


class SchemaMaker:
    """Makes one schema after the other."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def whole(self) -> dict[str, Any]:
        made = self.schema(0)
        found = made if isinstance(made, dict) else {}
        x, y = self.schema(2), self.schema(2)
        if isinstance(x, dict) and "$ref" in x:
            x["$ref"] = "#/$defs/y"  # not to itself: jsonschema would follow it for ever
        if isinstance(y, dict):
            y.pop("$ref", None)
        return {**found, "$defs": {"x": x, "y": y}}

    def schema(self, depth: int) -> Any:
        if self.rng.random() < 0.04:
            return self.rng.choice([True, False])
        found: dict[str, Any] = {"type": self.rng.choice(TYPES)} if self.rng.random() < 0.55 else {}
        kind = found.get("type")
        self.scalars(found, kind)
        if depth < 3:
            self.containers(found, kind, depth)
            self.combined(found, depth)
        items = [*found.items()]
        self.rng.shuffle(items)  # llguidance goes by the order of keywords
        return dict(items)

    def some(self, chance: float) -> bool:
        return self.rng.random() < chance

    def scalars(self, found: dict[str, Any], kind: Any) -> None:
        rng, number, text = self.rng, kind in ("integer", "number"), kind == "string"
        for name, chance, make in (
            ("const", 0.08, lambda: random_value(rng)),
            ("enum", 0.1, lambda: [random_value(rng) for _ in range(rng.randint(1, 4))]),
            ("minimum", 0.35 if number else 0.05, lambda: rng.choice([0, -3, 1.5, 2, 10])),
            ("maximum", 0.3 if number else 0.05, lambda: rng.choice([5, 7.5, 100, 2])),
            ("exclusiveMinimum", 0.15 if number else 0.02, lambda: rng.choice([0, -1, 1.5])),
            ("exclusiveMaximum", 0.15 if number else 0.02, lambda: rng.choice([9, 20, 3.5])),
            ("multipleOf", 0.2 if number else 0.02, lambda: rng.choice([1, 2, 3, 0.5, 10])),
            ("minLength", 0.3 if text else 0.04, lambda: rng.randint(0, 3)),
            ("maxLength", 0.3 if text else 0.04, lambda: rng.randint(1, 5)),
            ("pattern", 0.3 if text else 0.04, lambda: rng.choice(PATTERNS)),
            ("format", 0.15 if text else 0.02, lambda: rng.choice(FORMATS)),
        ):
            if self.some(chance):
                found[name] = make()

    def containers(self, found: dict[str, Any], kind: Any, depth: int) -> None:
        rng, array, mapping = self.rng, kind == "array", kind == "object"

        def inner() -> Any:
            return self.schema(depth + 1)

        for name, chance, make in (
            ("items", 0.6 if array else 0.04, inner),
            ("prefixItems", 0.3 if array else 0.02, lambda: [inner() for _ in range(rng.randint(1, 2))]),
            ("minItems", 0.3 if array else 0.03, lambda: rng.randint(0, 2)),
            ("maxItems", 0.3 if array else 0.03, lambda: rng.randint(0, 3)),
            ("uniqueItems", 0.06 if array else 0.01, lambda: rng.choice([True, True, False])),
            ("contains", 0.02 if array else 0.0, inner),
            ("minContains", 0.1 if array else 0.01, lambda: rng.randint(0, 2)),
            ("maxContains", 0.1 if array else 0.01, lambda: rng.randint(0, 2)),
            ("unevaluatedItems", 0.05 if array else 0.01, inner),
            ("properties", 0.7 if mapping else 0.1, lambda: {n: inner() for n in rng.sample(NAMES, rng.randint(1, 3))}),
            ("required", 0.5 if mapping else 0.06, lambda: rng.sample(NAMES, rng.randint(0, 3))),
            ("additionalProperties", 0.4 if mapping else 0.04, lambda: rng.choice([True, False, inner()])),
            ("patternProperties", 0.1 if mapping else 0.01, lambda: {rng.choice(["^a", "b", "^x-", ".*"]): inner()}),
            ("minProperties", 0.1 if mapping else 0.01, lambda: rng.randint(0, 2)),
            ("maxProperties", 0.1 if mapping else 0.01, lambda: rng.randint(0, 3)),
            ("dependentRequired", 0.1 if mapping else 0.02, lambda: {rng.choice(NAMES): [rng.choice(NAMES)]}),
            ("dependentSchemas", 0.08 if mapping else 0.01, lambda: {rng.choice(NAMES): inner()}),
            ("propertyNames", 0.08 if mapping else 0.0, lambda: rng.choice([{"pattern": "^[ab]"}, {"maxLength": 2}])),
            ("unevaluatedProperties", 0.1 if mapping else 0.02, lambda: rng.choice([True, False, inner()])),
        ):
            if self.some(chance):
                found[name] = make()

    def combined(self, found: dict[str, Any], depth: int) -> None:
        if self.some(0.05):
            found |= {"uniqueItems": True, "items": {"enum": [random_value(self.rng, 2) for _ in range(3)]}}
        for name in ("anyOf", "oneOf", "allOf"):
            if self.some(0.1):
                found[name] = [self.schema(depth + 1) for _ in range(self.rng.randint(1, 3))]
        for name, chance in (("not", 0.1), ("if", 0.1), ("then", 0.08), ("else", 0.06)):
            if self.some(chance):
                found[name] = self.schema(depth + 1)
        if self.some(0.06):
            found["not"] = {"pattern": self.rng.choice(PATTERNS)}
        if self.some(0.07):
            found["$ref"] = self.rng.choice(["#/$defs/x", "#/$defs/y"])
