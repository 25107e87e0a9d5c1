"""The Responses API as OpenAI's client speaks it: what is asked reaches the model as chat's does, what comes back is
what the client's own types describe, whole and in events."""

import json

import openai
import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from openai.lib._tools import ResponsesPydanticFunctionTool
from pydantic import BaseModel
from servers import fake
from templates import QWEN_LIKE

LOGPROBS = ["message.output_text.logprobs"]
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a town",
    "parameters": {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": QWEN_LIKE, "eos_token": "<|im_end|>"}))
    with fake(folder=folder, slots=8) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


def says(text):
    return f"SAY:{text}\nassistant:"


def events_of(server, body):
    """The events of a stream as they stand on the wire: each named in its first line, and numbered from 0."""
    connection = server.connect()
    connection.request("POST", "/v1/responses", json.dumps({**body, "stream": True}))
    response = connection.getresponse()
    assert response.status == 200, response.read()
    *blocks, rest = response.read().decode().split("\n\n")
    connection.close()
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
        assert events[-1]["sequence_number"] == number
    return events


# --- what is asked


def test_a_response_is_what_the_client_describes_and_repeats_what_was_asked(client):
    got = client.responses.create(
        model="fake",
        instructions="Be kind.",
        input=says("Hello"),
        max_output_tokens=50,
        temperature=0.5,
        top_p=0.9,
        metadata={"run": "7"},
        store=False,
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        truncation="disabled",
        service_tier="auto",
        max_tool_calls=3,
        include=["reasoning.encrypted_content"],
        tools=[TOOL],
        parallel_tool_calls=False,
        extra_body={"iterations": 5, "background": None, "conversation": None},
    )
    assert got.output_text == "Hello"
    assert (got.object, got.status, got.error, got.incomplete_details) == ("response", "completed", None, None)
    assert got.id.startswith("resp_") and got.completed_at >= got.created_at
    (message,) = got.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.content[0].annotations == []
    assert got.usage.total_tokens == got.usage.input_tokens + got.usage.output_tokens
    assert got.usage.output_tokens == len("Hello") + 1
    assert got.usage.input_tokens_details.cached_tokens == got.gka["remembered_tokens"] == 0
    assert (got.instructions, got.max_output_tokens, got.temperature, got.top_p) == ("Be kind.", 50, 0.5, 0.9)
    assert (got.metadata, got.user, got.safety_identifier, got.prompt_cache_key) == ({"run": "7"}, "u", "s", "k")
    assert (got.reasoning.effort, got.text.verbosity, got.text.format.type) == ("low", "low", "text")
    assert (got.truncation, got.service_tier, got.max_tool_calls) == ("disabled", "default", 3)
    assert (got.tools[0].name, got.tool_choice, got.parallel_tool_calls) == ("weather", "auto", False)
    plain = client.responses.create(input=says("x"))  # the one model that is served
    assert (plain.model, plain.temperature, plain.store, plain.tools) == ("fake", 1, True, [])


CALLED = {"call_id": "c1", "name": "weather", "arguments": '{"town": "Rome"}'}
CHAT_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"town": "Rome"}'},
}


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ({"input": "x"}, [("user", "x")]),
        ({"input": [{"role": "user", "content": "x"}], "instructions": "i"}, [("system", "i"), ("user", "x")]),
        (
            {"input": [{"role": "developer", "content": "d"}, {"role": "user", "content": "x"}], "instructions": "i"},
            [("system", "i\nd"), ("user", "x")],
        ),
        (
            {
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
                    {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
                    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "status": "completed"},
                    {"role": "user", "content": "d"},
                ]
            },
            [("user", "a\nb"), ("assistant", "c"), ("assistant", "no"), ("user", "d")],
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "x"},
                    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "abc"},
                    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                    {"role": "assistant", "content": "I look."},
                    {"type": "function_call", **CALLED},
                    {"type": "function_call", **CALLED, "call_id": "c2", "id": "fc_2", "status": "completed"},
                    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
                    {
                        "type": "function_call_output",
                        "call_id": "c2",
                        "output": [{"type": "input_text", "text": "sun"}],
                    },
                    {"type": "function_call", **CALLED, "call_id": "c3"},
                    {"type": "function_call_output", "call_id": "c3", "output": ""},
                ],
                "tools": [TOOL],
            },
            [
                ("user", "x"),
                {
                    "role": "assistant",
                    "content": "I look.",
                    "reasoning_content": "hm",
                    "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "c2"}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                {"role": "tool", "tool_call_id": "c2", "content": "sun"},
                {"role": "assistant", "content": None, "tool_calls": [{**CHAT_CALL, "id": "c3"}]},
                {"role": "tool", "tool_call_id": "c3", "content": ""},
            ],
        ),
    ],
)
def test_what_is_asked_reaches_the_model_as_chat_would_put_it(server, asked, messages):
    # The stand-in engine's log-probabilities follow from every token before them: equal ones are equal prompts.
    same = {"max_tokens": 3, "logprobs": True, "top_logprobs": 2, "seed": 1}
    chat = {"messages": [one if isinstance(one, dict) else {"role": one[0], "content": one[1]} for one in messages]}
    if "tools" in asked:
        chat["tools"] = [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    said = server.post("/v1/chat/completions", {**chat, **same})
    body = {**asked, "max_output_tokens": 3, "include": LOGPROBS, "top_logprobs": 2, "seed": 1}
    got = server.post("/v1/responses", body)
    assert got["usage"]["input_tokens"] == said["usage"]["prompt_tokens"]
    assert got["output"][0]["content"][0]["logprobs"] == said["choices"][0]["logprobs"]["content"]
    assert got["output"][0]["content"][0]["text"] == said["choices"][0]["message"]["content"]


def message(*parts, role="user"):
    return [{"role": role, "content": list(parts)}]


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"input": None}, "input", "is missing"),
        ({"input": []}, "input", "at least one item"),
        ({"input": 5}, "input", "takes a text or a list"),
        ({"input": ["x"]}, "input[0]", "takes an object"),
        ({"input": [{"role": "user"}]}, "input[0].content", "takes a text"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "user, assistant, system or developer"),
        ({"input": message({"type": "input_image", "image_url": "x"})}, "input[0].content[0]", "reads text alone"),
        ({"input": message({"type": "input_file"})}, "input[0].content[0]", "reads text alone"),
        ({"input": message({"type": "input_text"})}, "input[0].content[0].text", "is missing"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]", "send the item itself"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "takes a text"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "function_call_output, reasoning and item_reference"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "is missing"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]},
            "input[0].call_id",
            '"c9", and no function_call before it has that',
        ),
        ({"input": [{"type": "reasoning", "content": ["x"]}]}, "input[0].content", "reasoning_text"),
        ({"background": True}, "background", "takes false"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt", "refused"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "refused"),
        ({"truncation": "auto"}, "truncation", "takes disabled"),
        ({"service_tier": "slow"}, "service_tier", "takes auto, default"),
        ({"tools": {}}, "tools", "takes a list"),
        ({"tools": [1]}, "tools", "takes objects"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", '"web_search", and functions are what can be called'),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "stand beside its type"),
        ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters", "takes an object"),
        ({"tool_choice": "required"}, "tool_choice", "has none to call"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", '{"type": "function", "name": …}'),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "auto, none, required"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "none of 'tools'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text, json_object or json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "takes a schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name", "is missing"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "string", "not": {}}}}},
            "text.format",
            "'not'",
        ),
        ({"text": {"fromat": {}}}, "text", "did you mean 'format'?"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "low, medium or high"),
        ({"include": ["everything"]}, "include", "message.output_text.logprobs"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs", "from 0 to 20"),
        ({"metadata": {"a": 1}}, "metadata", "a text of up to 512"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "up to 16"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "none, minimal"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens of 1000000"),
        ({"input": "x" * 5000}, "input", "this model's maximum context length is 4096 tokens"),
        ({"messages": []}, "messages", "is unknown"),
        ({"n": 2}, "n", "is unknown"),
        ({"iterations": 31}, "iterations", "from 0 to 30"),
        ({"model": "other"}, "model", "there is no model"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(client, change, param, said):
    with pytest.raises(openai.APIStatusError) as refused:
        client.responses.create(**{"model": "fake", "input": "x", "extra_body": change})
    assert refused.value.status_code == (404 if param == "model" else 400)
    assert refused.value.param == param
    assert said in refused.value.body["message"]


# --- what comes back


class Town(BaseModel):
    name: str
    people: int


def test_an_answer_in_a_schema_is_parsed(client):
    text = '{"name":"Oslo","people":700000}'
    got = client.responses.parse(model="fake", input=says(text), text_format=Town)
    assert got.output_parsed == Town(name="Oslo", people=700000)
    with client.responses.stream(model="fake", input=says(text), text_format=Town) as stream:
        assert stream.get_final_response().output_parsed == got.output_parsed
    loose = client.responses.create(
        model="fake", input="x", text={"format": {"type": "json_object"}}, max_output_tokens=30, extra_body={"seed": 1}
    )
    assert loose.output_text.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_that_is_insisted_on_comes_before_a_format(client, choice):
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}}
    got = client.responses.create(model="fake", input="x", tools=[TOOL], tool_choice=choice, text=form)
    (call,) = got.output
    assert call.name == "weather" and json.loads(call.arguments)["town"] in ("Rome", "Oslo")
    form["format"]["schema"] = {"not": {}}
    with pytest.raises(BadRequestError, match="'not', which is not supported"):
        client.responses.create(model="fake", input="x", tools=[TOOL], tool_choice=choice, text=form)


def test_an_answer_in_a_schema_may_first_ask_a_tool(client):
    asked = {"model": "fake", "tools": [TOOL], "text_format": Town}
    first = client.responses.parse(input=says(CALL), **asked)
    (call,) = first.output
    assert (call.name, call.parsed_arguments) == ("weather", {"town": "Rome"})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": says('{"name":"Rome","people":3}')}
    second = client.responses.parse(input=[output], previous_response_id=first.id, **asked)
    assert second.output_parsed == Town(name="Rome", people=3)


def test_the_scores_of_an_answer_are_those_of_its_tokens(client):
    got = client.responses.create(model="fake", input=says("Hé!"), include=LOGPROBS, top_logprobs=3)
    scores = got.output[0].content[0].logprobs
    assert bytes(byte for score in scores for byte in score.bytes).decode() == "Hé!"  # and not what ends it
    assert all(len(score.top_logprobs) == 3 for score in scores)
    among = client.responses.create(
        model="fake", input=says(f"<think>hm</think>Hé!{CALL}"), include=LOGPROBS, tools=[TOOL]
    )
    assert bytes(byte for score in among.output[1].content[0].logprobs for byte in score.bytes).decode() == "Hé!"
    with client.responses.stream(model="fake", input=says("Hé!"), include=LOGPROBS, top_logprobs=3) as stream:
        told = [score for event in stream if event.type == "response.output_text.delta" for score in event.logprobs]
        final = stream.get_final_response()
    assert [score.logprob for score in told] == [score.logprob for score in scores]
    assert final.output[0].content[0].logprobs == scores


def test_an_answer_that_is_cut_off_says_so(client, server):
    got = client.responses.create(model="fake", input=says("Hello"), max_output_tokens=3)
    assert (got.status, got.output_text, got.output[0].status) == ("incomplete", "Hel", "incomplete")
    assert got.incomplete_details.reason == "max_output_tokens" and got.completed_at is None
    *_, last = events_of(server, {"input": says("Hello"), "max_output_tokens": 3})
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    cut = client.responses.create(model="fake", input=says(CALL), tools=[TOOL], max_output_tokens=len(CALL) - 20)
    (call,) = cut.output
    assert (call.type, call.status, cut.status) == ("function_call", "incomplete", "incomplete")
    assert CALLED["arguments"].startswith(call.arguments)
    stopped = server.post("/v1/responses", {"input": says(CALL), "tools": [TOOL], "stop": ["Rome"]})
    assert [(one["type"], one["status"]) for one in stopped["output"]] == [("function_call", "incomplete")]


def test_a_call_is_complete_where_its_arguments_can_be_read(client):
    """Whatever ended it: the number of tokens behind its last argument, or a mark in the middle of one."""
    end = CALL.index("</tool_call>")
    cut = client.responses.create(model="fake", input=says(CALL), tools=[TOOL], max_output_tokens=end)
    (call,) = cut.output
    assert (cut.status, call.status, call.arguments) == ("incomplete", "completed", CALLED["arguments"])
    broken = '<tool_call>\n{"name": "weather", "arguments": {"town": </tool_call>\n'
    made = client.responses.create(model="fake", input=says(broken + CALL), tools=[TOOL])
    calls = [(item.status, item.arguments) for item in made.output if item.type == "function_call"]
    assert [status for status, _ in calls] == ["incomplete", "completed"] and calls[1][1] == CALLED["arguments"]


def test_the_events_of_an_answer_come_in_the_order_clients_rely_on(server):
    text = f"<think>\nhm\n</think>\n\nok {CALL}\n{CALL}"
    body = {"input": says(text), "tools": [TOOL], "store": False}
    events = events_of(server, body)
    types = [event["type"].removeprefix("response.") for event in events]
    runs = [name for i, name in enumerate(types) if i == 0 or types[i - 1] != name]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert runs == [
        *["created", "in_progress"],
        *["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"],
        *["content_part.done", "output_item.done"],
        *["output_item.added", "content_part.added", "output_text.delta", "output_text.done"],
        *["content_part.done", "output_item.done"],
        *[*call, *call],
        "completed",
    ]
    final = events[-1]["response"]
    for at, item in enumerate(final["output"]):
        mine = [event for event in events if event.get("output_index") == at]
        assert mine[-1]["item"] == item
        assert mine[0]["item"]["status"] == "in_progress"
        assert {event["item_id"] for event in mine[1:-1]} == {item["id"]}
        deltas = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert deltas == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    assert len({item["id"] for item in final["output"]} | {one.get("call_id") for one in final["output"][2:]}) == 6
    whole = server.post("/v1/responses", body)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call", "function_call"]
    for one, other in zip(whole["output"], final["output"], strict=True):
        own = {"id": None, "call_id": None}
        assert {**one, **own} == {**other, **own}
    assert (whole["usage"], whole["gka"]) == (final["usage"], final["gka"])
    thought = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert len("<think>\nhm\n</think>") <= thought <= len("<think>\nhm\n</think>\n\n")


def test_the_clients_own_stream_takes_every_event(client):
    text = f"<think>hm</think>ok {CALL}"
    with client.responses.stream(model="fake", input=says(text), tools=[TOOL]) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts[-1] == final.output_text == "ok "
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].parsed_arguments == {"town": "Rome"}
    with client.responses.stream(model="fake", input=says("END"), extra_body={"stop": "END"}) as stream:  # no word
        assert stream.get_final_response().output_text == ""


