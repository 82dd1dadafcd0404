"""The interface as clients meet it, over real weights: OpenAI's own client, a strict one, and rude ones."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace

import openai
import pytest
from serve_http import HANG_S, Serving, events, is_closed, limits, read_response, receive, request, serving, until, user
from support import collect, settings

from specli.config import GenerationOptions, TemplateOptions
from specli.errors import EngineError, Unavailable
from specli.events import Finished
from specli.exact import Proof
from specli.serve.app import N_HELPING, Service, _EventStream, _failure
from specli.serve.prompts import Prompts
from specli.serve.protocol import MAX_TOKENS
from specli.session import Session

pytestmark = pytest.mark.model

N_SLOTS, N_CTX = 4, 640
ENDLESS = {"ignore_eos": True, "max_tokens": 600, "cache_prompt": False}
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}\n{% endfor %}"
)
QUESTION = "Name three colours."
STORY = "Once upon a time there was"


@pytest.fixture(scope="module")
def session(q4_0_path, draft_path) -> Iterator[Session]:
    model = {"n_ctx": N_CTX, "n_sequences": N_SLOTS, "n_batch": 64}
    with Session(settings(q4_0_path, draft_path, model=model)) as made:
        yield made


@pytest.fixture(scope="module")
def plain(q4_0_path) -> Iterator[Session]:
    """One answer at a time and no drafts, to compare with; its template wants roles in turn."""
    options = settings(q4_0_path, model={"n_ctx": N_CTX, "n_batch": 64}, type="none")
    with Session(replace(options, template=TemplateOptions(STRICT))) as made:
        yield made


@pytest.fixture(scope="module")
def exact(q4_0_path, draft_path) -> Iterator[Session]:
    """``--exact``, with the settings that its proof finds for this file: who else is answered changes nothing."""
    proof = Proof({"flash_attn": "on", "cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 17, 1.0, (16,))
    options = settings(q4_0_path, draft_path, model={"n_ctx": N_CTX, "n_sequences": N_SLOTS})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specli.exact.settle", lambda *_arguments: proof)
        with Session(replace(options, exact=True)) as made:
            yield made


@pytest.fixture(scope="module")
def server(session) -> Iterator[Serving]:
    with serving(session, alias="the-model", max_body_bytes=1 << 16) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(request) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_idle()


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=HANG_S) as made:
        yield made


def message(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def error(response, status: int, param: str | None = None) -> str:
    """The message of a refusal, whose body must have OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    told = response.json()["error"]
    assert set(told) == {"message", "type", "param", "code"}
    assert told["param"] == param
    assert "\n" not in told["message"]
    return told["message"]


# -- OpenAI's client


def test_chat(client) -> None:
    answer = client.chat.completions.create(model="the-model", messages=[user(QUESTION)], temperature=0, max_tokens=12)
    assert answer.object == "chat.completion"
    assert answer.model == "the-model"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.choices[0].logprobs is None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 12
    # what came may be sent back
    again = [user(QUESTION), answer.choices[0].message, user("More.")]
    assert client.chat.completions.create(model="the-model", messages=again, max_tokens=1).choices[0].message.content


