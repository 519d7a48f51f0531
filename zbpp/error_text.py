"""An error as text that can be printed, stored and sent, whatever the code that raised it put into it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_LIMIT = 10_000  # characters: a store refuses messages of some MiB


def error_text(error: BaseException) -> str:
    """`ValueError: what is wrong`; long texts are cut. Never raises."""
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """What the error says, as UTF-8 can hold it."""
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its text can't be made: {type(failure).__name__} in __str__)"
    if len(text) > _LIMIT:
        text = f"{text[:_LIMIT]} ... ({len(text):,} characters)"
    return text.encode(errors="backslashreplace").decode()


def kind_of(value: object) -> str:
    """`an int`, `a Tensor`: the class of a value, for a sentence."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean zb_h1?`: the prefix and the nearest of the known names; nothing if none is near."""
    by_lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {prefix}{by_lower[close[0]]}?" if close else ""


def shown_path(path: Path) -> Path:
    """The path as one types it in the current folder: a path below this folder is shown without it."""
    with suppress(ValueError, OSError):
        here = Path.cwd()  # "/": code of the user has called os.chdir
        return path if here == Path(here.anchor) else path.relative_to(here)
    return path


def chain_of(error: BaseException) -> list[BaseException]:
    """The error and all that led to it. The chain may be a circle: autograd makes such errors."""
    found = [error]
    for each in found:  # the list grows meanwhile
        following = each.__cause__ or each.__context__
        if following is not None and following not in found:
            found.append(following)
    return found


def first_cause(error: BaseException) -> BaseException:
    """The error at the end of the chain of causes. The chain may be a circle: autograd makes such errors."""
    chain = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    return chain[-1]
