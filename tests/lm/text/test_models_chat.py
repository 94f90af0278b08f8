# SPDX-License-Identifier: Apache-2.0
"""Chat templates, against those of transformers, and the command that uses them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
pytest.importorskip("jinja2")

from tvm_pagedkv_lm import DecoderModel, encode_chat  # noqa: E402
from tvm_pagedkv_lm.cli.command import main  # noqa: E402
from tvm_pagedkv_lm.families.registry import FAMILIES  # noqa: E402
from tvm_pagedkv_lm.model.source import TINY  # noqa: E402
from tvm_pagedkv_lm.text.chat import ChatTemplate  # noqa: E402

DOCUMENT = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")

# In the manner of several families: what their templates use of Jinja.
TEMPLATES = {
    "loop": """\
{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'system' and not loop.first %}
        {{ raise_exception('the system message comes first') }}
    {% endif %}
<|{{ message['role'] }}|>
{{ message['content'] | trim }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}""",
    "namespace and macro": """\
{%- macro turn(role, text) %}
  {{- '[' ~ role | upper ~ '] ' ~ text ~ eos_token ~ '\\n' }}
{%- endmacro %}
{%- set ns = namespace(system='none', count=0) -%}
{%- for m in messages -%}
  {%- if m.role == 'system' -%}{%- set ns.system = m.content -%}{%- continue -%}{%- endif -%}
  {%- set ns.count = ns.count + 1 -%}
  {{- turn(m.role, m.content) -}}
{%- endfor -%}
{{ ns.count }} of {{ ns.system }}{{ ' <think>' if enable_thinking else '' }}""",
    "generation is a scope": """\
{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}\
{{ x }}{% endfor %}""",
    "tools": """\
{% for tool in tools or [] %}{{ tool | tojson(indent=2) }}
{% endfor %}{% for m in messages %}{{ {'r': m.role, 'c': m.content} | tojson }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}
{% endfor %}{{ strftime_now('%Y') | length }}{{ unknown_token is defined }}""",
}
CHATS = {
    "question": [{"role": "user", "content": '  What is <é> & "that"? '}],
    "turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "And now?"},
    ],
    "roles of some families": [
        {"role": "developer", "content": "Be brief."},
        {"role": "document 1", "content": "A page."},
        {"role": "user", "content": "Hello"},
        {"role": "ipython", "content": "3"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "now", "description": "The <time>"}}]


EOS = {"__type": "AddedToken", "content": "<eos>"} | dict.fromkeys(
    ("lstrip", "normalized", "rstrip", "single_word", "special"), False
)


def directory_with(tmp_path, template, file: str = "tokenizer_config.json", **fields):
    """The included model with a chat template."""
    folder = tmp_path / "model"
    if not folder.exists():
        shutil.copytree(TINY, folder)
    fields = {"bos_token": "<bos>", "eos_token": EOS, **fields}
    if file == "chat_template.jinja":
        (folder / file).write_text(template, encoding="utf-8")
    else:
        fields["chat_template"] = template
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **fields})
    (folder / "tokenizer_config.json").write_text(text)
    return folder


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_as_transformers(template, chat, file, tmp_path):
    folder = directory_with(tmp_path, template, file)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate.from_directory(folder)
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "enable_thinking": True},
        {"add_generation_prompt": True, "tools": TOOLS},
    ):
        expected = theirs.apply_chat_template(chat, tokenize=False, **options)
        assert ours.render(chat, **options) == expected


def test_one_of_several_templates(tmp_path):
    named = [{"name": name, "template": name} for name in ("tool_use", "default")]
    assert ChatTemplate.from_directory(directory_with(tmp_path, named)).render([]) == "default"
    folder = directory_with(tmp_path, named[:1])
    with pytest.raises(ValueError, match=r"no template called default, only \['tool_use'\]"):
        ChatTemplate.from_directory(folder)
    with pytest.raises(ValueError, match="chat_template must be a template, or a list"):
        ChatTemplate.from_directory(directory_with(tmp_path, 3))
    assert ChatTemplate.from_directory(TINY) is None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}\n{{ m.content }", "line 2: unexpected '}'"),
        ("{{ raise_exception('no system message') }}", "refuses the messages: no system message"),
        ("{{ messages[0].nothing.more }}", "refuses the messages: .*has no attribute 'nothing'"),
        ("{{ messages.append(1) }}", "refuses the messages: access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages: access to attribute '__class__'"),
        ("{{ messages | tojson(indent='x' * 3, bad=1) }}", "refuses the messages: .*'bad'"),
        ("{{ 1 // (messages | length - 1) }}", "refuses the messages: integer division"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses the messages: Range too big"),
        ("{{ '{} {}'.format(1) }}", "refuses the messages: .*index .*out of range"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the messages: maximum recur"),
    ],
)
def test_mistakes_of_templates(template, message, tmp_path):
    folder = directory_with(tmp_path, template)
    with pytest.raises(ValueError, match=message) as caught:
        ChatTemplate.from_directory(folder).render(CHATS["question"])
    assert str(caught.value).startswith(f"{folder}/tokenizer_config.json: chat_template")


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": 1, "content": "x"}, "x"])
def test_messages_need_a_role(message):
    with pytest.raises(ValueError, match="message 2 must have a role, such as system, user"):
        ChatTemplate("").render([CHATS["question"][0], message])


TINY_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}>"


def test_special_tokens_come_from_the_template_alone(tmp_path):
    model = DecoderModel.from_pretrained(directory_with(tmp_path, TINY_TEMPLATE))
    text = "<bos>user: A list is\n>"
    expected = model.tokenizer.encode(text, add_special_tokens=False).ids
    assert encode_chat(model, [{"role": "user", "content": "A list is"}]) == expected


def test_command(tmp_path, capfd):
    folder = str(directory_with(tmp_path, TINY_TEMPLATE))
    arguments = ["--model", folder, "--chat", "--max-tokens", "8", "--temperature", "0"]
    assert main(["generate", "A list is", *arguments]) == 0
    answer = capfd.readouterr().out
    assert "A list is" not in answer and answer.strip()
    # The same as the text that the template makes.
    assert main(["generate", "<bos>user: A list is\n>", *arguments[:2], *arguments[3:]]) == 0
    continued = capfd.readouterr().out
    assert main(["generate", "A list is", "x", "--system", "Be brief.", *arguments]) == 0
    both = capfd.readouterr().out
    assert "--- prompt 1 ---\nA list is\n\n" in both and "--- prompt 2 ---\nx\n\n" in both
    assert continued.endswith(answer)


def test_chat_example_of_the_document(tmp_path):
    """The lines of docs/models.md that need a checkpoint with a chat template."""
    (example,) = re.findall(r"```python [^\n]*chat template[^\n]*\n(.*?)```", DOCUMENT, re.DOTALL)
    model = DecoderModel.from_pretrained(directory_with(tmp_path, TINY_TEMPLATE))
    variables = {"model": model}
    exec(example, variables)
    expected = model.tokenizer.encode("<bos>user: What is a KV cache?\n>", add_special_tokens=False)
    assert variables["prompt"] == expected.ids


def test_the_document_lists_every_family():
    for architecture in FAMILIES:
        assert f"| `{architecture}` |" in DOCUMENT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--chat"], "the model has no chat template (chat_template.jinja, or"),
        (["x", "--system", "y"], "--system needs --chat"),
    ],
)
def test_command_mistakes(arguments, message, capfd):
    assert main(["generate", *arguments]) == 2
    assert message in capfd.readouterr().err


def test_command_refuses_empty_messages(tmp_path, capfd):
    folder = str(directory_with(tmp_path, TINY_TEMPLATE))
    assert main(["generate", "a", " ", "--chat", "--model", folder]) == 2
    assert "prompt 2 is empty" in capfd.readouterr().err


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