def test_completions_of_several_prompts(client) -> None:
    answer = client.completions.create(
        model="the-model", prompt=["One two", "Red green"], n=2, temperature=0, max_tokens=4, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text != answer.choices[2].text
    assert answer.usage.completion_tokens == 16


def test_a_stream_is_the_answer_in_pieces(client) -> None:
    asked = {"model": "the-model", "messages": [user(QUESTION)], "temperature": 0, "max_tokens": 16, "seed": 1}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    chunks = [*client.chat.completions.create(**asked, stream=True, logprobs=True, top_logprobs=2)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    entries = [entry for chunk in chunks if (told := chunk.choices[0].logprobs) for entry in told.content]
    assert [(entry.token, entry.bytes) for entry in entries] == [
        (entry.token, entry.bytes) for entry in whole.choices[0].logprobs.content
    ]
    assert all(chunk.usage is None for chunk in chunks)


def test_stop_usage_streams_of_completions_and_errors_as_the_openai_client_has_them(client) -> None:
    asked = {"model": "the-model", "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**asked)
    stop = whole.choices[0].text.strip()[3:5]
    cut = client.completions.create(**asked, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert whole.choices[0].text.startswith(cut.choices[0].text)
    assert stop not in cut.choices[0].text
    chunks = [*client.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{**asked, "temperature": -1})
    assert (caught.value.status_code, caught.value.param) == (400, "temperature")
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(**asked, best_of=3)


def test_models(client, server) -> None:
    assert [model.id for model in client.models.list()] == ["the-model"]
    assert client.models.retrieve("the-model").id == "the-model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    assert server.http.head("/v1/models").status_code == server.http.head("/health").status_code == 200


def test_a_schema_is_kept(client) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "n": {"type": "integer"}},
        "required": ["colour", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for seed in (1, 2):
        answer = client.chat.completions.create(
            model="the-model", messages=[user(QUESTION)], response_format=form, max_tokens=60, seed=seed
        )
        if answer.choices[0].finish_reason == "stop":
            found = json.loads(answer.choices[0].message.content)
            assert set(found) == {"colour", "n"}
            assert found["colour"] in ("red", "green")
            assert isinstance(found["n"], int)


def test_json_object(client) -> None:
    answer = client.chat.completions.create(
        model="the-model",
        messages=[user("A JSON object with one short field.")],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=60,
    )
    assert answer.choices[0].message.content.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def pieces_with(session, mark: bytes) -> dict[str, int]:
    """A ``logit_bias`` against all tokens with ``mark``."""
    return {str(token): -100 for token in range(session.engine.n_vocab) if mark in session.model.piece(token)}


REFUSED, FINISHED = 'specli_requests_refused_total{{kind="{}"}}', 'specli_requests_finished_total{{reason="{}"}}'


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_allows_no_token_is_the_clients_fault(server, session, stream: bool) -> None:
    before = [server.counter(REFUSED.format(kind)) for kind in ("invalid", "engine")]
    asked = {"response_format": {"type": "json_object"}, "logit_bias": pieces_with(session, b"{"), "stream": stream}
    told = error(server.chat(**asked), 400, "response_format")
    assert told.startswith("response_format with logit_bias: the grammar allows no token behind")
    after = [server.counter(REFUSED.format(kind)) for kind in ("invalid", "engine")]
    assert after == [before[0] + 1, before[1]]


def test_a_request_that_comes_to_a_dead_end_is_told_in_its_stream(server, session) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "empty", "schema": schema}}
    before = [server.counter(REFUSED.format(kind)) for kind in ("invalid", "engine")]
    reply = server.chat(response_format=wanted, logit_bias=pieces_with(session, b"}"), stream=True)
    assert reply.status_code == 200
    told = json.loads(reply.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert (told["type"], told["param"]) == ("invalid_request_error", "response_format")
    after = [server.counter(REFUSED.format(kind)) for kind in ("invalid", "engine")]
    assert after == [before[0] + 1, before[1]]


def test_what_a_schema_says_beyond_its_grammar_is_told(server) -> None:
    schema = {"type": "object", "properties": {"not": {"type": "integer", "minimum": 3}}, "required": ["not"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    answer = server.chat(response_format=form)
    assert answer.status_code == 200
    assert answer.headers["specli-unenforced"] == "minimum"  # "not" is the name of a property there
    assert server.chat(response_format=form, stream=True).headers["specli-unenforced"] == "minimum"
    form["json_schema"]["strict"] = True
    assert "minimum" in error(server.chat(response_format=form), 400, "response_format")
    assert "specli-unenforced" not in server.chat().headers


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "frob"},
        {"$ref": "http://127.0.0.1:1/x"},
        {"type": "string", "pattern": "\\d"},
        {"type": "array", "items": {}, "minItems": 10**9},  # the converter would write out each of them
        {"type": "string", "pattern": "a{1000000000}"},
        {"type": "string", "pattern": f"^{'a?' * 700}$"},  # half a second for each character, for everybody
        {"enum": [*range(5000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 99999} for i in range(700)}},
        {"properties": 5},
    ],
)
def test_a_schema_that_is_no_grammar_is_refused_with_the_reason(server, schema: object) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert "schema" in error(server.chat(response_format=form), 400, "response_format")


def test_a_grammar_forgets_the_texts_that_it_has_seen(server, session) -> None:
    """It is kept for the next request, and each of its states costs memory."""
    import gc

    from specli.engine.grammar import Grammar

    def n_states() -> int:
        gc.collect()
        return sum(isinstance(one, Grammar) for one in gc.get_objects())

    form = {"type": "json_object"}
    server.chat(response_format=form, max_tokens=4, seed=9, temperature=2)
    server.wait_idle()
    before = n_states()
    for seed in range(3):
        server.chat(response_format=form, max_tokens=16, seed=seed, temperature=2)
    server.wait_idle()
    assert n_states() <= before + 20  # those of the answer that a slot remembers


# -- streams, read strictly


def check_chunks(chunks: Sequence[dict], kind: str, n: int = 1, has_usage: bool = False) -> None:
    """M6, M7, M8: every field of every chunk."""
    first = chunks[0]
    assert first["id"].startswith("chatcmpl-" if kind == "chat.completion.chunk" else "cmpl-")
    assert isinstance(first["created"], int)
    if has_usage:
        *chunks, last = chunks
        assert last["choices"] == []
        assert set(last) == {"id", "object", "created", "model", "choices", "usage", "timings"}
    ends, roles = dict.fromkeys(range(n)), dict.fromkeys(range(n), 0)
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices", *(["usage"] if has_usage else [])}
        assert chunk.get("usage") is None  # with include_usage all chunks have it, null but in the last
        assert (chunk["id"], chunk["created"]) == (first["id"], first["created"])
        assert (chunk["object"], chunk["model"]) == (kind, "the-model")
        (part,) = chunk["choices"]
        assert ends[part["index"]] is None, "something comes behind the end"
        ends[part["index"]] = part["finish_reason"]
        if kind == "chat.completion.chunk":
            assert set(part) == {"index", "delta", "logprobs", "finish_reason"}
            assert set(part["delta"]) <= {"role", "content", "refusal"}
            roles[part["index"]] += "role" in part["delta"]
        else:
            assert set(part) == {"index", "text", "logprobs", "finish_reason"}
    assert all(end in ("stop", "length") for end in ends.values())
    if kind == "chat.completion.chunk":
        assert set(roles.values()) == {1}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("usage", [None, False, True])
def test_every_chunk_is_whole(server, n: int, usage: bool | None) -> None:
    asked = {"max_tokens": 6, "n": n, "stream": True, "seed": 3}
    if usage is not None:
        asked["stream_options"] = {"include_usage": usage}
    chat = events(server.chat(**asked))
    check_chunks(chat, "chat.completion.chunk", n, bool(usage))
    check_chunks(events(server.complete(**asked)), "text_completion", n, bool(usage))
    if usage:
        whole = server.chat(max_tokens=6, n=n, seed=3).json()["usage"]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert chat[-1]["usage"][name] == whole[name]


def test_an_answer_without_text(server) -> None:
    for asked in (
        {"max_tokens": 0},
        {"max_tokens": 5, "stop": [" a", " the", " in", " was", ",", ".", "\n", "O", " "]},
    ):
        answer = server.complete(**asked, logprobs=1).json()
        assert answer["choices"][0]["text"] == ""
        assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["logprobs"]["tokens"]) == 0
        chunks = events(server.complete(**asked, stream=True))
        check_chunks(chunks, "text_completion")
        assert len(chunks) == 1


def test_later_errors_come_in_the_stream(server, monkeypatch) -> None:
    """M9. Not as a comment, a field of another name, or a connection that breaks."""
    is_broken = threading.Event()
    evaluate = server.session.engine.evaluate

    def fail(*given, **named):
        if is_broken.is_set():
            raise EngineError("the engine has a cold")
        return evaluate(*given, **named)

    monkeypatch.setattr(server.session.engine, "evaluate", fail)
    body = {"prompt": STORY, "stream": True, **ENDLESS}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        is_broken.set()
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the engine has a cold"
    assert error(server.complete(), 500) == "the engine has a cold"
    is_broken.clear()
    assert server.complete().status_code == 200


def test_a_fault_of_ours_in_a_stream_is_told(server, monkeypatch) -> None:
    def fail(*_given):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("specli.serve.replies.Envelope.chunk", fail)
    response = server.chat(stream=True)
    assert "secret" not in response.text
    assert json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))["error"]["type"] == "server_error"