def test_certainty_comes_with_every_token(server):
    body = {"input": says("ab"), "certainty": True}
    got = server.post("/v1/responses", body)
    assert got["gka"]["certainty"] == pytest.approx([0.97, 0.98, 0.56])
    told = [event["gka"] for event in events_of(server, body) if event["type"] == "response.output_text.delta"]
    assert [one["certainty"][0] for one in told] == pytest.approx([0.97, 0.98])


# --- tools


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ],
)
def test_a_call_that_is_insisted_on_comes(client, choice):
    tools = [{"type": "function", "name": "other", "parameters": None, "strict": False}, TOOL]
    tools = tools[1:] if choice == "required" else tools
    got = client.responses.create(
        model="fake", input="x", tools=tools, tool_choice=choice, max_output_tokens=200, extra_body={"seed": 1}
    )
    (call,) = got.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["town"] in ("Rome", "Oslo")
    free = client.responses.create(model="fake", input=says(CALL), tools=tools, tool_choice="none")
    assert free.output_text == CALL


class Weather(BaseModel):
    town: str


def test_a_call_goes_round_with_its_items_sent_again(client):
    tool = pydantic_function_tool(Weather)["function"]
    tools = [ResponsesPydanticFunctionTool({"type": "function", **tool}, Weather)]
    text = '<tool_call>\n{"name": "Weather", "arguments": {"town": "Rome"}}\n</tool_call>'
    talk = [{"role": "user", "content": says(text)}]
    asked = client.responses.parse(model="fake", input=talk, tools=tools, store=False)
    (call,) = asked.output
    assert call.parsed_arguments == Weather(town="Rome")
    talk += [item.to_dict() for item in asked.output]
    talk += [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    talk += [{"role": "user", "content": says("It rains.")}]
    assert client.responses.create(model="fake", input=talk, tools=tools, store=False).output_text == "It rains."


# --- clients that go away, servers that stop


def test_a_client_that_leaves_in_mid_stream_frees_its_slot():
    with fake(slots=1, step_us=5_000) as server:
        client = OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        stream = client.responses.create(model="fake", input="x", stream=True, max_output_tokens=3000)
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        assert server.running() == 1
        stream.close()
        server.wait_until_idle()
        assert client.responses.create(model="fake", input="SAY:again").output_text == "again"


def test_a_stream_that_the_server_has_to_end_fails_by_an_event():
    with fake(step_us=20_000, drain_ms=100) as server:
        connection = server.connect()
        connection.request("POST", "/v1/responses", json.dumps({"input": "x", "stream": True}))
        response = connection.getresponse()
        response.read1(10)
        server.process.terminate()
        *_, last, rest = response.read().decode().split("\n\n")
        connection.close()
    name, data = last.split("\n")
    failed = json.loads(data.removeprefix("data: "))["response"]
    assert (name, rest) == ("event: response.failed", "")
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "stopping" in failed["error"]["message"]


def test_a_stream_tells_at_once_that_it_was_taken_and_lives():
    with fake(step_us=300_000, beat_ms=40) as server:
        connection = server.connect()
        connection.request("POST", "/v1/responses", json.dumps({"input": "SAY:a", "stream": True}))
        blocks = connection.getresponse().read().decode().split("\n\n")
        connection.close()
    silent = [block for block in blocks if block.startswith(": ")]
    named = [block.split("\n")[0] for block in blocks if block.startswith("event: ")]
    assert len(silent) >= 3
    assert named[0] == "event: response.created" and named[-1] == "event: response.completed"


# --- responses that are kept


def test_a_conversation_goes_on_from_a_response(client, server):
    first = client.responses.create(model="fake", instructions="Be brief.", input=says(CALL), tools=[TOOL])
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    asked = [output, {"role": "user", "content": says("It rains.")}]
    again = {"model": "fake", "tools": [TOOL], "include": LOGPROBS}
    second = client.responses.create(input=asked, previous_response_id=first.id, **again)
    assert (second.output_text, second.previous_response_id) == ("It rains.", first.id)
    # As if all of it had been sent; instructions are the first answer's alone.
    sent = [{"role": "user", "content": says(CALL)}, *(item.to_dict() for item in first.output), *asked]
    whole = client.responses.create(input=sent, **again)
    assert whole.usage.input_tokens == second.usage.input_tokens
    assert whole.output[0].content[0].logprobs == second.output[0].content[0].logprobs
    on = {"model": "fake", "tools": [TOOL], "previous_response_id": second.id}
    with client.responses.stream(input=says("Yes."), **on) as stream:
        third = stream.get_final_response()
    assert third.output_text == "Yes." and third.usage.input_tokens > second.usage.input_tokens
    assert client.responses.retrieve(third.id).output_text == "Yes."
    # The items of a kept answer may also be named by their ids.
    named = [sent[0], *({"type": "item_reference", "id": item.id} for item in first.output), *asked]
    short = client.responses.create(input=named, **again)
    assert short.output[0].content[0].logprobs == second.output[0].content[0].logprobs
    with pytest.raises(BadRequestError, match="a second time") as twice:
        client.responses.create(input=[*named, named[1]], **again)
    assert twice.value.param == f"input[{len(named)}]"
    # Scores are the answer's own, and not what it goes on with.
    further = client.responses.create(model="fake", input=says("So."), previous_response_id=second.id, tools=[TOOL])
    said = [item for item in client.responses.input_items.list(further.id, limit=100) if item.id == second.output[0].id]
    assert [part.logprobs for item in said for part in item.content] == [None]
    branch = client.responses.create(input=says("No."), **on)
    assert branch.usage.input_tokens == third.usage.input_tokens - 1


def test_what_is_kept_can_be_read_listed_and_forgotten(client):
    talk = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
        {"type": "function_call", **CALLED},
        {"type": "function_call_output", "call_id": "c1", "output": "rain", "id": "mine"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "user", "content": says("Hello")},
    ]
    made = client.responses.create(model="fake", input=talk)
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    items = list(client.responses.input_items.list(made.id, order="asc", limit=2))  # page after page
    kinds = ["message"] * 3 + ["function_call", "function_call_output", "reasoning", "message"]
    assert [item.type for item in items] == kinds
    assert [item.content[0].text for item in items[:3]] == ["s", "u", "a"]
    assert (items[4].id, items[4].output, items[5].id) == ("mine", "rain", "rs_1")
    assert [item.id for item in client.responses.input_items.list(made.id)] == [item.id for item in items[::-1]]
    page = client.responses.input_items.list(made.id, limit=3, after="mine")
    assert [item.type for item in page.data] == kinds[3::-1][:3] and page.has_more
    next_one = client.responses.create(model="fake", input=says("More"), previous_response_id=made.id)
    listed = list(client.responses.input_items.list(next_one.id, order="asc"))
    assert [item.id for item in listed[:-1]] == [*(item.id for item in items), made.output[0].id]
    for wrong, param in [({"limit": 0}, "limit"), ({"after": "x"}, "after"), ({"order": "up"}, "order")]:
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.input_items.list(made.id, **wrong)
        assert refused.value.param == param
    with pytest.raises(openai.BadRequestError, match="comes whole"):
        client.responses.retrieve(made.id, stream=True)
    client.responses.delete(made.id)
    assert client.responses.retrieve(next_one.id).output_text == "More"
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError) as missing:
            call(made.id)
        assert missing.value.code == "response_not_found"
    gone = {"model": "fake", "input": "x", "previous_response_id": made.id}
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**gone, **more)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_was_not_to_be_kept_or_broke_off_is_not(client, server):
    unkept = client.responses.create(model="fake", input=says("x"), store=False)
    assert server.ask("GET", f"/v1/responses/{unkept.id}")[0] == 404
    cut = client.responses.create(model="fake", input=says("Hello"), max_output_tokens=2)
    more = client.responses.create(model="fake", input=says("on"), previous_response_id=cut.id)
    assert more.output_text == "on"


