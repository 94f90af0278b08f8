# SPDX-License-Identifier: Apache-2.0
"""Chat templates: messages become the text that a model was tuned on.

Checkpoints bring a Jinja template, which is code from elsewhere: it runs in Jinja's sandbox, with
the functions that templates are written for and no access to anything else.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .added_tokens import CONFIG, special_tokens, token_fields

# What the code of a template may raise besides errors of Jinja.
_MISTAKES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """The template of a model.

    Parameters
    ----------
    source : str
        The Jinja source.
    special_tokens : mapping
        Special tokens by their names in templates, such as "bos_token".
    where : str
        Name of the template in errors.

    Notes
    -----
    The template is compiled at its first use, so that Jinja is needed only for chats.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, where: str = "template"
    ):
        self.source, self.where = source, where
        self._special_tokens = dict(special_tokens or {})
        self._compiled = None

    @classmethod
    def from_directory(cls, directory: str | Path) -> ChatTemplate | None:
        """Load the template of a Hugging Face directory; return None if it has none.

        ``chat_template.jinja`` takes precedence over ``chat_template`` in
        ``tokenizer_config.json``. Of several named templates, the one called "default" is used.

        Raises
        ------
        ValueError
            If a file is damaged, or several templates have no default.
        """
        directory = Path(directory)
        file = directory / CONFIG
        fields = token_fields(directory)
        own = directory / "chat_template.jinja"
        source: Any
        if own.is_file():
            source, where = own.read_text(encoding="utf-8-sig"), str(own)
        else:
            source, where = fields.get("chat_template"), f"{file}: chat_template"
        if source is None:
            return None
        return cls(_default(source, where), special_tokens(fields), where)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation as text.

        The text contains all special tokens, so encode it without adding any.

        Parameters
        ----------
        messages : sequence of mappings
            Each has "role" and "content", as in OpenAI's API. Which roles there are is the
            template's affair.
        add_generation_prompt : bool
            Whether the text ends with the beginning of the model's answer.
        tools : sequence of mappings, optional
            JSON schemas of functions, for templates that support tools.
        **variables
            Other variables of the template, such as ``enable_thinking``.

        Returns
        -------
        str

        Raises
        ------
        ValueError
            If the template is invalid, a message has no role, or the template rejects the messages;
            the error has the template's own text.
        RuntimeError
            If Jinja is missing, or its version has a known sandbox vulnerability.
        """
        for index, message in enumerate(messages):
            role = message.get("role") if isinstance(message, Mapping) else None
            if not isinstance(role, str) or not role:
                raise ValueError(
                    f"message {index + 1} must have a role, such as system, user or assistant; "
                    f"got {message!r}"
                )
        template = self._compile()
        from jinja2 import TemplateError

        try:
            return template.render(
                **self._special_tokens,
                messages=[dict(message) for message in messages],
                tools=None if tools is None else list(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (TemplateError, *_MISTAKES) as error:
            raise ValueError(f"{self.where} refuses the messages: {error}") from None

    def _compile(self):
        if self._compiled is not None:
            return self._compiled
        try:
            import jinja2
        except ModuleNotFoundError:
            raise RuntimeError(
                "chat templates need Jinja: pip install 'tvm-pagedkv[demo]'"
            ) from None
        try:
            self._compiled = _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{self.where}, line {error.lineno}: {error.message}") from None
        return self._compiled


def _default(source: Any, where: str) -> str:
    """Of several named templates, the default one."""
    if isinstance(source, str):
        return source
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source if _is_named(each)}
        if isinstance(named.get("default"), str):
            return named["default"]
        raise ValueError(f"{where} has no template called default, only {sorted(named)}")
    raise ValueError(f"{where} must be a template, or a list of named ones; got {source!r:.80}")


def _is_named(template: Any) -> bool:
    return isinstance(template, Mapping) and isinstance(template.get("name"), str)


# --- the sandbox --------------------------------------------------------------------------------


def _environment():
    """What templates are written for: Jinja's immutable sandbox, and a few functions."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < (3, 1, 6):
        raise RuntimeError(
            f"Jinja {jinja2.__version__} has known holes in its sandbox; chat templates need 3.1.6 "
            "or later: pip install 'tvm-pagedkv[demo]'"
        )

    class Generation(Extension):
        """``{% generation %}`` marks what the model has written; here it is only text."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)  # what is set within ends with it

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's own filter escapes for HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
