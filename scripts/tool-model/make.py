#!/usr/bin/env python3
"""Makes a small checkpoint whose template has tools, and scripts of answers in its call syntax.

The checkpoint is the embedded model with another template (`SYNTAX.jinja` beside this file) and a
longer context. It cannot call tools by itself: the example `scripted` of moeflux-server forces the
tokens of a script.

usage: make.py model SYNTAX DIR           writes the checkpoint
       make.py script SYNTAX AGENT DIR    prints a script: the agent lists the folder DIR, reads
                                          its file notes.txt and edits it
       make.py check DIR                  fails unless notes.txt has been edited
       make.py notes DIR                  writes notes.txt as it is before

SYNTAX is json or xml, AGENT claude, codex or opencode.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
TALES = HERE.parent.parent / "crates/tales/model"

CONTEXT = 262144

# Values that a careless parser or encoder changes: marks, quotes, escapes, a line end at the end.
BEFORE = 'colour = "red"\n'
AFTER = 'colour = "blau \\ 🙂"\nshape = \'</parameter> & <b>\'\n\tend\n'
NOTES = "# Notes\n{}last line\n"


def model(syntax, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in TALES.iterdir():
        if path.suffix in (".json", ".safetensors"):
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text((HERE / f"{syntax}.jinja").read_text())
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = CONTEXT
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def call(syntax, name, arguments):
    """Text of one call."""
    if syntax == "json":
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    else:
        values = "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
        )
        body = f"<function={name}>\n{values}</function>"
    return f"<tool_call>\n{body}\n</tool_call>"


def script(syntax, agent, folder):
    file = str(pathlib.Path(folder).resolve() / "notes.txt")
    bash = {"command": "ls", "description": "Lists the folder"}
    tools = {
        "claude": [
            ("Bash", bash),
            ("Read", {"file_path": file}),
            ("Edit", {"file_path": file, "old_string": BEFORE, "new_string": AFTER}),
        ],
        "codex": [
            ("exec_command", {"cmd": "ls"}),
            ("exec_command", {"cmd": "cat notes.txt"}),
            ("exec_command", {"cmd": f"cat > notes.txt <<'END'\n{NOTES.format(AFTER)}END"}),
        ],
        "opencode": [
            ("bash", bash),
            ("read", {"filePath": file}),
            ("edit", {"filePath": file, "oldString": BEFORE, "newString": AFTER}),
        ],
    }[agent]
    thoughts = "<think>\nOne step after another.\n</think>\n\n"
    answers = [f"{thoughts}Next: {name}.\n" + call(syntax, name, args) for name, args in tools]
    if agent == "opencode":
        # It asks for a title at the same time: either request may come first.
        answers.insert(0, answers[0])
    print(json.dumps([*answers, "The round is done."]))


def notes(folder):
    (pathlib.Path(folder) / "notes.txt").write_text(NOTES.format(BEFORE), newline="")


def check(folder):
    found = (pathlib.Path(folder) / "notes.txt").read_bytes().decode()
    if found != NOTES.format(AFTER):
        sys.exit(f"notes.txt is not as it should be: {found!r}")


def main(arguments):
    commands = {"model": model, "script": script, "notes": notes, "check": check}
    command = commands.get(arguments[0]) if arguments else None
    if command is None or command.__code__.co_argcount != len(arguments) - 1:
        sys.exit(__doc__)
    command(*arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
