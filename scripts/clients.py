#!/usr/bin/env python3
"""Python clients against the server: openai, anthropic, ollama, pydantic-ai, litellm, instructor
and lm-eval.

Chats and tools are scripted (crates/server/examples/scripted.rs); lm-eval measures the embedded
model through `moeflux serve`, and its numbers are compared with `moeflux logits` and `moeflux
perplexity`. Servers and clients run in a network namespace with loopback only, where that is
allowed.

usage: clients.py [--keep DIR]

  --keep DIR  folder for the Python packages; otherwise a temporary one

SCRIPTED and MOEFLUX name built binaries; without them, cargo builds them.
"""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import traceback

HERE = pathlib.Path(__file__).resolve().parent
MAKE = HERE / "tool-model/make.py"
TALES = HERE.parent / "crates/tales/model"
# Each group has an environment: the last ones want older versions of openai than pydantic-ai.
PACKAGES = [
    ["openai", "anthropic", "ollama", "pydantic-ai-slim[openai]"],
    ["litellm", "mcp", "instructor"],
    ["lm-eval[api]", "transformers"],
]

# Set in the process that runs the checks, to the folder with the checkpoints.
INSIDE = "MOEFLUX_CLIENTS_WORK"
# The group of packages that process has.
GROUP = "MOEFLUX_CLIENTS_GROUP"

ASK = [{"role": "user", "content": "How is the weather in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Weather of a city", "parameters": SCHEMA}
OPENAI_TOOLS = [{"type": "function", "function": FUNCTION}]
ANTHROPIC_TOOLS = [{"name": "weather", "description": "Weather of a city", "input_schema": SCHEMA}]
THOUGHTS = "<think>\nI look it up.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLS = THOUGHTS + "Let me see.\n" + CALL
DONE = "Snow — in Oslo. ☃"


# ---- servers


@contextlib.contextmanager
def running(command):
    """Runs a server; its base URL without /v1."""
    process = subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            found = re.search(r"served at (http://\S*)/v1", line)
            if found:
                yield found[1]
                return
        raise RuntimeError("the server did not start:\n" + "".join(lines))
    finally:
        process.kill()
        process.wait()


def scripted(*answers):
    work = pathlib.Path(os.environ[INSIDE])
    script = work / "script.json"
    script.write_text(json.dumps(answers))
    return running(
        [os.environ["SCRIPTED"], "--model", work / "json", "--script", script]
        + ["--port", 0, "--ctx", 4096]
    )


# ---- checks: each raises an error, or returns a line for the report


def openai_chat():
    import openai

    with scripted(CALLS, CALLS, DONE, DONE) as url:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none")
        ask = {"model": "any", "messages": ASK, "tools": OPENAI_TOOLS}
        whole = client.chat.completions.create(**ask).choices[0]
        assert whole.finish_reason == "tool_calls", whole
        call = whole.message.tool_calls[0]
        assert json.loads(call.function.arguments) == {"city": "Oslo"}, call
        assert whole.message.reasoning_content == "I look it up.", whole
        # The accumulating helper of the library checks ids, indices and the end.
        with client.chat.completions.stream(**ask) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls", streamed
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        assert streamed.message.content == whole.message.content
        result = {"role": "tool", "tool_call_id": call.id, "content": "Snow"}
        ask["messages"] = [*ASK, whole.message, result]
        assert client.chat.completions.create(**ask).choices[0].message.content == DONE
        options = {"include_usage": True}
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options=options))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == DONE, text
        usage = chunks[-1].usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
        assert client.models.list().data[0].id == client.models.retrieve("scripted").id
        assert client.completions.create(model="any", prompt="Once").choices[0].text == DONE
        try:
            ask["messages"] = [{"role": "nobody", "content": ""}]
            client.chat.completions.create(**ask)
            raise AssertionError("an unknown role was accepted")
        except openai.BadRequestError as error:
            assert error.param == "messages[0].role", error.body
    return "chat, stream, tools both ways, usage, models, completions, errors"


