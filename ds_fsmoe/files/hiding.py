# SPDX-License-Identifier: Apache-2.0
"""Removes secrets from commands, configs and texts, since pages of runs are shared.

The record of a run and its readers call it. A value is removed if its name may be that of a secret, or if it looks like
one. Values of environment variables are shown only if they are known to be harmless.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

HIDDEN = "(hidden)"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""The words of a name, in camel case too."""
_SECRET = re.compile(
    r".*(secret|passwo?r?d|passphrase|credential|apikey|bearer)s?|.*(oauth|token|key)s?|auth(orization)?|pass(code)?|pwd"
    r"|pat|jwt|dsn|sas|cookies?|otp|signature"
)
"""A word of a name of which the value may be secret."""
_COUNTED = {
    *("num", "max", "min", "per", "id", "ids", "count", "size", "len", "length", "new", "total", "dim", "index")
}
"""A word beside it that says that a number is none: ``max_new_tokens``, ``num_key_value_heads``."""
_NUMBER = re.compile(r"[-+]?\d{1,12}(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE)
_SETS_NOTHING = {"", "true", "false", "none", "null", "auto"}
_SHOWN_VARIABLES = re.compile(
    r"(OMP|MKL|KMP|CUDA|NCCL|GLOO|UCX|TORCH|TORCHELASTIC|PYTORCH|DS|DEEPSPEED|FSMOE|TRITON|NVIDIA|SLURM)_\w+"
    r"|(LOCAL_|NODE_|GROUP_)?RANK|(LOCAL_)?(WORLD_)?SIZE|MASTER_(ADDR|PORT)|PYTHON\w+|(LD_LIBRARY_)?PATH|LANG|LC_\w+|TZ"
    r"|HF_(HOME|HUB_OFFLINE|HUB_CACHE|DATASETS_OFFLINE)|(HF|TRANSFORMERS)_(CACHE|VERBOSITY|OFFLINE)"
    r"|TOKENIZERS_PARALLELISM|WANDB_(MODE|PROJECT|DISABLED)"
)
"""The environment variables whose values are shown."""
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_ENVIRONMENT = {"env", "envs", "environ", "environment", "env_vars", "environment_variables", "runtime_env"}
"""Names of fields that hold environment variables."""
_NAME = re.compile(r"[-+~]*[\w.\-/@\[\]]+")
_OPTION = re.compile(r"--[a-z][a-z0-9_\-]*(=.*)?", re.DOTALL)
_IN_TEXT = re.compile(r"""([\w.\-]+)(\\?["']?\s*[:=]\s*)(\\?"[^"]*"|'[^']*'|[^\s,;&}\]"'\\]+)""")
_PLAINLY = re.compile(
    r"(?P<before>//)[^/\s@]+(?P<after>@)|(?P<scheme>\b(?:bearer|basic)\s+)[^\s\"',]+"
    r"|\b(?:hf_|gh[opsu]_|AKIA)[a-z0-9]{16,}\b|\b(?:sk-|github_pat_|glpat-|xox[abp]-|eyJ)[\w\-]{16,}(?:\.[\w\-.]+)?",
    re.IGNORECASE,
)
"""What is secret whatever its name: what stands ahead of the host in an address, and tokens of known forms."""
_FEWEST_CHARACTERS = 6
"""The fewest characters of a secret that is looked for in a text; what is shorter is found in any."""
_TAKES_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def command_of(arguments: Sequence[str]) -> list[str]:
    """Return the command line of a Python process without secrets."""
    code = _place_of_code(arguments)
    if code is None:
        return _arguments_of(arguments)
    place, text = code
    return [*_arguments_of(arguments[:place]), text, *_arguments_of(arguments[place + 1 :])]


def config_of(value: Any, *, is_environment: bool = False) -> Any:
    """Return a config of any depth without secrets.

    Args:
        value: the config, or a part of it.
        is_environment: whether its fields are environment variables.
    """
    if isinstance(value, Mapping):
        return {str(name): _field_of(str(name), each, is_environment) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        texts = iter(_arguments_of([each for each in value if isinstance(each, str)]))
        return [next(texts) if isinstance(each, str) else config_of(each) for each in value]
    return text_of(value) if isinstance(value, str) else value


def text_of(text: str) -> str:
    """Return a text, such as that of an error, without secrets."""
    text = _PLAINLY.sub(lambda found: f"{found['before'] or found['scheme'] or ''}{HIDDEN}{found['after'] or ''}", text)
    return _IN_TEXT.sub(_of_pair, text)


def _of_pair(found: re.Match[str]) -> str:
    name, sign, value = found.groups()
    # The value after a name may be a pair itself: an address with its query.
    return f"{name}{sign}{HIDDEN if _hides(name, value) else _IN_TEXT.sub(_of_pair, value)}"


def without(text: str, secrets: Iterable[str]) -> str:
    """Return a text without these secrets."""
    either = "|".join(re.escape(each) for each in sorted(secrets, key=len, reverse=True))
    return re.sub(rf"(?<!\w)(?:{either})(?!\w)", HIDDEN, text) if either else text


def secrets_of(whole: Any, shown: Any) -> set[str]:
    """Return the secrets of a value in the forms that may occur in a text: plain, and as JSON.

    Args:
        whole: a config, or the arguments of a command.
        shown: its shown form, without secrets.
    """
    if isinstance(whole, Mapping) and isinstance(shown, Mapping):
        return set().union(*(secrets_of(each, shown[str(name)]) for name, each in whole.items()))
    if isinstance(whole, (list, tuple)) and isinstance(shown, (list, tuple)):
        return set().union(*map(secrets_of, whole, shown))
    if isinstance(whole, (list, tuple)):
        return set().union(*(secrets_of(each, HIDDEN) for each in whole))
    if whole == shown or len(str(whole)) < _FEWEST_CHARACTERS:
        return set()
    parts = re.fullmatch(re.escape(shown).replace(re.escape(HIDDEN), "(.+?)"), str(whole), re.DOTALL)
    if parts is None and (data := _json_of(str(whole))) is not None:
        return secrets_of(data, config_of(data))
    found = {str(whole)} if parts is None else {each.strip("\\\"'") for each in parts.groups()}
    return {form for each in found if len(each) >= _FEWEST_CHARACTERS for form in (each, json.dumps(each)[1:-1])}


def _json_of(text: str) -> Any:
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _field_of(name: str, value: Any, is_environment: bool) -> Any:
    holds_environment = name.lower() in _ENVIRONMENT
    if isinstance(value, (Mapping, list, tuple)):
        # A list of secrets, or a block of options that has such a word in its name.
        is_list = (
            not isinstance(value, Mapping) and may_be_secret(name) and any(isinstance(each, str) for each in value)
        )
        return HIDDEN if is_list else config_of(value, is_environment=holds_environment)
    is_shown = not is_environment or _SHOWN_VARIABLES.fullmatch(name)
    return config_of(value) if is_shown and not _hides(name, value) else HIDDEN


def _arguments_of(arguments: Iterable[str]) -> list[str]:
    found: list[str] = []
    hides_next = False
    for each in arguments:
        if hides_next and not _OPTION.fullmatch(each):
            found.append(HIDDEN)
            hides_next = False
            continue
        name, sign, value = each.partition("=")
        is_named = _NAME.fullmatch(name) is not None
        found.append(f"{name}={_value_of(name, value)}" if sign and is_named else _value_of("", each))
        # What counts is behind it: --max-new-tokens 8.
        is_secret = may_be_secret(name) and not _is_counted(name)
        hides_next = not sign and is_named and name.startswith("-") and is_secret
    return found


def _value_of(name: str, value: str) -> str:
    is_variable = _VARIABLE.fullmatch(name) is not None
    if _hides(name, value) or (is_variable and not _SHOWN_VARIABLES.fullmatch(name)):
        return HIDDEN
    data = _json_of(value)
    if data is None:
        return text_of(value)
    hidden = config_of(data)
    return value if hidden == data else json.dumps(hidden)


def _hides(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool) or str(value).strip("\"'").lower() in _SETS_NOTHING:
        return False
    return may_be_secret(name) and not (_is_counted(name) and _NUMBER.fullmatch(str(value).strip("\"'")))


def may_be_secret(name: str) -> bool:
    """Return True if the name of an option, a field or a variable may be that of a secret."""
    words = _words(name)
    return any(_SECRET.fullmatch(each) for each in words) or "apikey" in "".join(words)


def _is_counted(name: str) -> bool:
    return not _COUNTED.isdisjoint(_words(name))


def _words(name: str) -> list[str]:
    return [each.lower() for each in _WORDS.findall(name)]


def _place_of_code(arguments: Sequence[str]) -> tuple[int, str] | None:
    """Return the place of the code in the arguments of a Python process, and the text shown instead; ``None`` if it
    runs a file."""
    place = 1
    while place < len(arguments) and (each := arguments[place]).startswith("-") and each != "-":
        if not each.startswith("--") and "c" in each and "m" not in each.partition("c")[0]:
            ahead, _, code = each.partition("c")
            if not set(ahead[1:]) & set("WX"):
                return (place, f"{ahead}c{HIDDEN}") if code else (place + 1, HIDDEN)
        if each.startswith("-m"):
            return None
        place += 2 if each in _TAKES_VALUE else 1
    return None
