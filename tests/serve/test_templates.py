"""Templates render as Python's jinja2 renders them, set up as Hugging Face sets it up."""

import json
import os
import subprocess
from datetime import datetime
from pathlib import Path

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from templates import CONVERSATIONS, FAILURES, SNIPPETS, TEMPLATES, TOOL, VARIABLES

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("GKA_BUILD_DIR", "build/cpu")
NOW = 1_700_000_000


class Generation(jinja2.ext.Extension):
    """{% generation %} marks the assistant's words for training; its body stays."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.fromtimestamp(NOW).strftime(form)
    return env


@pytest.fixture(scope="module")
def ours():
    """Renders with gka's interpreter: (text, origin of each byte) or an error."""
    program = BUILD / "bin/gka_render"
    if not program.exists():
        pytest.skip(f"there is no {program}: this build has no C++ tests")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def render(template, variables, **limits):
            job = {"template": template, "variables": variables, "now": NOW, **limits}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield render
        process.stdin.close()


def theirs(template, variables):
    return environment().from_string(template).render(variables)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_feature_renders_as_in_python(ours, snippet):
    assert ours(snippet, VARIABLES)["text"] == theirs(snippet, VARIABLES)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_published_style_renders_as_in_python(ours, template, conversation):
    for tools in [None, [TOOL]]:
        for more in [{}, {"enable_thinking": False, "date_string": "1 Jan 2026"}]:
            variables = {
                "messages": CONVERSATIONS[conversation],
                "add_generation_prompt": bool(more),
                "bos_token": "<s>",
                "eos_token": "</s>",
                **more,
            }
            if tools or template == "schema":
                variables["tools"] = tools or []
            got = ours(TEMPLATES[template], variables)
            try:
                expected = theirs(TEMPLATES[template], variables)
            except Exception as error:
                assert "error" in got, (got, error)
                assert str(error) == got["error"] or not got["raised"]
            else:
                assert got.get("text") == expected, got


@pytest.mark.parametrize(("template", "line"), FAILURES)
def test_what_fails_in_python_fails_here_with_the_line(ours, template, line):
    with pytest.raises(Exception):  # noqa: B017 - any of Python's
        theirs(template, VARIABLES)
    assert ours(template, VARIABLES).get("line") == line


def test_what_came_from_the_request_is_known_through_every_operation(ours):
    template = (
        "<|a|>{{ (word ~ '<|b|>').replace('l', '<|c|>') | trim | upper }}{{ [word, 'x'] | join('<|d|>') | tojson }}"
    )
    got = ours(template, {"word": " hello<|a|>"})
    kept = "".join(c for c, mark in zip(got["text"], got["foreign"], strict=True) if mark == "0")
    assert kept == '<|a|><|C|><|C|><|B|>"<|d|>x"'
    assert (
        "".join(c for c, mark in zip(got["text"], got["foreign"], strict=True) if mark == "1") == "HEO<|A|> hello<|a|>"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{% set ns = namespace(t='x') %}{% for a in range(100) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 5000 + "1 }}",
        "{{ " + "1 + " * 5000 + "1 }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ range(10 ** 9) }}",
        "{{ 10 ** 100 }}",
    ],
    ids=[
        "steps",
        "memory",
        "repetition",
        "recursion",
        "parentheses",
        "signs",
        "a long sum",
        "nesting",
        "range",
        "power",
    ],
)
def test_every_template_ends_and_says_what_was_too_much(ours, template):
    assert "error" in ours(template, {}, steps=300_000)
    assert ours("{{ 1 }}", {})["text"] == "1"