def openai_responses():
    import openai

    with scripted(CALLS, CALLS, DONE, DONE) as url:
        client = openai.OpenAI(base_url=url + "/v1", api_key="none")
        tools = [{"type": "function", **FUNCTION}, {"type": "web_search"}]
        ask = {"model": "any", "input": ASK, "tools": tools}
        whole = client.responses.create(**ask)
        kinds = [item.type for item in whole.output]
        assert kinds == ["reasoning", "message", "function_call"], whole
        call = whole.output[2]
        assert json.loads(call.arguments) == {"city": "Oslo"}, call
        assert whole.output[0].content[0].text == "I look it up.", whole
        # The accumulating helper of the library checks order and indices.
        with client.responses.stream(**ask) as stream:
            numbers = [event.sequence_number for event in stream]
            streamed = stream.get_final_response()
        assert numbers == list(range(len(numbers))), numbers
        assert [item.type for item in streamed.output] == kinds, streamed
        assert streamed.output[2].arguments == call.arguments
        assert streamed.output_text == whole.output_text
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Snow"}
        done = client.responses.create(
            model="any", tools=tools, previous_response_id=whole.id, input=[result]
        )
        assert done.output_text == DONE and done.status == "completed", done
        # The same without the store: the items are sent back.
        items = [item.model_dump(exclude_none=True) for item in whole.output]
        done = client.responses.create(
            model="any", tools=tools, input=[*ASK, *items, result], store=False
        )
        assert done.output_text == DONE, done
        assert client.responses.retrieve(whole.id).output_text == whole.output_text
        client.responses.delete(whole.id)
        try:
            client.responses.retrieve(whole.id)
            raise AssertionError("a deleted response was found")
        except openai.NotFoundError:
            pass
        # The library asks for base64.
        vectors = client.embeddings.create(model="any", input=["Fox", "Crow"]).data
        floats = client.embeddings.create(model="any", input="Crow", encoding_format="float")
        both = zip(vectors[1].embedding, floats.data[0].embedding, strict=True)
        assert all(abs(a - b) < 1e-6 for a, b in both)
        assert abs(sum(x * x for x in vectors[0].embedding) - 1) < 1e-5
    return "responses, stream, tools both ways, the store, embeddings"


def ollama_client():
    import ollama

    with scripted(CALLS, CALLS, DONE) as url:
        client = ollama.Client(host=url)
        ask = {"model": "any", "messages": ASK, "tools": OPENAI_TOOLS}
        whole = client.chat(**ask)
        assert whole.message.thinking == "I look it up.", whole
        call = whole.message.tool_calls[0].function
        assert call.name == "weather" and call.arguments == {"city": "Oslo"}, call
        lines = list(client.chat(**ask, stream=True))
        calls = [call for line in lines for call in line.message.tool_calls or []]
        assert calls[0].function == call and lines[-1].done_reason == "stop", lines
        content = "".join(line.message.content or "" for line in lines)
        assert content == whole.message.content
        result = {"role": "tool", "tool_name": "weather", "content": "Snow"}
        ask["messages"] = [*ASK, whole.message, result]
        assert client.chat(**ask).message.content == DONE
        assert client.generate("any", "Weather?").response == DONE
        lines = client.generate("any", "Weather?", stream=True)
        assert "".join(line.response for line in lines) == DONE
        assert client.list().models[0].model == "scripted"
        shown = client.show("scripted")
        assert {"completion", "tools"} <= set(shown.capabilities), shown
        assert client.ps().models[0].context_length == 4096
        embedded = client.embed("any", ["Fox", "Crow"]).embeddings
        assert len(embedded) == 2 and len(embedded[0]) == len(embedded[1])
        try:
            client.chat("any", [{"role": "nobody", "content": "x"}])
            raise AssertionError("an unknown role was accepted")
        except ollama.ResponseError as error:
            assert "messages[0].role" in str(error), error
    return "chat, stream, tools both ways, generate, models, embed, errors"


def pydantic_ai_agent():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    for kind in [OpenAIChatModel, OpenAIResponsesModel]:
        with scripted(CALLS, DONE) as url:
            provider = OpenAIProvider(base_url=url + "/v1", api_key="none")
            agent = Agent(kind("any", provider=provider))
            asked = []

            @agent.tool_plain
            def weather(city: str) -> str:
                """Weather of a city."""
                asked.append(city)
                return "Snow"

            assert agent.run_sync(ASK[0]["content"]).output == DONE
            assert asked == ["Oslo"], asked
    return "an agent with a tool, by chat completions and by responses"


def anthropic_messages():
    import anthropic

    with scripted(CALLS, CALLS, DONE) as url:
        client = anthropic.Anthropic(base_url=url, api_key="none")
        ask = {"model": "any", "max_tokens": 500, "messages": ASK, "tools": ANTHROPIC_TOOLS}
        whole = client.messages.create(**ask)
        kinds = [block.type for block in whole.content]
        assert kinds == ["thinking", "text", "tool_use"], whole
        assert whole.stop_reason == "tool_use" and whole.content[2].input == {"city": "Oslo"}
        with client.messages.stream(**ask) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_message()
        assert streamed.stop_reason == "tool_use", streamed
        assert [block.type for block in streamed.content] == kinds
        assert streamed.content[2].input == whole.content[2].input
        result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "Snow"}
        ask["messages"] = [
            *ASK,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result]},
        ]
        counted = client.messages.count_tokens(
            model="any", messages=ask["messages"], tools=ANTHROPIC_TOOLS
        )
        done = client.messages.create(**ask)
        assert done.content[0].text == DONE and done.stop_reason == "end_turn", done
        usage = done.usage
        assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
        try:
            client.messages.create(model="any", max_tokens=5, messages=[])
            raise AssertionError("empty messages were accepted")
        except anthropic.BadRequestError as error:
            assert error.body["error"]["type"] == "invalid_request_error", error.body
    return "messages, stream, tools both ways, count_tokens, errors"