# -- log probabilities (M11, M12)


@pytest.fixture(scope="module")
def drafting_server(q4_0_path, draft_path) -> Iterator[Serving]:
    """It drafts in every round, whether that pays on this machine or not."""
    model = {"n_ctx": N_CTX, "n_sequences": N_SLOTS, "n_batch": 64}
    options = settings(q4_0_path, draft_path, model=model, type="draft", n_max=3, fixed=True)
    with Session(options) as session, serving(session) as running:
        yield running


def test_logprobs_are_those_of_plain_decoding(drafting_server, plain) -> None:
    prompt = plain.text_ids("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,")
    expected = collect(plain.generate(prompt, GenerationOptions(24, n_logprobs=3))).stats.logprobs
    assert expected is not None
    answer = drafting_server.complete(prompt, max_tokens=24, logprobs=3, cache_prompt=False).json()
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    told = answer["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(told["top_logprobs"]) == answer["usage"]["completion_tokens"] == 24
    assert told["token_logprobs"] == pytest.approx([entry.logprob for entry in expected], abs=1e-3)
    assert all(value <= 0 for value in told["token_logprobs"])
    for best, entry in zip(told["top_logprobs"], expected, strict=True):
        assert list(best.values()) == pytest.approx([value for _, value in entry.top], abs=1e-3)
    assert "".join(told["tokens"]) == answer["choices"][0]["text"]
    chunks = events(drafting_server.complete(prompt, max_tokens=24, logprobs=3, cache_prompt=False, stream=True))
    values = [x for chunk in chunks if (part := chunk["choices"][0]["logprobs"]) for x in part["token_logprobs"]]
    assert values == pytest.approx(told["token_logprobs"], abs=1e-3)


def test_chat_logprobs(server) -> None:
    answer = server.chat(temperature=0, max_tokens=10, logprobs=True, top_logprobs=2).json()
    told = answer["choices"][0]["logprobs"]["content"]
    assert len(told) == answer["usage"]["completion_tokens"]
    for entry in told:
        assert entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]


# -- stop strings


def test_a_stop_string_never_appears(server) -> None:
    prompt = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,"
    for stop in ([" 15"], [", 14, 15", "zzz"], "5"):
        answer = server.complete(prompt, max_tokens=40, stop=stop, logprobs=0, seed=1).json()
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert not any(text in choice["text"] for text in ([stop] if isinstance(stop, str) else stop))
        assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
        assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]
        chunks = events(server.complete(prompt, max_tokens=40, stop=stop, logprobs=0, seed=1, stream=True))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
        assert [x for chunk in chunks if (part := chunk["choices"][0]["logprobs"]) for x in part["tokens"]] == choice[
            "logprobs"
        ]["tokens"]


# -- seeds (H15, H17)


