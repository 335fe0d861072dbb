"""The meaning of each setting, read from the docstring below its field."""

import ast
import inspect

from pydantic import BaseModel


def field_docs(model: type) -> dict[str, str]:
    """The docstring of each field, including those inherited from another config class."""
    found: dict[str, str] = {}
    for base in model.__bases__:
        if base is not BaseModel and issubclass(base, BaseModel):
            found |= field_docs(base)
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = text.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[field.target.id] = " ".join(value.value.split()).replace("|", "\\|")
    return found
