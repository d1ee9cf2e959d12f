"""JSON schemas of varied features, each with answers that stay short, and others that must be refused."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def record(**properties: Any) -> Schema:
    """An object of exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 12}

SCHEMAS: dict[str, Schema] = {
    "object": record(name=SHORT),
    "several properties": record(
        name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}, adult={"type": "boolean"}
    ),
    "optional property": {
        "type": "object",
        "properties": {"a": SHORT, "b": {"type": "null"}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "nested objects": record(person=record(name=record(first=SHORT, last=SHORT))),
    "typed additional properties": {
        "type": "object",
        "additionalProperties": {"type": "integer", "maximum": 9, "minimum": 0},
        "maxProperties": 2,
    },
    "fixed and additional": {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "boolean"}},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "least properties": {
        "type": "object",
        "additionalProperties": {"type": "null"},
        "minProperties": 2,
        "maxProperties": 2,
    },
    "empty object": record(),
    "string": {"type": "string", "maxLength": 20},
    "short string": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "unanchored pattern": {"type": "string", "pattern": "x[0-9]", "maxLength": 10},
    "alternatives in a pattern": {"type": "string", "pattern": "^(red|green|blue)( (light|dark))?$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": record(mail={"type": "string", "format": "email", "maxLength": 30}),
    "integer": {"type": "integer", "minimum": -5, "maximum": 5},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "negative number": {"type": "number", "minimum": -2.5, "maximum": -1.5},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 999},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "enum of texts": {"enum": ["north", "east", "south", "west"]},
    "enum of anything": {"enum": [1, "two", None, True, [3], {"four": 4}]},
    "typed enum": {"type": "string", "enum": ['a"quote', "back\\slash", "line\nend", "ünïcode €", "🎉"]},
    "const": {"const": {"fixed": [1, 2, {"deep": None}]}},
    "const property": record(kind={"const": "circle"}, radius={"type": "integer", "minimum": 1, "maximum": 99}),
    "array": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 4},
    "array of a length": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    "array of objects": {
        "type": "array",
        "items": record(x={"type": "integer", "minimum": 0, "maximum": 9}),
        "minItems": 1,
        "maxItems": 2,
    },
    "array of arrays": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "minItems": 1,
        "maxItems": 2,
    },
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 9}, SHORT, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "tuple and more": {"type": "array", "prefixItems": [{"const": "head"}], "items": {"type": "null"}, "maxItems": 3},
    "several types": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    "nullable property": record(a={"type": ["string", "null"], "maxLength": 5}),
    "any of": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    "any of objects": {
        "anyOf": [record(a={"type": "integer", "minimum": 0, "maximum": 9}), record(b={"type": "boolean"})]
    },
    "one of, told apart": {
        "oneOf": [record(kind={"const": "a"}, n={"type": "boolean"}), record(kind={"const": "b"}, m=SHORT)]
    },
    "one of types": {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "boolean"}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 6}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    "reference": {**record(a={"$ref": "#/$defs/short"}, b={"$ref": "#/$defs/short"}), "$defs": {"short": SHORT}},
    "old definitions": {**record(a={"$ref": "#/definitions/flag"}), "definitions": {"flag": {"type": "boolean"}}},
    "recursion": {
        "$ref": "#/$defs/list",
        "$defs": {
            "list": {
                "anyOf": [
                    {"type": "null"},
                    record(value={"type": "integer", "minimum": 0, "maximum": 9}, next={"$ref": "#/$defs/list"}),
                ]
            }
        },
    },
    "recursion over two": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": record(b={"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}),
            "b": record(a={"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}),
        },
    },
    "annotations": {
        "title": "T",
        "description": "D",
        "$comment": "C",
        "examples": [1],
        "default": 1,
        "deprecated": True,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "integer",
        "minimum": 0,
        "maximum": 9,
    },
    "no type": record(
        anything={
            "maxLength": 3,
            "maximum": 9,
            "minimum": 0,
            "maxItems": 1,
            "maxProperties": 0,
            "type": ["string", "integer", "null", "boolean"],
        }
    ),
    "odd names": record(
        **{
            "with space": {"type": "boolean"},
            'quote"': {"type": "null"},
            "ä/~": {"type": "boolean"},
            "": {"type": "null"},
        }
    ),
    "many properties": record(**{f"p{i}": {"type": "boolean"} for i in range(12)}),
}

# What cannot be promised, and how its place is named.
REFUSED: dict[str, tuple[Schema, str]] = {
    "no such type": ({"type": "strin"}, "Invalid type"),
    "deep": (
        record(a=record(b={"type": "array", "items": {"uniqueItems": True}})),
        "#/properties/a/properties/b/items",
    ),
    "not": (record(a={"not": {"type": "string"}}), "#/properties/a"),
    "unknown format": (record(a={"type": "string", "format": "zip code"}), "#/properties/a"),
    "look-around": (record(a=SHORT, b={"type": "string", "pattern": "(?=x)y"}), "#/properties/b"),
    "no such reference": (record(a={"$ref": "#/$defs/missing"}), "#/properties/a"),
    "foreign reference": ({"$ref": "https://example.com/schema.json"}, "example.com"),
    "nothing matches": (record(a={"type": "integer", "minimum": 5, "maximum": 3}), "#/properties/a"),
    "false": (record(a=False), "required property 'a'"),
    "refers to itself": ({"$ref": "#"}, "no answer"),
    "one of that overlap": (record(a={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "#/properties/a"),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "nested in a list": ({"anyOf": [{"type": "null"}, {"contains": {"type": "null"}}]}, "#/anyOf/1"),
    "in a definition": ({"$ref": "#/$defs/x", "$defs": {"x": {"propertyNames": {"maxLength": 3}}}}, "#/$defs/x"),
}


def nested(depth: int) -> Schema:
    """Objects in objects."""
    schema: Schema = {"type": "string"}
    for _ in range(depth):
        schema = record(a=schema)
    return schema


# What would take a compiler without limits very long, or much memory.
HOSTILE: dict[str, Schema] = {
    "deep nesting": nested(500),
    "huge enum": {"enum": [f"value number {i}" for i in range(3000)]},
    "repeated pattern": {"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"},
    "exponential pattern": {"type": "string", "pattern": "(a|b)*a(a|b){25}c"},
    "exponential references": {
        "$ref": "#/$defs/d30",
        "$defs": {
            "d0": {"type": "string"},
            **{f"d{i}": record(a={"$ref": f"#/$defs/d{i - 1}"}, b={"$ref": f"#/$defs/d{i - 1}"}) for i in range(1, 31)},
        },
    },
    "exponential intersection": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)]
    },
    "long array": {"type": "array", "items": record(a={"type": "string"}), "minItems": 100_000},
    "long string": {"type": "string", "minLength": 500_000, "maxLength": 1_000_000},
    "optional properties": {
        "type": "object",
        "properties": {f"p{i}": {"type": "null"} for i in range(1500)},
        "additionalProperties": False,
    },
    "large multiple": {"type": "integer", "multipleOf": 999_983},
}