def test_a_seed_gives_the_text_of_the_command_line(server, specli, q4_0_path, draft_path) -> None:
    asked = {"temperature": 2, "seed": 42, "max_tokens": 20}
    texts = {message(server.chat(QUESTION, **asked).json()) for _ in range(3)}
    flags = ("-m", q4_0_path, "-md", draft_path, "-t", "1", "-c", str(N_CTX), "-n", "20", "--temp", "2", "-s", "42")
    done = specli("run", *flags, "-p", QUESTION)
    assert done.code == 0, done.err
    assert {text.rstrip("\n") for text in texts} == {done.out.decode().rstrip("\n")}
    assert message(server.chat(QUESTION, **{**asked, "seed": 43}).json()) not in texts


def test_a_seed_gives_one_text_whatever_was_asked_before(q4_0_path) -> None:
    """H15, alone: what other slots still hold of a shared cache would move the logits; they are the same to the bit."""
    asked = {"temperature": 1.2, "seed": 7, "max_tokens": 60, "logprobs": True}
    model = {"n_ctx": N_CTX, "n_sequences": N_SLOTS, "n_threads": 2}  # with one thread there is nothing to divide
    with Session(settings(q4_0_path, model=model, type="none")) as session, serving(session) as server:
        answers = [json.dumps(server.chat(QUESTION, **asked).json()["choices"]) for _ in range(2)]
        for i in range(N_SLOTS):
            server.chat(f"{i}: {STORY}", temperature=1, max_tokens=90, cache_prompt=bool(i % 2))
        answers += [json.dumps(server.chat(QUESTION, **asked).json()["choices"]) for _ in range(2)]
    assert len(set(answers)) == 1


def test_a_seed_gives_one_text_alone_and_in_company(exact) -> None:
    asked = {"temperature": 2, "seed": 42, "max_tokens": 20}
    with serving(exact) as server:
        alone = [message(server.chat(QUESTION, **asked).json()) for _ in range(2)]
        others = [server.ask(**ENDLESS, stream=True, temperature=1.5, seed=i) for i in range(3)]
        until(lambda: server.scheduler.n_running == 3)
        together = [message(server.chat(QUESTION, **asked).json()) for _ in range(3)]
        for one in others:
            one.close()
        assert len({*alone, *together}) == 1
        pairs = [server.chat(n=2, seed=5, temperature=2).json()["choices"] for _ in range(2)]
        texts = [[choice["message"]["content"] for choice in pair] for pair in pairs]
        assert texts[0] == texts[1]
        assert texts[0][0] != texts[0][1]  # several answers under one seed


def test_a_greedy_answer_is_the_same_in_company(exact) -> None:
    prompt = "Copy: The cat sat. The cat sat. The cat sat. The cat sat."
    with serving(exact) as server:
        alone = server.complete(prompt, max_tokens=24).json()["choices"][0]["text"]
        others = [server.ask(**ENDLESS, stream=True, temperature=1.5, seed=i) for i in range(4)]
        until(lambda: server.scheduler.n_running == N_SLOTS)
        others.pop(0).close()
        assert server.complete(prompt, max_tokens=24).json()["choices"][0]["text"] == alone
        for one in others:
            one.close()


# -- settings


@pytest.mark.parametrize("temperature", [1e-9, 1e-300, 5e-324])
def test_a_temperature_of_almost_nothing_is_greedy(server, temperature: float) -> None:
    """H18: without overflow."""
    asked = {"max_tokens": 8, "cache_prompt": False}
    greedy = server.complete(STORY, **asked).json()["choices"][0]["text"]
    assert server.complete(STORY, **asked, temperature=temperature).json()["choices"][0]["text"] == greedy


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1e9},
        {"temperature": 1e300},
        {"top_p": 1e-300},
        {"min_p": 1},
        {"typical_p": 1e-300},
        {"repeat_penalty": 1e-30},
        {"repeat_last_n": 2**31 - 1, "repeat_penalty": 2},
        {"top_k": 2**31 - 1},
        {"logit_bias": {"5": 100}},
        {"seed": -(2**63)},
        {"temperature": None},
    ],
)
def test_settings_at_their_bounds_are_answered(server, asked: dict) -> None:
    answer = server.chat(max_tokens=3, **asked)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0.7"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"presence_penalty": 10}, "presence_penalty"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"logit_bias": {"999999999": -100}}, "logit_bias"),
        ({"n": 17}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"tools": []}, "tools"),
        ({"\ud800": 1}, "�"),
    ],
)
def test_settings_out_of_bounds_are_refused(server, asked: dict, param: str) -> None:
    body = json.dumps({"messages": [user("hi")], **asked}).encode()
    error(server.http.post("/v1/chat/completions", content=body), 400, param)


@pytest.mark.parametrize("name", ["temperature", "top_p", "frequency_penalty"])
def test_nan_is_refused(server, name: str) -> None:
    body = f'{{"prompt": "x", "{name}": NaN}}'.encode()
    assert "NaN" in error(server.http.post("/v1/completions", content=body), 400)


