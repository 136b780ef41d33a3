#!/usr/bin/env python3
"""Starts `moeflux serve` with options of llama.cpp's server, for its tests.

The model is the one of tool-model/make.py; `--chat-template-file` replaces its template. Options
without a counterpart are ignored. scripts/llama-tests.sh sets the environment: MOEFLUX and
SCRIPTED, the binary and the example, and LLAMA_TESTS_WORK, a folder for models and keys.

usage: llama-server.py OPTIONS
       llama-server.py --summary NAME JUNIT.xml     prints what passed
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent

# Options that are read, each with a value.
OPTIONS = ["--port", "--host", "--ctx-size", "--parallel", "--api-key", "--alias"]
OPTIONS += ["--chat-template", "--chat-template-file", "--reasoning", "--hf-repo"]
OPTIONS += ["--batch-size"]

# Model that thinks: the scripted one with this answer.
THINKING_MODEL = "DeepSeek-R1"
THOUGHTS = "<think>\nTwo and two are four.\n</think>\n\nFour."


# Templates that its program has by name, as far as tests of ours can pass with them.
TURNS = (
    "{%- for message in messages -%}"
    "{{ START + ROLES[message.role] + BEFORE + message.content + END }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ START + ROLES['assistant'] + BEFORE }}{%- endif -%}"
)
NAMED_TEMPLATES = {
    "command-r": "{%- set ROLES = {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>',"
    " 'assistant': '<|CHATBOT_TOKEN|>'} -%}{%- set START = '<|START_OF_TURN_TOKEN|>' -%}"
    "{%- set BEFORE = '' -%}{%- set END = '<|END_OF_TURN_TOKEN|>' -%}" + TURNS,
    "llama3": "{%- set ROLES = {'system': 'system', 'user': 'user', 'assistant': 'assistant'} -%}"
    "{%- set START = '<|start_header_id|>' -%}{%- set BEFORE = '<|end_header_id|>\n\n' -%}"
    "{%- set END = '<|eot_id|>' -%}" + TURNS,
}


def serve(arguments):
    found = {
        name: value for name, value in zip(arguments, arguments[1:]) if name in OPTIONS
    }
    work = pathlib.Path(os.environ["LLAMA_TESTS_WORK"])
    folder = work / f"{os.getpid()}" / found.get("--alias", "model")
    make = HERE / "tool-model/make.py"
    subprocess.run([sys.executable, make, "model", "json", folder], check=True)
    template = folder / "chat_template.jinja"
    if "--chat-template-file" in found:
        source = pathlib.Path(found["--chat-template-file"]).read_text()
        # A variable that its server always defines.
        thinks = str(found.get("--reasoning") != "off").lower()
        template.write_text("{%- set enable_thinking = " + thinks + " -%}" + source)
    elif found.get("--chat-template") in NAMED_TEMPLATES:
        template.write_text(NAMED_TEMPLATES[found["--chat-template"]])
    elif " " in found.get("--chat-template", ""):
        template.write_text(found["--chat-template"])
    sessions = int(found.get("--parallel", 1))
    context = int(found.get("--ctx-size", 2048)) // sessions
    if THINKING_MODEL in found.get("--hf-repo", ""):
        script = folder.parent / "script.json"
        script.write_text(json.dumps([THOUGHTS]))
        command = [os.environ["SCRIPTED"], "--model", folder, "--script", script]
        command += ["--port", found["--port"], "--ctx", context]
        os.execv(command[0], [str(part) for part in command])
    command = [os.environ["MOEFLUX"], "serve", "--model", folder]
    command += ["--port", found["--port"], "--host", found["--host"].split(",")[0]]
    command += ["--ctx", context, "--sessions", sessions]
    if "--batch-size" in found:
        command += ["--chunk", found["--batch-size"]]
    if "--api-key" in found:
        keys = folder.parent / "keys"
        keys.write_text(found["--api-key"] + "\n")
        command += ["--api-key-file", keys]
    command = [str(part) for part in command]
    os.execv(command[0], command)


def summary(name, path):
    cases = collections.defaultdict(list)
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        outcome = "passed"
        for kind in ["failure", "error", "skipped"]:
            found = case.find(kind)
            if found is not None:
                outcome = kind + ": " + (found.get("message") or "").split("\n")[0][:90]
        cases[case.get("name").split("[")[0]].append(outcome)
    good = [test for test, outcomes in cases.items() if set(outcomes) == {"passed"}]
    flat = [outcome for outcomes in cases.values() for outcome in outcomes]
    print(
        f"{name}: {len(good)} of {len(cases)} tests,"
        f" {flat.count('passed')} of {len(flat)} cases"
    )
    for test, outcomes in cases.items():
        if test not in good:
            first = next(outcome for outcome in outcomes if outcome != "passed")
            print(f"  {test} ({outcomes.count('passed')} of {len(outcomes)}): {first}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--summary"]:
        summary(*sys.argv[2:4])
    elif "--port" in sys.argv:
        serve(sys.argv[1:])
    else:
        sys.exit(__doc__)
