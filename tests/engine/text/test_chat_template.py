from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, RequestError
from engine.text.chat_template import ChatTemplate
from engine.text.text_model import TextModel

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 < 3 & 'é'?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]

TEMPLATES = {
    "blocks": "{% for m in messages %}\n  {% if m.role == 'user' %}\n<u>{{ m.content }}</u>\n"
    "  {%- else %}\n{{ m.role }}={{ m.content | trim }}\n  {% endif %}\n{% endfor %}\n"
    "{% if add_generation_prompt %}>{% endif %}",
    "generation": "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}|"
    "{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}"
    "{% if loop.index == 4 %}{% break %}{% endif %}{{ m['content'] }};{% endfor %}",
    "tojson": "{{ messages[1] | tojson }}{{ messages[1] | tojson(indent=2) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ bos_token }}{{ tools is none }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_templates_render_as_in_transformers(template: str):
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = ChatTemplate(template, special_tokens={"bos_token": "<s>"}).render(CHAT)
    theirs = render_jinja_template(
        conversations=[CHAT], chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert ours == theirs[0][0]


def test_smollm2_gets_the_prompt_it_was_trained_on(smollm2: TextModel):
    ids = smollm2.chat_ids([{"role": "user", "content": "What is the capital of France?"}])
    # fmt: off
    assert ids == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
        19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520,
        9531, 198,
    ]
    # fmt: on


def test_the_generation_prompt_can_be_left_out():
    template = ChatTemplate.default()
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "user: hi\nassistant: "
    assert template.render(messages, add_generation_prompt=False) == "user: hi\n"


def test_text_parts_are_joined_and_missing_content_is_empty():
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert template.render(messages) == "[a\nb][]"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content: must be a string"),
        ([{"role": "user", "content": ["x"]}], "only text parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part of type 'text'"),
        ([{"role": "user", "content": "x", "extra": object()}], "not JSON"),
    ],
)
def test_messages_a_text_model_cannot_take_are_the_clients_error(
    messages: list[dict[str, Any]], message: str
):
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate.default().render(messages)
    assert (caught.value.param, caught.value.status) == ("messages", 400)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses them: roles must alternate"),
        ("{{ messages[0]['name'] + 'x' }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ range(10 ** 9) }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_template_errors_are_the_clients_error(template: str, message: str):
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(template).render(CHAT)
    assert caught.value.param == "messages"


def test_rendering_leaves_the_messages_alone():
    messages = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        }
    ]
    before = json.dumps(messages)
    template = ChatTemplate(
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments.x }}{% endfor %}"
    )
    assert template.render(messages) == "1"
    assert json.dumps(messages) == before


def test_tools_choose_their_template():
    template = ChatTemplate("plain", tool_template="{{ tools[0].function.name }}")
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=[tool]) == "f"
    assert template.render(CHAT, tools=[]) == "plain"


def test_dates_come_from_the_given_clock():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(CHAT) == "26 Jul 2024"


def test_a_template_that_does_not_parse_is_the_operators_error():
    with pytest.raises(ConfigError, match="here: line 1"):
        ChatTemplate("{% for %}", origin="here")


def test_a_directory_gives_its_jinja_file_before_its_tokenizer_config(tmp_path: Path):
    config = {"chat_template": "old{{ eos_token }}", "eos_token": {"content": "</s>"}}
    assert ChatTemplate.from_directory(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render(CHAT) == "old</s>"
    (tmp_path / "chat_template.jinja").write_text("new{{ eos_token }}")
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render(CHAT) == "new</s>"


def test_named_templates_are_chosen_by_name(tmp_path: Path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render(CHAT) == "chat"
    assert template.render(CHAT, tools=[{"type": "function"}]) == "tools"
    for broken in (named[:1], [{"name": "default"}], 3):
        file.write_text(json.dumps({"chat_template": broken}))
        with pytest.raises(ConfigError, match="chat_template"):
            ChatTemplate.from_directory(tmp_path)