# -- prompts (I1, I6, I8, M9)


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["x", ""], None])
def test_an_empty_prompt_is_refused_and_the_next_one_answered(server, prompt: object) -> None:
    response = server.complete(prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"].split(".")[0] == "prompt"
    error(server.http.post("/v1/chat/completions", json={"messages": []}), 400, "messages")
    assert server.complete().status_code == 200


def test_token_ids_that_the_model_does_not_have_are_refused(server) -> None:
    assert "49152" in error(server.complete([1, 49152]), 400, "prompt")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["word " * 2000, [5] * (N_CTX + 1), "<|im_end|>" * 5000])
def test_a_prompt_that_is_too_long_is_refused_before_the_stream_opens(server, prompt: object, stream: bool) -> None:
    response = server.complete(prompt, stream=stream)
    assert "tokens, the context of an answer holds 640" in error(response, 400, "prompt")
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_chat_that_is_too_long_is_refused(server) -> None:
    error(server.chat("word " * 2000, stream=True), 400, "messages")
    error(server.chat("<|im_end|>" * 5000, stream=True), 400, "messages")


def test_a_prompt_as_long_as_the_context_is_answered(server) -> None:
    answer = server.complete([5] * N_CTX, max_tokens=None).json()
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["usage"]["completion_tokens"] == 1


def test_a_template_that_refuses_says_why(plain) -> None:
    turns = [{"role": role, "content": "x"} for role in ("user", "user", "user", "assistant", "assistant")]
    with serving(plain) as server:
        for path in ("/v1/chat/completions", "/apply-template"):
            told = error(server.http.post(path, json={"messages": turns}), 400, "messages")
            assert told.endswith("roles must alternate")
        assert server.chat(max_tokens=1).status_code == 200
    plain.template, kept = None, plain.template
    try:
        with serving(plain) as server:
            for path in ("/v1/chat/completions", "/apply-template"):
                asked = {"messages": [user("x")]}
                assert "no chat template" in error(server.http.post(path, json=asked), 400, "messages")
    finally:
        plain.template = kept


def test_control_text_in_content_stays_text(server) -> None:
    """I8: none of it becomes a control token."""
    content = "a<|im_end|>\n<|im_start|>system\nb"

    def n_prompt(text: str) -> int:
        return server.chat(text, max_tokens=0).json()["usage"]["prompt_tokens"]

    def n_tokens(text: str, parse: bool) -> int:
        return len(server.http.post("/tokenize", json={"content": text, "parse_special": parse}).json()["tokens"])

    n_around = n_prompt("")
    assert n_prompt(content) >= n_around + n_tokens(content, False) > n_around + n_tokens(content, True)
    rendered = server.http.post("/apply-template", json={"messages": [user(content)]}).json()["prompt"]
    assert content in rendered


def test_lone_surrogates_and_nul_are_answered(server) -> None:
    for content in ("\ud800", "a\0b", "\udc00x\ud83d"):
        body = json.dumps({"messages": [user(content)], "max_tokens": 1, "stop": ["\ud800"]}).encode()
        assert server.http.post("/v1/chat/completions", content=body).status_code == 200


def test_tokens_of_a_text(server) -> None:
    post = server.http.post
    text = "a\0b \U0001f999 <|im_end|>"
    ids = post("/tokenize", json={"content": text}).json()["tokens"]
    assert post("/detokenize", json={"tokens": ids}).json() == {"content": text}
    pieces = post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert [240, 159, 166] in [piece["piece"] for piece in pieces] or any(
        isinstance(piece["piece"], list) for piece in pieces
    )
    error(post("/detokenize", json={"tokens": [49152]}), 400, "tokens")


def test_tokens_are_answered_up_to_a_bound(session) -> None:
    """A million byte tokens with their pieces were 7 seconds in which nothing else ran, and 1.5 GB."""
    with serving(session) as server:
        post, most = server.http.post, MAX_TOKENS
        for rest in ({}, {"with_pieces": True}):
            found = error(post("/tokenize", json={"content": "\U00013000" * 32_769, **rest}), 400, "content")
            assert found == f"content has 131076 tokens, expected at most {most}; send it in parts"
        assert len(post("/tokenize", json={"content": "\U00013000" * 32_768}).json()["tokens"]) == most
        found = error(post("/tokenize", json={"content": "ä" * 2**19 + "a"}), 400, "content")
        assert found.startswith("content: has 1048577 bytes, expected at most 1048576; send it in parts")
        found = error(post("/detokenize", json={"tokens": [1] * (most + 1)}), 400, "tokens")
        assert found == f"tokens: has {most + 1} entries, expected at most {most}"
        assert post("/detokenize", json={"tokens": [1] * most}).status_code == 200
        error(post("/apply-template", json={"messages": [user("a")] * 100_000}), 400, "messages")


def test_few_texts_are_tokenized_at_once(session, monkeypatch) -> None:
    running, seen = set(), []

    def plain(_self, text, *_more):
        running.add(text)
        seen.append(len(running))
        time.sleep(0.02)
        running.discard(text)
        return []

    monkeypatch.setattr(Prompts, "plain", plain)
    with serving(session) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        [*pool.map(lambda i: server.http.post("/tokenize", json={"content": str(i)}), range(24))]
    assert (len(seen), max(seen)) == (24, N_HELPING)


