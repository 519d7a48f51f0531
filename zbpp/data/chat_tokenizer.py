"""The tokenizer of conversations, with its chat template and its special tokens.

jinja writes nothing for an unknown name. If a template ends answers with eos_token, and the tokenizer has no
eos_token, the answers end with nothing, and the trained model never stops. Such a template is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the second overrides the first


def load_tokenizer(tokenizer: str, chat_template: str | None = None) -> Any:
    """transformers' tokenizer with a chat template. Raises ValueError if there is none.

    tokenizer: a folder as transformers saves it, or a tokenizer.json. A tokenizer.json does not say which
    tokens are special: that is read from the files beside it, if there are any.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # lazily: seconds, and optional

    where = Path(tokenizer).expanduser()
    if not where.exists():
        raise ValueError(f"tokenizer={tokenizer} does not exist: write a folder, or a tokenizer.json")
    if where.is_dir():
        loaded: Any = AutoTokenizer.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    else:
        special = _special_tokens(where.parent)
        loaded = PreTrainedTokenizerFast(tokenizer_file=str(where), **special)  # type: ignore[no-untyped-call]
    if chat_template is not None:
        is_file = "{" not in chat_template
        loaded.chat_template = Path(chat_template).expanduser().read_text() if is_file else chat_template
    if not loaded.chat_template:
        raise ValueError(
            f"tokenizer={tokenizer} has no chat template: write data.chat_template=FILE, jinja as "
            "transformers' apply_chat_template takes it"
        )
    return loaded


def check_special_tokens(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if the template writes a special token that the tokenizer lacks.

    A template may test for such a token: `{% if bos_token %}` and `bos_token is defined` are then false.
    """
    known, template = tokenizer.special_tokens_map, tokenizer.chat_template
    missing = [
        name for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES if name not in known and name in str(template)
    ]
    if missing:
        _render_strictly(template, messages, missing)


def _render_strictly(template: str, messages: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
    """Render the template with values that raise an error when they are written; ValueError for that error.

    transformers can't do so: it turns all values that a template is given into plain ones.
    """
    from jinja2 import StrictUndefined, UndefinedError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class MissingTokenError(UndefinedError):
        """A special token that the tokenizer lacks is written."""

    class Missing(StrictUndefined):
        def __bool__(self) -> bool:  # type: ignore[override]  # what "if bos_token" asks
            return False

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["strftime_now"] = lambda form: ""
    given = {name: Missing(name=name, exc=MissingTokenError) for name in missing}
    try:
        unmarked = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
        for is_asked in (False, True):
            environment.from_string(unmarked).render(
                messages=messages, add_generation_prompt=is_asked, **given
            )
    except MissingTokenError as error:
        raise ValueError(
            f"the chat template needs {', '.join(missing)}, which the tokenizer does not have ({error}): "
            "write data.tokenizer=FOLDER, with a tokenizer_config.json that names it, or the token's "
            "text in the template"
        ) from error
    except Exception:  # transformers, which renders the template next, says what else is wrong
        return


def _special_tokens(folder: Path) -> dict[str, str]:
    """{"bos_token": its text, ...} from the files in a folder."""
    from transformers import PreTrainedTokenizerFast

    found = {}
    for path in (folder / name for name in _FILES):
        given = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for name in PreTrainedTokenizerFast.SPECIAL_TOKENS_ATTRIBUTES:
            value = given.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found
