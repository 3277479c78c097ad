"""ChatTemplate: messages to prompt text, by the jinja2 template that comes with the model.

Templates come with models and may be hostile, so they run in jinja2's immutable sandbox; messages come from clients,
so whatever goes wrong with them is the request's fault (status 400) and its text is bounded. A template in a request is
never accepted: compiling and running one is more than a client should be able to ask for.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..core.errors import ConfigurationError, RequestError
from .json_file import read_json_object_if_present
from .tokenizer import Tokenizer, special_tokens
from .tool_format import described_in_text, format_of

_LONGEST_MESSAGE = 500  # characters of a template's own complaint that reach the client

# The dialogue format of ChatML, for models that have its tokens but no template.
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_log = logging.getLogger(__name__)


class _Refusal(jinja2.TemplateError):
    """The template itself refused the messages, with a text meant for the user."""


class ChatTemplate:
    """A compiled chat template; thread-safe.

    `tool_format`: how a model with it calls tools. `thinks`: such a model may think before it answers.
    """

    def __init__(self, template: str, tokens: Mapping[str, str] | None = None):
        """`tokens` are the names a template may use for special tokens (`bos_token`, `eos_token`, ...).

        Raises ConfigurationError when the template is not valid jinja2.
        """
        self._tokens = dict(tokens or {})
        environment = _environment()
        try:
            self._template = environment.from_string(template)
            self._knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(template))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigurationError(
                f"The model's chat template is not valid jinja2 ({str(error)[:_LONGEST_MESSAGE]}). "
                "Correct chat_template in its tokenizer_config.json, or use another model."
            ) from error

        self._knows_calls = "tool_calls" in template
        self.tool_format = format_of(template)
        self.thinks = "</think>" in template

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template of a model folder: chat_template.jinja, or chat_template in tokenizer_config.json.

        A model without one that has the token <|im_start|> gets the ChatML format. None for other models: they can
        complete text but not chat. Raises ConfigurationError for a template that cannot be used.
        """
        template = _find_template(folder)
        if template is None:
            if not tokenizer.has_token("<|im_start|>"):
                return None
            template = _CHATML
        return cls(template, special_tokens(folder))

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for `messages`; `variables` (such as `tools`) are visible to the template too.

        Raises RequestError with param "messages": with the template's own words when it refuses the messages, else
        without the details, which would tell a client about the inside of this server.
        """
        values = {"tools": None, "documents": None} | self._tokens | variables
        try:
            return self._template.render(values, messages=messages, add_generation_prompt=add_generation_prompt)
        except _Refusal as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {str(error)[:_LONGEST_MESSAGE]}",
                param="messages",
            ) from error
        except Exception as error:  # a template is a program of its own: its failure may be of any kind
            _log.debug("chat template failed", exc_info=error)
            raise RequestError(
                "The model's chat template cannot be applied to these messages. Give every message a role the "
                "model knows and a text as content.",
                param="messages",
            ) from error

    def render_with_tools(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], /, **variables: Any
    ) -> str:
        """`render` for messages with calls of tools and their results, and `tools` (in the API's form) to tell of.

        What the template knows nothing about becomes plain text, in the way of Hermes.
        """
        if self._knows_tools:
            given = list(messages) if self._knows_calls else described_in_text(messages, (), roles_are_known=False)
            return self.render(given, tools=list(tools) or None, **variables)
        return self.render(described_in_text(messages, tools, roles_are_known=self._knows_calls), **variables)


def _find_template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"Cannot read {path} ({error}). Download the file again.") from error
    path = folder / "chat_template.json"
    if not path.exists():
        path = folder / "tokenizer_config.json"
    found = read_json_object_if_present(path).get("chat_template")
    if isinstance(found, list):  # several templates by name; the one for plain chat is called default
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[0].get("template") if named else None
    if found is not None and not isinstance(found, str):
        raise ConfigurationError(f"{path}: chat_template is no text. Download the file again.")
    return found


def _environment() -> jinja2.Environment:
    """jinja2 as chat templates expect it: the settings under which Hugging Face publishes them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes <, > and & for HTML, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _PlainNamespace(Namespace):
    """`namespace(...)` without names that start with an underscore, which could reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no `self`: a template may well use that name
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        Namespace.__setitem__(self, name, value)


def _refuse_underscore(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r}")


class _GenerationBlock(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks, for training, what the assistant said: here its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)