def test_control_texts_without_number_are_refused(session) -> None:
    """llama.cpp's time grows with their square: 40,000 are 20 seconds, 400,000 most of an hour."""
    with serving(session) as server:
        content = "<|im_end|>" * 100_000
        error(server.http.post("/tokenize", json={"content": content}), 400, "content")
        error(server.complete(content), 400, "prompt")
        error(server.chat(content), 400, "messages")
        error(server.chat("<" * 1_000_000), 400, "messages")


# -- refusals


def test_the_wrong_model_is_named(server, client) -> None:
    told = error(server.chat(model="x" * 5000), 404, "model")
    assert len(told) < 200
    assert "the-model" in told
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=[user("hi")])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/" + "x" * 5000, 404),
        ("GET", "/%ff%00", 404),
        ("GET", "/v1/models/", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("OPTIONS", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
    ],
)
def test_routes_that_are_not_there(server, method: str, path: str, status: int) -> None:
    response = server.http.request(method, path)
    assert response.status_code == status
    assert len(response.json()["error"]["message"]) < 300
    assert (status == 405) == ("allow" in response.headers)


def test_keys(session) -> None:
    with serving(session, api_keys=("one", "two")) as server:
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "Basic one"},
            {"Authorization": "one"},
        ):
            for path in ("/v1/models", "/metrics", "/nowhere"):
                response = server.http.get(path, headers=headers)
                assert error(response, 401)
                assert response.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two"):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
                assert client.models.list().data
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="three", max_retries=0) as client:  # noqa: SIM117
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/v1/models", headers={"Authorization": b"Bearer \xff"}).status_code == 401


def test_keys_are_compared_in_constant_time(monkeypatch, session) -> None:
    compared = []
    monkeypatch.setattr(
        "specli.serve.guard.hmac.compare_digest", lambda one, other: compared.append(one) or one == other
    )
    with serving(session, api_keys=("one", "two")) as server:
        server.http.get("/v1/models", headers={"Authorization": "Bearer one"})
    assert compared == [b"one", b"two"]