def test_a_key_finds_its_own_responses_alone():
    with fake(keys="one,two") as server:
        one, two = (OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
        made = one.responses.create(model="fake", input="SAY:mine")
        for call in (two.responses.retrieve, two.responses.delete, two.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        with pytest.raises(openai.BadRequestError, match="kept here for this key to go on from"):
            two.responses.create(model="fake", input="x", previous_response_id=made.id)
        with pytest.raises(openai.BadRequestError, match="no answer that is kept here for this key has it"):
            two.responses.create(model="fake", input=[{"type": "item_reference", "id": made.output[0].id}])
        assert one.responses.retrieve(made.id).output_text == "mine"
        status, _, answer = server.ask("GET", f"/v1/responses/{made.id}", Authorization="")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        # Whoever names a request cannot take another's place, nor his own earlier one's.
        ids = [server.ask("POST", "/v1/responses", {"input": "SAY:x"}, X_Request_Id="r")[2]["id"] for _ in range(2)]
        assert len({made.id, *ids}) == 3


def test_those_not_asked_for_longest_make_room():
    def make(server, text):
        return server.post("/v1/responses", {"input": "SAY:" + text})["id"]

    def kept(server, *ids):
        return [server.ask("GET", f"/v1/responses/{one}")[0] == 200 for one in ids]

    with fake(responses=2) as server:
        first, second = make(server, "a"), make(server, "b")
        assert kept(server, first) == [True]  # and it was asked for last
        third = make(server, "c")
        assert kept(server, first, second, third) == [True, False, True]
    with fake(response_bytes=4500) as server:
        ids = [make(server, "x" * 500) for _ in range(5)]
        assert kept(server, *ids)[-2:] == [True, True] and kept(server, *ids)[0] is False
        large = make(server, "x" * 1950)  # more than all may take: nobody gives way to it
        assert kept(server, large, *ids[-2:]) == [False, True, True]
    with fake(responses=0) as server:
        answer = server.post("/v1/responses", {"input": "SAY:a"})
        assert answer["store"] is False and kept(server, answer["id"]) == [False]


def test_the_paths_are_counted_and_let_in_as_the_others_are():
    with fake(cors="https://friend.example", streams=1) as server:
        made = server.ask("POST", "/v1/responses", {"input": "SAY:a"}, Origin="https://friend.example")
        assert made[1]["Access-Control-Allow-Origin"] == "https://friend.example"
        path = f"/v1/responses/{made[2]['id']}"
        assert server.ask("GET", path, Origin="https://evil.example")[0] == 403
        assert server.ask("OPTIONS", path, Origin="https://friend.example")[0] == 204
        assert server.ask("PUT", path)[1]["Allow"] == "GET, HEAD, DELETE, OPTIONS"
        assert server.ask("POST", "/responses", {"input": "x"})[0] == 404
        metrics = server.get("/metrics")
        assert 'gka_http_requests_total{route="/v1/responses",status="200"} 1' in metrics
        assert 'gka_requests_finished_total{model_name="fake",finished_reason="stop"} 1' in metrics
