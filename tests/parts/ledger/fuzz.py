"""Generates requests from an OpenAPI document: valid ones, and ones with one error."""

from typing import Any

from hypothesis import strategies as st

EDGES = (-(2**63), -1, 0, 1, 2, 7, 2**31, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
"""Integers at the limits of common types."""

junk: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.sampled_from(EDGES), st.floats(), st.text(max_size=8), st.binary(max_size=8)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


class Shapes:
    """Hypothesis strategies for JSON schemas."""

    def __init__(self, document: dict[str, Any], known: dict[str, list[Any]]) -> None:
        self._schemas: dict[str, Any] = document["components"]["schemas"]
        self._known = known
        """Values that exist in the ledger, by field, so that some requests are valid."""

    def of(self, schema: dict[str, Any], field: str = "") -> st.SearchStrategy[Any]:
        made = self._of(schema, field)
        if field in self._known:
            return st.one_of(st.sampled_from(self._known[field]), made)
        return made

    def _of(self, schema: dict[str, Any], field: str) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            return self.of(self._schemas[schema["$ref"].rsplit("/", 1)[1]], field)
        if "anyOf" in schema:
            return st.one_of(*(self.of(one, field) for one in schema["anyOf"]))
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        kind = schema.get("type")
        if kind == "object" and "properties" in schema:
            fields = {name: self.of(field_schema, name) for name, field_schema in schema["properties"].items()}
            required = {name: fields.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(required, optional=fields)
        if kind == "object":
            return st.dictionaries(st.text(max_size=4), self.of(schema.get("additionalProperties") or {}), max_size=3)
        if kind == "array":
            return st.lists(self.of(schema.get("items") or {}, field), max_size=4)
        simple: dict[Any, st.SearchStrategy[Any]] = {
            "integer": st.one_of(st.integers(0, 5), st.sampled_from(EDGES)),
            "number": st.one_of(st.floats(0, 3), st.floats()),
            "boolean": st.booleans(),
            "null": st.none(),
            "string": st.binary(max_size=30) if schema.get("contentEncoding") else st.text(max_size=12),
        }
        return simple.get(kind, junk)

    def mutated(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        """A message of this schema, unchanged or with one field replaced, left out or added."""

        @st.composite
        def build(draw: st.DrawFn) -> Any:
            message = draw(self.of(schema))
            how = draw(st.sampled_from(["keep", "keep", "replace", "leave out", "add", "other"]))
            if how == "other" or not isinstance(message, dict):
                return message if how == "keep" else draw(junk)
            names = sorted(message)
            if how == "add":
                return {**message, draw(st.text(max_size=6)): draw(junk)}
            if names and how == "replace":
                return {**message, draw(st.sampled_from(names)): draw(junk)}
            if names and how == "leave out":
                gone = draw(st.sampled_from(names))
                return {name: value for name, value in message.items() if name != gone}
            return message

        return build()