def test_cors_only_where_it_was_asked_for(server, session) -> None:
    page = {"Origin": "https://page.example"}
    asks = {**page, "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type,x-stainless-lang"
    assert "access-control-allow-origin" not in server.http.get("/v1/models", headers=page).headers
    assert server.http.options("/v1/chat/completions", headers=asks).status_code == 403
    with serving(session, cors_origins=("https://page.example",), api_keys=("k",)) as other:
        allowed = other.http.options("/v1/chat/completions", headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
        refused = other.http.get("/v1/models", headers=page)
        assert refused.status_code == 401  # which a page may read
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        strange = other.http.get("/v1/models", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in strange.headers


# -- clients that go away (M1, M2, M3, M5)


def reset(made: socket.socket) -> None:
    """Gone without a goodbye."""
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.close()


LEAVING = {"close": socket.socket.close, "reset": reset, "half-close": lambda made: made.shutdown(socket.SHUT_WR)}


def read_chunks(made: socket.socket, n: int) -> bytes:
    seen = b""
    while seen.count(b"data: ") < n:
        seen += receive(made)
    return seen


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
def test_gone_while_streaming(server, leave: Callable[[socket.socket], None]) -> None:
    before = server.counter("specli_requests_aborted_total")
    made = server.ask(**ENDLESS, stream=True)
    read_chunks(made, 3)
    leave(made)
    server.wait_idle()
    assert server.counter("specli_requests_aborted_total") == before + 1
    made.close()


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING)
def test_gone_while_waiting_for_an_answer(server, leave: Callable[[socket.socket], None]) -> None:
    before = server.counter("specli_requests_aborted_total")
    made = server.ask(**ENDLESS, n=2)
    until(lambda: server.scheduler.n_running == 2)
    leave(made)
    server.wait_idle()
    assert server.counter("specli_requests_aborted_total") == before + 2
    made.close()


@pytest.mark.parametrize("stream", [False, True])
def test_choices_given_up_for_one_that_failed_have_not_left(server, monkeypatch, stream: bool) -> None:
    names = (REFUSED.format("timeout"), FINISHED.format("cancelled"), "specli_requests_aborted_total")
    before = [server.counter(name) for name in names]
    make = Service._job

    def hurried(self, asked, sampling, verifier, prompt, attempt, arrived_s, deliver):
        job = make(self, asked, sampling, verifier, prompt, attempt, arrived_s, deliver)
        return replace(job, deadline_s=arrived_s + 0.3) if attempt == 0 else job

    monkeypatch.setattr(Service, "_job", hurried)
    reply = server.complete(**ENDLESS, n=N_SLOTS, stream=stream)
    assert reply.status_code == 504 or '"timeout_error"' in reply.text
    server.wait_idle()
    assert [server.counter(name) for name in names] == [before[0] + 1, before[1] + N_SLOTS - 1, before[2]]


def test_gone_before_the_stream_begins() -> None:
    """While its head waits for a client that does not read what came before: there is no generator to close yet."""
    seen: list[str] = []

    async def events() -> AsyncGenerator[bytes, None]:
        seen.append("begun")
        yield b""

    async def leave() -> None:
        seen.append("left")

    async def receive() -> dict:
        return {"type": "http.disconnect"}

    async def send(_message: object) -> None:
        await asyncio.Event().wait()

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
    asyncio.run(_EventStream(events(), leave, {})(scope, receive, send))
    assert seen == ["left"]


def test_gone_during_the_prompt(server, session) -> None:
    """M2: it stops at the next batch."""
    before = server.counter("specli_prompt_tokens_total")
    made = server.ask(prompt=[7] * N_CTX, max_tokens=5)
    until(lambda: server.scheduler.n_running == 1)
    made.close()
    server.wait_idle()
    assert max(session.engine.n_past(i) for i in range(N_SLOTS)) < N_CTX or (
        server.counter("specli_prompt_tokens_total") == before
    )
    assert server.complete(max_tokens=2).status_code == 200


def test_gone_while_queued(exact) -> None:
    """M3, M5: nobody else is touched, and the dead take no place."""
    with serving(exact, n_queue=5) as server:
        asked = {"max_tokens": 40, "cache_prompt": False, "ignore_eos": True}
        alone = server.complete(STORY, **asked).json()["choices"][0]["text"]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            others = [server.ask(**ENDLESS, stream=True) for _ in range(N_SLOTS - 1)]
            until(lambda: server.scheduler.n_running == N_SLOTS - 1)
            watched = pool.submit(server.complete, STORY, **asked)
            until(lambda: server.scheduler.n_running == N_SLOTS)
            queued = [server.ask(max_tokens=1) for _ in range(5)]
            until(lambda: server.scheduler.n_waiting == 5 or watched.done())
            for one in queued:
                one.close()
            until(lambda: server.scheduler.n_waiting == 0)
            others.pop().close()
            assert server.complete(max_tokens=1).status_code == 200
            assert watched.result().json()["choices"][0]["text"] == alone
            assert server.scheduler.n_running == N_SLOTS - 2
            for one in others:
                one.close()
        server.wait_idle()


def test_only_names_of_this_machine_without_a_key(session) -> None:
    """A page at rebound.example, whose name points here, is of the same origin for its browser."""
    port = "8080"
    with serving(session) as server:
        for host, status in (
            ("localhost", 200),
            (f"localhost:{port}", 200),
            (f"LOCALHOST:{port}", 200),
            (f"127.0.0.1:{port}", 200),
            (f"[::1]:{port}", 200),
            ("rebound.example", 403),
            (f"rebound.example:{port}", 403),
            (f"127.0.0.1.rebound.example:{port}", 403),
            ("", 200),
        ):
            reply = server.http.get("/v1/models", headers={"Host": host})
            assert reply.status_code == status, host
            if status == 403:
                assert "--api-key" in reply.json()["error"]["message"]
        for origin, status in (
            ("http://localhost:3000", 200),
            ("http://127.0.0.1", 200),
            ("https://page.example", 403),
            ("null", 403),
        ):
            assert server.http.get("/v1/models", headers={"Origin": origin}).status_code == status, origin
    with serving(session, cors_origins=("https://page.example",)) as server:
        assert server.http.get("/v1/models", headers={"Origin": "https://page.example"}).status_code == 200
    with serving(session, api_keys=("k",)) as server:
        headers = {"Host": "llm.example", "Authorization": "Bearer k"}
        assert server.http.get("/v1/models", headers=headers).status_code == 200


def test_a_full_queue(session) -> None:
    with serving(session, n_queue=1) as server:
        running = [server.ask(**ENDLESS, stream=True) for _ in range(N_SLOTS)]
        until(lambda: server.scheduler.n_running == N_SLOTS)
        queued = server.ask(**ENDLESS)
        until(lambda: server.scheduler.n_waiting == 1)
        for asked in ({}, {"stream": True}):
            response = server.complete(**asked)
            assert "waiting already" in error(response, 429)
            assert int(response.headers["retry-after"]) >= 1
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:  # noqa: SIM117
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model=server.session.settings.target.label.removesuffix(".gguf"), prompt="x")
        assert server.counter('specli_requests_refused_total{kind="queue_full"}') == 3
        assert "at once" in error(server.complete(n=N_SLOTS + 2), 400, "n")  # never, however empty the queue
        for one in (*running, queued):
            one.close()
        server.wait_idle()
        assert server.complete(n=N_SLOTS + 1, max_tokens=1).status_code == 200


def test_out_of_time(session) -> None:
    with serving(session, timeout_s=0.2) as server:
        assert " time" in error(server.complete(**ENDLESS), 504)
        body = server.complete(**ENDLESS, stream=True).text
        assert "timeout_error" in body
        assert "[DONE]" not in body


def test_an_answer_that_the_server_cut_short_is_no_answer() -> None:
    cut = Finished(0, "cancelled", (1, 2), 1.0)
    assert isinstance(_failure([cut]), Unavailable)
    assert _failure([replace(cut, reason="length")]) is None


# -- connections


def test_who_reads_nothing_is_cut_off(session) -> None:
    """Or its answer would be kept for it for ever."""
    spaces = session.model.tokenize(" " * 1000, False, False)[0]  # a long piece
    body = json.dumps({"tokens": [spaces] * 120_000}).encode()
    with limits(stall_s=0.1), serving(session) as server, socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.connect(server.address)
        made.sendall(request("/detokenize", body))
        until(lambda: server.server.server_state.connections)
        until(lambda: not server.server.server_state.connections)
        assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
)
def test_who_never_ends_a_request_is_cut_off(server, sent: bytes) -> None:
    with limits(arrival_s=0.1), server.connect() as made:
        made.sendall(sent)
        assert is_closed(made)
    assert server.http.get("/health").status_code == 200


