"""Chat templates in the style of published ones, written for these tests, and conversations to try them on."""

# ruff: noqa: E501 - a template is what it is

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA_LIKE = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none and tools is defined %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{%- if date_string is not defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools %}
    {{- "Functions:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Tools, reasoning that is dropped from earlier turns, tool responses gathered into one user turn.
QWEN_LIKE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nAnswer with <tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

MISTRAL_LIKE = """{%- if messages[0]["role"] == "system" -%}
    {%- set system_message = messages[0]["content"] -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list -%}
{{ bos_token }}
{%- for message in loop_messages | rejectattr("role", "in", ["tool", "ipython"]) -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {%- if loop.last and system_message is defined -%}
            {{ '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {%- else -%}
            {{ '[INST] ' ~ message['content'] ~ '[/INST]' }}
        {%- endif -%}
    {%- else -%}
        {%- generation -%}{{ ' ' + message.content | trim + eos_token }}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
{{ user_messages | length }}"""

# Macros with defaults, recursion over a schema, dictsort, filters with arguments.
SCHEMA_LIKE = """{%- macro render_type(schema, depth=0, required=none) -%}
{%- if schema.type == 'object' -%}
{
{%- for key, value in schema.properties | dictsort %}
{{ '  ' * (depth + 1) }}{{ key }}{{ '?' if key not in (schema.required or []) }}: {{ render_type(value, depth + 1) }}{{ ',' if not loop.last }}
{%- endfor %}
{{ '  ' * depth }}}
{%- elif schema.type == 'array' -%}
{{ render_type(schema['items'], depth=depth) }}[]
{%- elif schema.enum is defined -%}
{{ schema.enum | map('tojson') | join(' | ') }}
{%- else -%}
{{ schema.type | default('any', true) }}
{%- endif -%}
{%- endmacro -%}
{%- for tool in tools %}
// {{ tool.function.description.split('\\n') | join('\\n// ') }}
type {{ tool.function.name | title }} = {{ render_type(tool.function.parameters) }};
{% endfor %}
{%- for message in messages -%}
{{ loop.index }}/{{ loop.length }} {{ message.role | upper }}: {{ (message.content or '') | replace('\\n', ' ') | truncate(20) }}
{% else -%}
nobody
{% endfor %}"""

TOOL = {
    "type": "function",
    "function": {
        "name": "get weather",
        "description": "The weather.\nOf a city \u00fcber alles.",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["C", "F\u00e9"]},
                "city": {"type": "string"},
                "days": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}},
            },
            "required": ["city"],
        },
    },
}

CALL = {
    "type": "function",
    "function": {"name": "get weather", "arguments": {"city": "K\u00f6ln", "days": [1, 2.5, None, True]}},
}

CONVERSATIONS = {
    "one question": [{"role": "user", "content": "Hello \u4f60\u597d, <b>world</b> & 'all' \"of\" it\n"}],
    "with a system message": [
        {"role": "system", "content": "  Be brief.\n\n"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nBecause."},
        {"role": "user", "content": "And?"},
    ],
    "with tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "later rain"},
        {"role": "assistant", "content": "Sun, then rain.", "reasoning_content": "easy"},
    ],
    "nothing": [],
}

TEMPLATES = {
    "ChatML": CHATML,
    "Llama": LLAMA_LIKE,
    "Qwen": QWEN_LIKE,
    "Mistral": MISTRAL_LIKE,
    "schema": SCHEMA_LIKE,
}