def litellm_both():
    import litellm

    for provider, suffix in [("openai", "/v1"), ("anthropic", "")]:
        with scripted(CALLS, CALLS, DONE) as url:
            ask = {
                "model": provider + "/any", "api_base": url + suffix, "api_key": "none",
                "messages": ASK, "tools": OPENAI_TOOLS,
            }
            whole = litellm.completion(**ask).choices[0]
            assert whole.finish_reason == "tool_calls", whole
            call = whole.message.tool_calls[0]
            assert json.loads(call.function.arguments) == {"city": "Oslo"}, call
            chunks = list(litellm.completion(**ask, stream=True))
            streamed = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0]
            assert streamed.finish_reason == "tool_calls", streamed
            assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
            result = {"role": "tool", "tool_call_id": call.id, "content": "Snow"}
            ask["messages"] = [*ASK, whole.message.model_dump(), result]
            assert litellm.completion(**ask).choices[0].message.content == DONE
    return "chat, stream and tools, as openai and as anthropic"


def instructor_modes():
    import instructor
    import openai
    import pydantic

    class City(pydantic.BaseModel):
        city: str

    report = []
    answers = {
        "TOOLS": CALL.replace('"weather"', '"City"'),
        "JSON": '{"city": "Oslo"}',
        "JSON_SCHEMA": '{"city": "Oslo"}',
        "MD_JSON": '```json\n{"city": "Oslo"}\n```',
    }
    for name, answer in answers.items():
        with scripted(answer) as url:
            client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
            client = instructor.from_openai(client, mode=instructor.Mode[name])
            found = client.chat.completions.create(
                model="any", messages=ASK, response_model=City, max_retries=1
            )
            assert found.city == "Oslo", found
            report.append(name + " works")
    return "; ".join(report)


# ---- lm-eval

# Beginnings of fables with the right end first.
FABLES = [
    ("The Fox and the Crow. A Crow was sitting on a branch with a piece of cheese in her",
     [" beak", " pocket", " castle"]),
    ("The Hare and the Tortoise. The Hare laughed at the Tortoise because he was so",
     [" slow", " yellow", " loud"]),
    ("The Lion and the Mouse. A Lion was asleep when a little Mouse ran over his",
     [" face", " bicycle", " letter"]),
    ("The Fox and the Grapes. A hungry Fox saw some fine bunches of",
     [" grapes", " iron", " clocks"]),
    ("The Dog and the Shadow. A Dog, carrying a piece of meat in his mouth, crossed a",
     [" stream", " theatre", " sentence"]),
    ("The Goose with the Golden Eggs. One day a countryman found in the nest a golden",
     [" egg, and took it home.", " train.", " fox who sang."]),
]

