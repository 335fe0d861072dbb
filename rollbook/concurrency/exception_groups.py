"""Unwrapping exception groups: a task group wraps every error, and callers want the error itself."""


def first_error(error: BaseException, *, prefer: type[BaseException] | None = None) -> BaseException:
    """The first error inside nested groups; the first one of class `prefer`, if there is one."""
    leaves = _leaves(error)
    preferred = [] if prefer is None else [leaf for leaf in leaves if isinstance(leaf, prefer)]
    return (preferred or leaves)[0]


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