# Each line is a feature; the variables are VARIABLES.
SNIPPETS = [
    "{{ 1 + 2 * 3 - 4 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 7.0 // 2 }} {{ 1e3 }} {{ 1_000 }}",
    "{{ 0.1 + 0.2 }} {{ 1e16 }} {{ 1.5e-7 }} {{ 100.0 }} {{ 3 / 2 }} {{ 1e22 }}",
    "{{ 'a' ~ 1 ~ none ~ true ~ 1.0 ~ [1, 'x'] ~ {'k': (1,)} ~ (1, 2) ~ () }}",
    "{{ \"it's\" }} {{ ['it\\'s', 'say \"x\"', 'tab\\t', '\\\\'] }} {{ 'x' 'y' }} {{ '\\u00e9\\x41' }}",
    "{{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }} {{ 'b' > 'a' }} {{ 1 == 1.0 }} {{ '1' == 1 }} {{ [1] == [1.0] }} {{ none == undefinedname }}",
    "{{ 'a' in 'abc' }} {{ 'z' not in word }} {{ 2 in [1, 2] }} {{ 'k' in d }} {{ not 1 in [2] }} {{ not (1 in [1]) }}",
    "{{ 'yes' if flag else 'no' }}{{ 'x' if not flag }}|{{ 'a' if 0 else 'b' if 0 else 'c' }}",
    "{{ flag and 0 or 'other' }} {{ '' or none or [] }} {{ 1 and 2 }} {{ not flag }}",
    "{{ word[0] }}{{ word[-1] }}{{ word[1:3] }}{{ word[::-1] }}{{ word[:-2] }}{{ word[::2] }}{{ word[5:1:-1] }}{{ word[10:] }}|",
    "{{ nums[1:] }} {{ nums[-2:] }} {{ nums[::-1] }} {{ nums[7] is defined }} {{ nums[0] }} {{ nums.0 }} {{ d.k }} {{ d['k'] }} {{ d.nope }}|",
    "{{ unicode }} {{ unicode | length }} {{ unicode[1] }} {{ unicode[::-1] }} {{ unicode | upper }} {{ unicode | tojson }} {{ unicode | tojson(ensure_ascii=true) }}",
    "{% for x in nums %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.depth }};{% endfor %}",
    "{% for x in nums if x is odd %}{{ x }}{{ loop.length }}{% else %}none{% endfor %}{% for x in [] %}{{ x }}{% else %}none{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for c in 'h\u00e9' %}[{{ c }}]{% endfor %}",
    "{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x > 4 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in nested recursive %}{{ x.n }}({{ loop(x.c) if x.c }}){{ loop.depth }}{% endfor %}",
    "{% for x in nums %}{{ 'new' if loop.changed(x // 2) }}{% endfor %}{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{{ range(3) | list }}{{ range(1, 7, 2) | list }}{{ range(5, 0, -2) | list }}{{ range(3)[1] }}",
    "{% set x = 1 %}{% for i in [1, 2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}",
    "{% set ns = namespace(n=0, l=[]) %}{% for i in nums %}{% set ns.n = ns.n + i %}{% set ns.l = ns.l + [i] %}{% endfor %}{{ ns.n }}{{ ns.l }}",
    "{% set a, b = 1, 'two' %}{{ a }}{{ b }}{% set t = 1, %}{{ t }}{% set block %} in {{ a }} {% endset %}[{{ block }}]{% set up | upper | trim %} x {% endset %}[{{ up }}]",
    "{% macro m(a, b=2, c='z') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m('x', 'y', 'z') | upper }}",
    "{% macro box(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call box('b') %}in{{ word }}{% endcall %}",
    "{% macro box() %}{{ caller('p') }}{% endmacro %}{% call(q) box() %}[{{ q }}]{% endcall %}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% filter upper %}abc{{ word }}{% endfilter %}{% with a = 1, b = 'c' %}{{ a }}{{ b }}{% endwith %}{{ a }}",
    "{% raw %}{{ not }} {% for %}{% endraw %}|{%- raw -%}  x  {%- endraw %}",
    "a\n  {% if true %}\n  b\n  {% endif %}\n c\n{#- comment -#}\n d {# x #}\n e",
    "  {{ 'x' }}  \n  {%- if true -%}  y  {%- endif -%}\n z  {%+ if true %} w{% endif %}\n",
    "{% if true +%}\n keep {% endif %}\n\n\nend\n\n",
    "x {{- ' y ' -}} z\n{{- '\n' }}{% if true %}\n{% endif %}\r\nq",
    "  {%+ if true %}a{% endif %}\n\t{% set q = 1 %}\n{{ q }}   {% if q %}b{% endif %}",
    "{{ [3, 1, 2] | sort }}{{ ['b', 'A', 'c'] | sort }}{{ ['b', 'A'] | sort(case_sensitive=true) }}{{ nums | sort(reverse=true) }}{{ people | sort(attribute='age') | map(attribute='name') | join(',') }}",
    "{{ people | map(attribute='name') | list }}{{ people | selectattr('age') | list | length }}{{ people | selectattr('age', 'gt', 20) | map(attribute='name') | list }}{{ people | rejectattr('name', 'equalto', 'Bo') | list | length }}",
    "{{ people | map(attribute='nope', default='?') | join }}{{ ['a', 'b'] | map('upper') | list }}{{ nums | select('even') | list }}{{ nums | reject('divisibleby', 2) | list }}{{ [0, 1, ''] | select | list }}",
    "{{ nums | first }}{{ nums | last }}{{ nums | length }}{{ nums | count }}{{ nums | sum }}{{ nums | min }}{{ nums | max }}{{ nums | join('-') }}{{ people | sum(attribute='age') }}",
    "{{ word | capitalize }}{{ 'heLLo wor-ld' | title }}{{ 'heLLo wor-ld'.title() }}{{ word | reverse }}{{ nums | reverse | list }}{{ '  x ' | trim }}{{ 'xxaxx' | trim('x') }}|",
    "{{ 'a,b,c'.split(',') }}{{ ' a  b '.split() }}{{ 'a,b,c'.split(',', 1) }}{{ 'a,b,c'.rsplit(',', 1) }}{{ 'a b c d'.split(none, 2) }}{{ 'a\\nb\\r\\nc\\n'.splitlines() }}{{ ''.split(',') }}{{ ''.split() }}",
    "{{ 'abcabc'.replace('b', 'X') }}{{ 'abcabc' | replace('b', 'X', 1) }}{{ 'ab'.replace('', '-') }}{{ '-'.join(['a', 'b']) }}{{ 'abc'.find('c') }}{{ 'abc'.find('z') }}{{ 'aXbX'.rfind('X') }}{{ 'banana'.count('an') }}",
    "{{ 'Hello'.startswith('He') }}{{ 'Hello'.endswith(('x', 'lo')) }}{{ 'Hello'.lower() }}{{ 'Hello'.upper() }}{{ 'hello'.capitalize() }}{{ 'xhix'.strip('x') }}{{ 'xhi'.lstrip('x') }}{{ 'hix'.rstrip('x') }}",
    "{{ '12'.isdigit() }}{{ 'ab'.isalpha() }}{{ 'a1'.isalnum() }}{{ ' '.isspace() }}{{ 'AB'.isupper() }}{{ 'ab'.islower() }}{{ 'k:v:w'.partition(':') }}{{ 'k:v:w'.rpartition(':') }}{{ 'prefix'.removeprefix('pre') }}{{ '7'.zfill(3) }}",
    "{{ 'x %s y %d z %.2f %%' | format('a', 3, 2.5) }}{{ 'x %s' % 'b' }}{{ '%s-%s' % (1, 2) }}{{ '{} and {1} {k} {{}}'.format(1, 2, k=3) if false else '{0} {1} {k} {{}}'.format(1, 2, k=3) }}",
    "{{ d | tojson }}{{ d | tojson(indent=2) }}{{ [] | tojson }}{{ {} | tojson(indent=2) }}{{ [1, [2, {'a': none}]] | tojson(indent=1) }}{{ 'q\"\\\\\\n\\t' | tojson }}{{ 1.0 | tojson }}{{ true | tojson }}",
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}{{ d | tojson(separators=(',', ':')) }}{{ {1: 2} | tojson }}{{ '<&>\\'' | tojson }}",
    "{{ d | dictsort }}{{ d | items | list }}{{ d | list }}{{ d.keys() | list }}{{ d.values() | list }}{{ d.get('k') }}{{ d.get('x', 7) }}{{ d.get('x') }}{{ d | length }}",
    "{{ nope | default('D') }}{{ '' | default('D') }}{{ '' | default('D', true) }}{{ none | d('N') }}{{ nope is defined }}{{ nope is undefined }}{{ nope }}|{{ nope | length }}{{ nope | list }}",
    "{{ 1 is number }}{{ true is number }}{{ 1 is integer }}{{ true is integer }}{{ 1.0 is float }}{{ 'a' is string }}{{ d is mapping }}{{ nums is sequence }}{{ d is iterable }}{{ 1 is iterable }}{{ none is none }}{{ true is boolean }}",
    "{{ 3 is odd }}{{ 4 is even }}{{ 9 is divisibleby 3 }}{{ 9 is divisibleby(2) }}{{ true is true }}{{ 1 is true }}{{ false is false }}{{ 'A' is upper }}{{ 'a' is lower }}{{ 1 is eq 1 }}{{ 1 is ne(2) }}{{ 2 is gt 1 }}{{ 1 is in [1] }}{{ none is not none }}",
    "{{ 1 is not odd }}{{ 'a' is string and 1 is number }}{{ d.k is defined and d.k is not none }}{{ nums is sameas nums }}{{ range is callable }}",
    "{{ 3.7 | int }}{{ '42' | int }}{{ 'x' | int(5) }}{{ '3.9' | int }}{{ '1.5' | float }}{{ 'x' | float }}{{ 2.567 | round(2) }}{{ 2.5 | round }}{{ 3.5 | round }}{{ 2.1 | round(0, 'ceil') }}{{ -3 | abs }}{{ 'ff' | int(0, 16) }}",
    "{{ 'a b\\nc' | indent }}{{ 'a\\n\\nb' | indent(2, true) }}{{ 'a\\n\\nb' | indent(2, blank=true) }}{{ 'a\\nb' | indent('>>') }}{{ 'one two three' | wordcount }}{{ 'abcdefghij klmnop' | truncate(9, leeway=0) }}{{ 'abcdefghij klmnop' | truncate(9, true, '..', 0) }}",
    "{{ [1, 1, 2] | unique | list }}{{ ['a', 'A'] | unique | list }}{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2, 3] | batch(2, 0) | list }}{{ people | groupby('age') | list | length }}{% for age, group in people | groupby('age') %}{{ age }}{{ group | length }};{% endfor %}",
    "{{ 'x' * 3 }}{{ [1] * 2 }}{{ [1] + [2] }}{{ (1,) + (2,) }}{{ 'abc' | list }}{{ 'a' | center(5) }}|{{ '<a href=\"x\">' | e }}{{ 5 | string }}{{ 'x' | safe }}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{% set j = joiner('|') %}{% for x in nums %}{{ j() }}{{ x }}{% endfor %}{{ dict(a=1, b=2) }}",
    "{{ - 3 }}{{ -nums[0] }}{{ +2 }}{{ -2 ** 2 }}{{ 2 * -3 }}{{ (1, 2)[0] }}{{ [1, 2,][1] }}{{ {'a': 1,}.a }}{{ d['k'] | string | length }}{{ 'a' 'b' | upper }}",
    "{% if nums and nums[0] == 1 %}A{% elif false %}B{% else %}C{% endif %}{% if nope %}x{% elif nope is undefined %}y{% endif %}{% if 0 %}{% else %}z{% endif %}",
    "{{ true }}{{ True }}{{ none }}{{ None }}{{ false }}{{ False }}{{ loop is defined }}{{ [none, true] }}{{ d }}",
    "{{ strftime_now('%Y-%m-%d %H:%M') }}",
    "{% generation %}said{% endgeneration %}",
    "{{ d['missing'] is defined }}{{ d.items() | list }}",
    "{# a {{ comment }} {% with %} tags #}ok{#\n lines\n#}\nnext",
    "{{ '}}' }}{{ {'a': {'b': 1}}.a.b }}{{ '%}' }}{{ {'a':{'b':2}}['a']['b'] }}",
]

# Each fails in both, with the line given.
FAILURES = [
    ("{{ nope.x }}", 1),
    ("a\n{{ 1 + 'x' }}", 2),
    ("a\n\n{{ nope() }}", 3),
    ("{{ raise_exception('no') }}", 1),
    ("{% for x in 5 %}{% endfor %}", 1),
    ("{{ 1 / 0 }}", 1),
    ("{{ 'a' | nofilter }}", 1),
    ("{% if x %}", 1),
    ("{{ x", 1),
    ("{% endfor %}", 1),
    ("{{ 'x }}", 1),
    ("{% unknowntag %}", 1),
    ("{{ [1, 2 }}", 1),
    ("{% for x in nums %}\n{{ x }}\n{% endif %}", 3),
    ("{% set nums.x = 1 %}", 1),
    ("{{ nums.append(1) }}", 1),
    ("{{ 'a' < 1 }}", 1),
    ("{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", 1),
    ("{% set a, b = [1] %}", 1),
    ("{{ d[[1]] + 1 }}", 1),
]

VARIABLES = {
    "word": "hello",
    "unicode": "h\u00e9\u4f60\U0001f600z",
    "flag": True,
    "nums": [1, 2, 3, 4],
    "d": {"k": "v", "B": [1, {"x": None}], "a": 1.5},
    "people": [{"name": "Ann", "age": 30}, {"name": "Bo", "age": 20}, {"name": "Cy", "age": 30}],
    "nested": [{"n": 1, "c": [{"n": 2, "c": []}]}, {"n": 3, "c": []}],
}