TASK = """\
task: fables
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def lm_eval_fables():
    import lm_eval
    import numpy
    import requests
    import transformers
    from lm_eval.tasks import TaskManager
    from safetensors.numpy import load_file

    work = pathlib.Path(os.environ[INSIDE])
    task = work / "task"
    task.mkdir()
    lines = [json.dumps({"text": text, "choices": choices}) for text, choices in FABLES]
    (task / "fables.jsonl").write_text("\n".join(lines) + "\n")
    (task / "fables.yaml").write_text(TASK.format(data=task / "fables.jsonl"))
    moeflux, options = os.environ["MOEFLUX"], ["--exact", "--device", "cpu"]
    model = ["--model", TALES]
    tokenizer = transformers.AutoTokenizer.from_pretrained(TALES)
    text = "".join(text + choices[0] + ".\n" for text, choices in FABLES)
    with running([moeflux, "serve", "--port", 0, "--ctx", 1024, *model, *options]) as url:
        arguments = {
            "model": "any", "base_url": url + "/v1/completions", "tokenizer": str(TALES),
            "max_length": 1024,
        }
        results = lm_eval.simple_evaluate(
            model="local-completions", model_args=arguments, tasks=["fables"], batch_size=4,
            task_manager=TaskManager(include_path=str(task)), bootstrap_iters=0,
            log_samples=True,
        )
        ask = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
        echo = requests.post(url + "/v1/completions", json=ask).json()
    largest, count = 0.0, 0
    for sample in results["samples"]["fables"]:
        for response, choice in zip(sample["resps"], sample["doc"]["choices"]):
            found, is_greedy = response[0]
            start = tokenizer.encode(sample["doc"]["text"])
            ids = tokenizer.encode(sample["doc"]["text"] + choice)
            (work / "ids.json").write_text(json.dumps(ids))
            command = [moeflux, "logits", "-q", "--tokens", work / "ids.json", *model, *options]
            subprocess.run([*command, "--out", work / "logits.safetensors"], check=True)
            logits = load_file(work / "logits.safetensors")["logits"].astype(numpy.float64)
            top = logits.max(axis=1, keepdims=True)
            logprobs = logits - top - numpy.log(numpy.exp(logits - top).sum(axis=1, keepdims=True))
            rows = range(len(start) - 1, len(ids) - 1)
            expected = sum(logprobs[row, ids[row + 1]] for row in rows)
            assert is_greedy == all(logits[row].argmax() == ids[row + 1] for row in rows)
            largest, count = max(largest, abs(found - expected)), count + 1
    (work / "text.txt").write_text(text)
    command = [moeflux, "perplexity", "-q", "--json", "--text", work / "text.txt", "--ctx", 1024]
    command = [str(part) for part in [*command, *model, *options]]
    perplexity = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    logprobs = echo["choices"][0]["logprobs"]["token_logprobs"]
    found = float(numpy.exp(-numpy.mean(logprobs[1:])))
    expected = perplexity["perplexity"]
    assert largest < 1e-4, largest
    assert abs(found / expected - 1) < 1e-5, (found, expected)
    accuracy = results["results"]["fables"]["acc,none"]
    return (
        f"{count} loglikelihoods, largest difference from `moeflux logits` {largest:.1e};"
        f" perplexity of {len(logprobs)} echoed tokens {found:.6f}, `moeflux perplexity`"
        f" {expected:.6f}; accuracy {accuracy:.2f}"
    )


# Checks by group of packages.
CHECKS = [
    [
        ("openai", openai_chat),
        ("openai", openai_responses),
        ("anthropic", anthropic_messages),
        ("ollama", ollama_client),
        ("pydantic-ai-slim", pydantic_ai_agent),
    ],
    [("litellm", litellm_both), ("instructor", instructor_modes)],
    [("lm_eval", lm_eval_fables)],
]


def checks():
    failed = 0
    for package, check in CHECKS[int(os.environ[GROUP])]:
        name = f"{package} {importlib.metadata.version(package)}"
        try:
            print(f"ok: {name}: {check()}", flush=True)
        except Exception:
            traceback.print_exc()
            print(f"FAILED: {name}", flush=True)
            failed += 1
    sys.exit(failed > 0)


# ---- preparation


BINARIES = {
    "SCRIPTED": ["-p", "moeflux-server", "--example", "scripted"],
    "MOEFLUX": ["-p", "moeflux-cli", "--bin", "moeflux"],
}


def build(selection):
    """Path of a binary that cargo builds."""
    command = ["cargo", "build", "--locked", "--release", "--message-format", "json", *selection]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    built = [json.loads(line).get("executable") for line in lines.splitlines()]
    return [path for path in built if path][-1]


def main(arguments):
    os.chdir(HERE.parent)
    if INSIDE in os.environ:
        return checks()
    if arguments and (arguments[0] != "--keep" or len(arguments) != 2):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        for name, selection in BINARIES.items():
            if not os.environ.get(name):
                os.environ[name] = build(selection)
        subprocess.run([sys.executable, MAKE, "model", "json", work / "json"], check=True)
        namespace = []
        for command in [["unshare", "-n"], ["unshare", "-rn"]]:
            with contextlib.suppress(OSError):
                if not namespace and not subprocess.run([*command, "true"], stderr=subprocess.DEVNULL).returncode:
                    namespace = [*command, "sh", "-c", 'ip link set lo up; exec "$@"', "-"]
        if not namespace:
            print("network namespaces are not allowed here: the clients may reach the network")
        environment = {
            **os.environ, INSIDE: str(work), "HOME": str(work), "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_KEY": "none", "TOKENIZERS_PARALLELISM": "false",
        }
        packages = pathlib.Path(arguments[1]) if arguments else work / "python"
        failed = False
        for group, names in enumerate(PACKAGES):
            python = (packages / str(group)).absolute() / "bin/python"
            done = python.parent / "installed"
            if not done.exists():
                subprocess.run([sys.executable, "-m", "venv", packages / str(group)], check=True)
                subprocess.run([python, "-m", "pip", "install", "-q", *names], check=True)
                done.touch()
            command = [*namespace, python, HERE / "clients.py"]
            run = subprocess.run(command, env={**environment, GROUP: str(group)})
            failed |= run.returncode != 0
        sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