def test_a_patient_client_is_not_cut_off(server) -> None:
    """The time is that of sending a request: not of an answer, and not of the pause behind it."""
    with server.connect() as made:
        own = made.getsockname()

        def is_timed() -> bool:
            found = [one for one in server.server.server_state.connections if one.client == own]  # none at first
            return bool(found) and found[0]._arriving is not None

        buffer, whole = bytearray(), request("/v1/completions", b'{"prompt": "x", "max_tokens": 4}')
        made.sendall(whole[:20])
        until(is_timed)
        made.sendall(whole[20:])
        until(lambda: not is_timed())
        assert read_response(made, buffer)[0] == 200
        assert not is_timed()
        made.sendall(whole[:-1])
        until(is_timed)
        made.sendall(whole[-1:])
        assert read_response(made, buffer)[0] == 200
        assert not is_timed()


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 99999999999999999999",
        b"Content-Length: " + b"9" * 5000,
        b"Content-Length: -1",
        b"Content-Length: 5, 6",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: x",
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"X" * 100_000 + b": y",
    ],
)
def test_a_head_that_lies_is_refused(server, head: bytes) -> None:
    with server.connect() as made:
        start = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        made.sendall(start + head + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
        made.shutdown(socket.SHUT_WR)
        said = b""
        try:
            while data := made.recv(65536):
                said += data
        except ConnectionError:
            pass
        assert not said or said.split(b" ", 2)[1][:1] == b"4", said
    assert server.http.get("/health").status_code == 200


def test_a_body_that_is_too_long(server) -> None:
    long = b'"' + b"x" * (1 << 16) + b'"'
    told = error(server.http.post("/v1/completions", content=long), 413)
    assert "65536 bytes" in told
    error(server.http.post("/v1/completions", content=iter([long])), 413)  # chunked: no length is declared
    assert server.counter('specli_requests_refused_total{kind="too_large"}') >= 2


def test_a_body_shorter_than_declared_is_nothing(server) -> None:
    with server.connect() as made:
        made.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{}")
        made.shutdown(socket.SHUT_WR)
        assert is_closed(made)
    assert server.complete(max_tokens=1).status_code == 200


def test_connections_live_on_behind_errors(server) -> None:
    with server.connect() as made:
        buffer = bytearray()
        for path, body, status in (
            ("/v1/completions", b"{", 400),
            ("/nowhere", b"x" * 100, 404),
            ("/v1/completions", b"x" * 70_000, 413),
            ("/v1/models", b"", 405),
            ("/v1/completions", b'{"prompt": "x", "max_tokens": 1}', 200),
        ):
            made.sendall(request(path, body))
            assert read_response(made, buffer)[0] == status


def test_requests_sent_ahead_are_answered_in_order(server) -> None:
    bodies = [json.dumps({"prompt": "x", "max_tokens": n}).encode() for n in (3, 0, 2)]
    with server.connect() as made:
        made.sendall(b"".join(request("/v1/completions", body) for body in bodies))
        buffer = bytearray()
        counts = [json.loads(read_response(made, buffer)[2])["usage"]["completion_tokens"] for _ in bodies]
    assert counts == [3, 0, 2]


def test_a_hundred_at_once(session) -> None:
    with serving(session, n_queue=100) as server:
        asked = [server.ask(prompt=[5 + i], max_tokens=1) for i in range(100)]
        for made in asked:
            assert read_response(made)[0] == 200
            made.close()
    with serving(session, n_queue=1) as server:
        asked = [server.connect() for _ in range(100)]
        for made in asked:
            made.sendall(request("/health", b"", method="GET"))
        assert all(read_response(made)[0] == 200 for made in asked)
        for made in asked:
            made.close()


def test_tokenizing_while_the_engine_decodes(server) -> None:
    """In other threads than the engine's."""
    made = server.ask(**ENDLESS, stream=True)
    text = "The quick brown \U0001f98a jumps. " * 50
    expected = server.http.post("/tokenize", json={"content": text}).json()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: server.http.post("/tokenize", json={"content": text}).json(), range(40))]
    assert all(one == expected for one in found)
    made.close()


# -- the log


@pytest.mark.parametrize("is_on", [False, True])
def test_prompts_are_logged_only_where_it_was_asked_for(session, caplog, is_on: bool) -> None:
    caplog.set_level("DEBUG")
    with serving(session, log_prompts=is_on) as server:
        for stream in (False, True):
            server.chat("Xylophone\nquagga", stream=stream)
            server.complete("Xylophone\nquagga", stream=stream)
        server.complete("Xylophone", temperature=-1)
        server.complete("Xylophone " * 900)
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("specli")]
    assert any("TTFT" in line for line in logged)
    assert any("Xylophone" in line for line in logged) == is_on
    assert not any("\n" in line for line in logged)
