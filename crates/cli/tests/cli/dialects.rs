//! Thoughts and channels of answers, and templates that try to take all memory.

use std::time::{Duration, Instant};

use super::{scripted::Scripted, *};

const HARMONY: &[&str] = &[
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
];

const HARMONY_TEMPLATE: &str = "{%- for m in messages %}{{ '<|start|>' + m.role + \
    ('<|channel|>final' if m.role == 'assistant' else '') + '<|message|>' + m.content + '<|end|>' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}";

/// Shows the thoughts of all answers.
const THINK_TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}\
    {{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";

fn harmony(script: &[&str]) -> tempfile::TempDir {
    let folder = temp();
    let model = Scripted {
        special: HARMONY,
        plain: &["analysis", "final", "assistant"],
        script,
        eos: "<|return|>",
        template: HARMONY_TEMPLATE,
    };
    model.write(folder.path());
    folder
}

fn think(template: &str) -> tempfile::TempDir {
    let folder = temp();
    let model = Scripted {
        special: &["<|im_start|>", "<|im_end|>"],
        plain: &["<think>", "</think>", "\n\n"],
        script: &["<think>", "\n", "Hm.", "</think>", "\n\n", "Yes!", "<|im_end|>"],
        eos: "<|im_end|>",
        template,
    };
    model.write(folder.path());
    folder
}

fn answer(model: &tempfile::TempDir, args: &[&str]) -> Said {
    let model = model.path().to_str().unwrap();
    run(&[&["run", "--temperature", "0", "--model", model], args].concat())
}

#[test]
fn channels_are_told_apart_and_their_names_are_no_text() {
    let model = harmony(&["<|channel|>", "final", "<|message|>", "Yes!", "<|return|>"]);
    let said = answer(&model, &["-q", "q"]);
    assert_eq!((said.code, &*said.out), (0, "Yes!\n"), "{said:?}");
    let raw = answer(&model, &["-q", "--raw", "q"]);
    assert_eq!((raw.code, &*raw.out), (0, "Yes!\n"), "{raw:?}");

    let script = ["<|channel|>", "analysis", "<|message|>", "Polite.", "<|end|>", "<|start|>", "x"];
    let model = harmony(&script);
    let said = answer(&model, &["-n", "13", "q"]);
    // Nothing else was said.
    assert_eq!((said.code, &*said.out), (0, "Polite.\n"), "{said:?}");
    assert!(said.err.contains("note: the answer ended in its thoughts"), "{said:?}");
    let report = json(&answer(&model, &["-q", "--json", "-n", "13", "q"]).out);
    assert_eq!((&report["text"], &report["reasoning"]), (&"".into(), &"Polite.".into()));
    assert_eq!(report["unfinished_reasoning"], true);
}

#[test]
fn thoughts_are_in_reports_and_saved_conversations() {
    let model = think(THINK_TEMPLATE);
    let said = answer(&model, &["-q", "q"]);
    assert_eq!((said.code, &*said.out), (0, "Yes!\n"), "{said:?}");
    let report = json(&answer(&model, &["-q", "--json", "q"]).out);
    assert_eq!((&report["text"], &report["reasoning"]), (&"Yes!".into(), &"Hm.".into()));
    assert_eq!(report["unfinished_reasoning"], false);
    let args = ["chat", "-q", "--temperature", "0", "-n", "5"];
    let args = [&args[..], &["--model", model.path().to_str().unwrap()]].concat();
    let said = with_stdin(&args, b"q\n");
    assert_eq!((said.code, &*said.out), (0, "Hm.\n"), "{said:?}");

    let folder = temp();
    let saved = folder.path().join("saved.json");
    let commands = format!("q\n/save {0}\n/load {0}\nr\n/stats\n", saved.display());
    let args = ["chat", "-q", "--temperature", "0", "--model", model.path().to_str().unwrap()];
    let said = with_stdin(&args, commands.as_bytes());
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.out.starts_with("Yes!\nYes!\n"), "{said:?}");
    let messages = json(&std::fs::read_to_string(&saved).unwrap());
    assert_eq!(messages[1]["content"], "Yes!");
    assert_eq!(messages[1]["reasoning_content"], "Hm.");
    // The second prompt has the thoughts, as this template wants: 9 + 25 + 9 + 10 tokens, and 11 of
    // the answer.
    assert!(said.out.contains("context 64 of"), "{said:?}");
}

/// The operator `~` has no fuel for shared parts: a value of 40 levels has a text without end.
#[test]
fn templates_that_take_all_memory_are_errors() {
    let grow = "{% set ns = namespace(x='x') %}{% for i in range(40) %}\
                {% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ (ns.x ~ '') | length }}";
    let cases = [
        (grow.to_owned(), "it takes more than 64 MiB"),
        (
            include_str!("../../../text/src/chat/fixtures/hostile/doubling.txt").into(),
            "it takes more than 64 MiB",
        ),
        (include_str!("../../../text/src/chat/fixtures/hostile/width.txt").into(), "fuel"),
        (include_str!("../../../text/src/chat/fixtures/hostile/loops.txt").into(), "fuel"),
    ];
    for (template, problem) in cases {
        let since = Instant::now();
        let said = answer(&think(&template), &["-q", "q"]);
        assert_error(&said, 1, &["chat_template.jinja", problem, "--raw"]);
        assert!(since.elapsed() < Duration::from_secs(60), "{template}: {:?}", since.elapsed());
    }
}

#[test]
fn an_end_token_of_the_user_ends_answers() {
    let model = think(THINK_TEMPLATE);
    let said = answer(&model, &["-q", "--end-token", "</think>", "q"]);
    assert_eq!((said.code, &*said.out), (0, "Hm.\n"), "{said:?}");
    let report = json(&answer(&model, &["-q", "--json", "--end-token", "</think>", "q"]).out);
    assert_eq!((&report["finish"], &report["reasoning"]), (&"end_token".into(), &"Hm.".into()));
    // The tokens of the model's files still end answers.
    let whole = answer(&model, &["-q", "--end-token", "<|im_start|>", "q"]);
    assert_eq!((whole.code, &*whole.out), (0, "Yes!\n"), "{whole:?}");
    assert_error(&answer(&model, &["-q", "--end-token", "<none>", "q"]), 2, &["<none>", "token"]);
}
