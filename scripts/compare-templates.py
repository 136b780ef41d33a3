#!/usr/bin/env python3
"""Renders all chat templates of folders by moeflux and by Jinja2, as transformers sets it up.

    pip install transformers jinja2
    cargo build --release -p moeflux --example render_templates
    scripts/compare-templates.py [--verbose] FOLDER...

A template is a file `*.jinja` or `*.jinja2`, or the `chat_template` of a `tokenizer_config.json` or
`chat_template.json`. Each is rendered in every conversation below. A template that refuses a
conversation in both is equal. Differences of the kinds in KNOWN stay, and are counted with their
reason; all others are listed, and the exit code is 1.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import resource
import subprocess
import sys

os.environ["TZ"] = "UTC"  # moeflux has no time zones
from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
RENDERER = ROOT / "target/release/examples/render_templates"

# Kinds of differences that stay: a pattern in the template's source, one in Jinja2's result, one in
# ours, and the reason. An empty pattern matches everything.
KNOWN = [
    ("", r"'NoneType' object is not iterable", "", "a loop over none is empty instead of an error"),
    ("", r"Object of type \w+ is not JSON serializable", "", "tojson takes generators too"),
    ("", r"dict_(items|keys|values)\(", "", "views of a mapping are written as lists"),
    ("", r"range\(\d", "", "ranges are written as lists"),
    (r"~", r"\de[+-]\d\d", r"\d{16}|0\.00000", "`~` writes floats without an exponent"),
    (r"%\s*[a-z_]", "", "unsupported types string", "`%` of two variables divides, and formats no text"),
    (r"\.(append|extend|insert|pop|update|setdefault)\(", "", "", "methods that change a value are refused"),
    (r"\|\s*safe", r"&(lt|gt|amp|#34);", "", "texts beside `safe` ones are not escaped for HTML"),
    ("", r"<(function \S+ at|bound method|built-in|generator object|[a-z0-9_.]+ object at)", "", "functions as text"),
    (r"%r", "", "invalid conversion type", "`%r` is no format"),
    (r"strftime", "", "strftime", "a directive of strftime that moeflux does not have"),
]

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a <city> & \"more\"",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name, é中😀"},
                "days": {"type": ["integer", "null"], "minimum": 1e-07, "maximum": 1e16, "enum": [1, 2]},
                "deep": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
            },
            "required": ["city"],
        },
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Bern", "days": 2, "x": None, "y": [1.5, True]}}}
CALL_OF_TEXT = {"id": "call00002", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}


def message(role, content, **fields):
    return {"role": role, "content": content} | fields


USER, ANSWER = message("user", "  Hi <there>\n"), message("assistant", "Hello! é")
RESULT = message("tool", '{"sun": true}', tool_call_id="call00001", name="get_weather")
CONVERSATIONS = {
    "question": [USER],
    "system": [message("system", "Be brief. "), USER],
    "empty system": [message("system", ""), USER],
    "developer": [message("developer", "Be brief."), USER],
    "several turns": [message("system", "Be brief."), USER, ANSWER, message("user", "Again?"), ANSWER, USER],
    "ends with an answer": [USER, ANSWER],
    "thoughts": [USER, ANSWER | {"reasoning_content": "hm\n", "thinking": "hm"}, USER],
    "thoughts in the text": [USER, message("assistant", "<think>\nhm\n</think>\n\nHello!"), USER],
    "late system": [USER, message("system", "Be brief."), USER],
    "two systems": [message("system", "A"), message("system", "B"), USER],
    "twice": [USER, USER],
    "call": [USER, message("assistant", "", tool_calls=[CALL]), RESULT],
    "call without text": [USER, message("assistant", None, tool_calls=[CALL]), RESULT, ANSWER, USER],
    "call and text": [USER, message("assistant", "I look.", tool_calls=[CALL], reasoning_content="hm"), RESULT],
    "call with arguments as text": [USER, message("assistant", "", tool_calls=[CALL_OF_TEXT]), RESULT],
    "two calls": [USER, message("assistant", "", tool_calls=[CALL, CALL | {"id": "call00003"}]), RESULT, RESULT | {"tool_call_id": "call00003"}, ANSWER],
    "result of parts": [USER, message("assistant", "", tool_calls=[CALL]), RESULT | {"content": [{"type": "text", "text": "sun"}]}],
    "parts": [message("system", [{"type": "text", "text": "Be brief."}]), message("user", [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}])],
    "image": [message("user", [{"type": "image"}, {"type": "text", "text": "What is it?"}])],
    "no text": [USER, message("assistant", None), USER],
    "no content": [USER, {"role": "assistant"}, USER],
    "empty": [message("user", ""), message("assistant", ""), message("user", "")],
    "marks in the text": [message("user", "<|im_end|></think><think>{{ x }}{% y %}")],
    "other fields": [USER | {"name": "Ann", "weight": 0.0}, ANSWER | {"prefix": True}],
    "none": [],
}
OPTIONS = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "tools": [TOOL]},
    {"add_generation_prompt": True, "enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    {"add_generation_prompt": True, "enable_thinking": False, "thinking": False, "tools": []},
    {"add_generation_prompt": True, "documents": [{"title": "T", "text": "Long.", "content": "c"}]},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def templates(folder):
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if path.suffix in (".jinja", ".jinja2"):
            yield str(path), path.read_text()
        elif path.name in ("tokenizer_config.json", "chat_template.json"):
            found = json.loads(path.read_text()).get("chat_template")
            for entry in found if isinstance(found, list) else [{"name": "", "template": found}]:
                if entry["template"]:
                    yield f"{path} {entry['name']}".strip(), entry["template"]


def by_jinja2(source, variables):
    try:
        return {"text": _compile_jinja_template(source).render(**variables)}
    except Exception as error:  # of any kind: templates raise what they like
        return {"error": f"{type(error).__name__}: {error}"}


def reason(source, theirs, ours):
    theirs, ours = theirs.get("text", theirs.get("error")), ours.get("text", ours.get("error"))
    for in_source, in_theirs, in_ours, why in KNOWN:
        if re.search(in_source, source) and re.search(in_theirs, theirs) and re.search(in_ours, ours):
            return why
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--renderer", default=RENDERER, help="the built example render_templates")
    parser.add_argument("--verbose", action="store_true", help="show both texts of each difference")
    args = parser.parse_args()
    # Jinja2 has no limits.
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    jobs = [
        (name, source, conversation, {"messages": CONVERSATIONS[conversation], "tools": None, "documents": None} | TOKENS | options)
        for folder in args.folders
        for name, source in templates(folder)
        for conversation in CONVERSATIONS
        for options in OPTIONS
    ]
    lines = "".join(json.dumps({"template": source, "variables": variables}) + "\n" for _, source, _, variables in jobs)
    made = subprocess.run([args.renderer], input=lines, capture_output=True, text=True, check=True).stdout
    known, unknown = collections.Counter(), collections.Counter()
    for (name, source, conversation, variables), line in zip(jobs, made.splitlines(), strict=True):
        ours, theirs = json.loads(line), by_jinja2(source, variables)
        if theirs == ours or ("error" in theirs and "error" in ours):
            continue
        why = reason(source, theirs, ours)
        if why:
            known[f"{why}: {name}"] += 1
            continue
        unknown[name] += 1
        if args.verbose or unknown[name] == 1:
            print(f"{name}, {conversation}:\n  Jinja2  {json.dumps(theirs, ensure_ascii=False)}\n  moeflux {json.dumps(ours, ensure_ascii=False)}")
    print(f"{len(jobs)} renderings of {len({name for name, *_ in jobs})} templates")
    for title, counts in (("stay", known), ("are not explained", unknown)):
        print(f"{sum(counts.values())} differences {title}")
        for name, count in sorted(counts.items()):
            print(f"  {count:4} {name}")
    sys.exit(1 if unknown else 0)


if __name__ == "__main__":
    main()
