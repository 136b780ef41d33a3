//! Tests of chat templates against `transformers`.

use std::{collections::BTreeMap, path::Path};

use moeflux_base::{Error, TextFile};
use serde::Deserialize;

use super::{ChatOptions, ChatTemplate, Literal, Message};
use crate::tokenizer::TokenizerConfig;

/// Messages and rendered texts of `fixtures/expected.json`.
#[derive(Deserialize)]
struct ExpectedTexts {
    conversations: BTreeMap<String, Vec<Message>>,
    cases: Vec<TemplateCase>,
}

#[derive(Deserialize)]
struct TemplateCase {
    template: String,
    conversation: String,
    options: ChatOptions,
    add_generation_prompt: bool,
    text: Option<String>,
    error: Option<String>,
}

fn source(name: &str) -> &str {
    match name {
        "deepseek.jinja" => include_str!("../fixtures/deepseek.jinja"),
        "glm.jinja" => include_str!("../fixtures/glm.jinja"),
        "gpt_oss.jinja" => include_str!("../fixtures/gpt_oss.jinja"),
        "kimi.jinja" => include_str!("../fixtures/kimi.jinja"),
        "llama.jinja" => include_str!("../fixtures/llama.jinja"),
        "mistral.jinja" => include_str!("../fixtures/mistral.jinja"),
        "qwen.jinja" => include_str!("../fixtures/qwen.jinja"),
        snippet => snippet,
    }
}

fn tokens() -> BTreeMap<String, String> {
    [("bos_token", "<s>"), ("eos_token", "</s>")]
        .map(|(role, token)| (role.into(), token.into()))
        .into()
}

fn template(source: &str) -> Result<ChatTemplate, Error> {
    ChatTemplate::new(source, Path::new("model/chat_template.jinja"), &tokens())
}

fn render(source: &str, messages: &[Message]) -> Result<String, Error> {
    template(source)?.render(messages, true, &ChatOptions::default())
}

/// Expected texts are rendered by `transformers`, see `fixtures/make.py`.
#[test]
fn matches_transformers() {
    let expected: ExpectedTexts =
        serde_json::from_str(include_str!("../fixtures/expected.json")).unwrap();
    assert!(expected.cases.len() > 200);
    for case in expected.cases {
        let messages = &expected.conversations[&case.conversation];
        let what = format!("{} of {:?} with {:?}", case.template, case.conversation, case.options);
        let rendered = template(source(&case.template)).unwrap().render(
            messages,
            case.add_generation_prompt,
            &case.options,
        );
        match (rendered, case.text, case.error) {
            (Ok(rendered), Some(text), None) => assert_eq!(rendered, text, "{what}"),
            (Err(error), None, Some(reason)) => {
                assert!(error.to_string().contains(&reason), "{what}: {error} without {reason}");
            }
            (rendered, text, error) => {
                panic!("{what}: {rendered:?}, expected {text:?} or {error:?}")
            }
        }
    }
}

#[test]
fn a_follow_up_is_the_end_of_the_whole_conversation() {
    let answer_ends = [
        ("deepseek.jinja", "<｜end▁of▁sentence｜>"),
        ("glm.jinja", "<|user|>"),
        ("gpt_oss.jinja", "<|end|>"),
        ("kimi.jinja", "<|im_end|>"),
        ("llama.jinja", "<|eot|>"),
        ("mistral.jinja", "</s>"),
        ("qwen.jinja", "<|im_end|>"),
    ];
    for (name, end) in answer_ends {
        // The question may contain the placeholder.
        let question = format!("And why {}?", super::ANSWER_PLACEHOLDER);
        let messages =
            [Message::user("Why?"), Message::assistant("So."), Message::user(&*question)];
        for thinking in [None, Some(true), Some(false)] {
            let (template, options) = (
                template(source(name)).unwrap(),
                ChatOptions { thinking, ..ChatOptions::default() },
            );
            let tail = template.render_follow_up(&question, &options, &Literal::AS_IS).unwrap();
            let whole = template.render(&messages, true, &options).unwrap();
            assert!(whole.ends_with(&format!("So.{tail}")), "{name}: {tail:?} {whole:?}");
            assert!(tail.starts_with(end) && tail.contains(&question), "{name}: {tail:?}");
        }
    }
    let silent = template("{{ messages[-1].content }}").unwrap();
    let error = silent.render_follow_up("Why?", &ChatOptions::default(), &Literal::AS_IS);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("does not show") && error.contains("--raw"), "{error}");
}

#[test]
fn the_built_in_model() {
    let bytes = include_bytes!("../../../../tales/model/chat_template.jinja");
    let jinja = TextFile { bytes, path: "chat_template.jinja".into() };
    let template =
        ChatTemplate::from_files(Some(&jinja), &TokenizerConfig::default()).unwrap().unwrap();
    let messages =
        [Message::user("Tell me a fable."), Message::assistant("No."), Message::user("Please!")];
    let text = template.render(&messages, true, &ChatOptions::default()).unwrap();
    let expected = "<|im_start|>user\nTell me a fable.<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n\
        <|im_start|>user\nPlease!<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(text, expected);
}

#[test]
fn errors_name_the_file_and_a_remedy() {
    let refused = "{{ raise_exception('Only one message, please!') }}";
    for (source, reason) in [
        (refused, "Only one message, please!"),
        ("\n{{ messages[0].content.nonsense() }}", "nonsense"),
        ("{{ nope.nope }}", "nope"),
        ("{{ strftime_now('%Q') }}", "%Q"),
        ("{{ 1 | tojson(separators=(',',)) }}", "separators"),
        ("{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns | tojson }}", "nested too deeply"),
        ("{{ nope | tojson }}", "undefined"),
        ("{{ '%99999999999999999999d' % 1 }}", "too big"),
        ("{{ '%d %d' % (1,) }}", "too few values"),
        ("{{ '%d' % (1, 2) }}", "expected 1 values, got 2"),
        ("{{ '%d' % 'x' }}", "expected a number for %d, got string"),
        ("{{ '%(a)s' % {'b': 1} }}", r#"the key "a" is missing"#),
        ("{{ '%y' % 1 }}", "%y"),
        ("{{ range(100001) }}", "100000 items at most"),
        ("{{ range(1, 2, 0) }}", "must not be 0"),
        ("{{ +'a' }}", "invalid operation"),
        ("{{ [(1, 2, 3)] | urlencode }}", "pairs"),
        ("{% if %}", "syntax error"),
        ("{% generation %}", "syntax error"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    ] {
        let error = render(source, &[Message::user("Hi")]).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Text { .. }), "{error:?}");
        for part in ["model/chat_template.jinja", reason, "--raw"] {
            assert!(text.contains(part), "{text} without {part}");
        }
    }
    let text = ChatTemplate::missing(Path::new("model")).to_string();
    assert!(text.starts_with("model: ") && text.contains("--raw"), "{text}");
}

#[test]
fn the_template_file_wins_over_the_config() {
    let path = Path::new("tokenizer_config.json");
    let config = |json: &str| TokenizerConfig::from_bytes(json.as_bytes(), path);
    let load = |jinja: Option<&[u8]>, json: &str| {
        let file = jinja.map(|bytes| TextFile { bytes, path: "chat_template.jinja".into() });
        let template = ChatTemplate::from_files(file.as_ref(), &config(json).unwrap()).unwrap();
        template.map(|template| template.render(&[], false, &ChatOptions::default()).unwrap())
    };
    let string = r#"{"chat_template": "config {{ bos_token }}", "bos_token": {"content": "<s>"}, "eos_token": null}"#;
    assert_eq!(load(Some(b"file {{ bos_token }}{{ eos_token }}"), string).unwrap(), "file <s>");
    assert_eq!(load(None, string).unwrap(), "config <s>");
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]}"#;
    assert_eq!(load(None, list).unwrap(), "yes");
    assert_eq!(load(None, "{}"), None);
    assert_eq!(load(None, r#"{"chat_template": null}"#), None);

    for (json, reason) in [
        ("[]", "not a JSON object"),
        ("{", "not a JSON object"),
        (r#"{"chat_template": 3}"#, "chat_template must be"),
        (r#"{"chat_template": [{"name": "default"}]}"#, "chat_template must be"),
        (r#"{"chat_template": [{"name": "rag", "template": ""}]}"#, "rag"),
    ] {
        let text = config(json).unwrap_err().to_string();
        assert!(text.contains("tokenizer_config.json") && text.contains(reason), "{text}");
    }
    let jinja = TextFile { bytes: b"\xFF", path: "chat_template.jinja".into() };
    let error = ChatTemplate::from_files(Some(&jinja), &TokenizerConfig::default()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("chat_template.jinja") && text.contains("utf-8"), "{text}");
}

#[test]
fn variables_indents_and_dates() {
    let options: ChatOptions = serde_json::from_str(
        r#"{"thinking": true, "variables": {"thinking": "deep", "bos_token": [1, null]}}"#,
    )
    .unwrap();
    let text = template("{{ thinking }} {{ enable_thinking }} {{ bos_token|tojson }}").unwrap();
    assert_eq!(text.render(&[], true, &options).unwrap(), "deep True [1, null]");
    let wide = render("{{ [[]] | tojson(indent=18446744073709551615) }}", &[]).unwrap();
    assert!(wide.len() < 1000);
    let year: u32 = render("{{ strftime_now('%Y') }}", &[]).unwrap().parse().unwrap();
    assert!((1970..3000).contains(&year));
}

#[derive(Deserialize)]
struct ValueCase {
    template: String,
    messages: Vec<Message>,
    variables: serde_json::Map<String, serde_json::Value>,
    text: String,
}

/// Expected texts are Jinja2's, with the environment of `transformers`.
#[test]
fn values_are_written_as_by_jinja2() {
    let cases: Vec<ValueCase> =
        serde_json::from_str(include_str!("../fixtures/values.json")).unwrap();
    for ValueCase { template: source, messages, variables, text } in cases {
        let options = ChatOptions { variables, ..ChatOptions::default() };
        let rendered = template(&source).unwrap().render(&messages, true, &options);
        assert_eq!(rendered.unwrap(), text, "{source}");
    }
}

/// Templates that try to take all memory or all time. A test of the command line counts memory.
#[test]
fn hostile_templates_run_out_of_fuel() {
    let big = "{% set x = ['x' * 1000000] * 100000 %}";
    for source in [
        include_str!("../fixtures/hostile/doubling.txt"),
        include_str!("../fixtures/hostile/width.txt"),
        include_str!("../fixtures/hostile/loops.txt"),
        &format!("{big}{{{{ x }}}}"),
        &format!("{big}{{{{ x | string }}}}"),
        &format!("{big}{{{{ x | join }}}}"),
        &format!("{big}{{{{ x | tojson }}}}"),
        &format!("{big}{{{{ x | upper }}}}"),
        &format!("{big}{{{{ ''.join(x) }}}}"),
        &format!("{big}{{{{ '%s' | format(x) }}}}"),
        &format!("{big}{{{{ '%s' % x }}}}"),
        &format!("{big}{{{{ '%a' % [x] }}}}"),
        &format!("{big}{{{{ '{{}}'.format(x) }}}}"),
        "{{ '{:3000000000}'.format(1) }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ '%-3000000000s' % 1 }}",
        "{{ '%.3000000000f' % 1 }}",
        "{{ '%#.3000000000g' % 1 }}",
        "{{ '%.3000000000x' % 1 }}",
        "{{ '%*d' % (3000000000, 1) }}",
        "{{ '%.*e' % (3000000000, 1) }}",
        "{{ '%(a)3000000000d' % {'a': 1} }}",
        "{{ '%3000000000s' | format(1) }}",
        "{{ 'a'.zfill(3000000000) }}",
        "{{ 'a'.ljust(3000000000) }}",
        "{{ 'a' | center(3000000000) }}",
        "{{ 'a\nb' | indent(3000000000) }}",
        "{{ 'a\nb' | indent(width=3000000000) }}",
        "{{ ('a' * 60000) | replace('a', 'b' * 60000) }}",
        "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
        "{{ range(90000) | join('x' * 100000) }}",
        "{{ 'x' * 90000000 }}",
        "{% set ns = namespace(x='x') %}{% for i in range(90) %}{% set ns.x = [ns.x, ns.x] %}\
         {% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(50000) %}{% set ns.x = [ns.x] %}\
         {% endfor %}{{ ns.x }}",
    ] {
        let error = render(source, &[Message::user("Hi")]).unwrap_err().to_string();
        let is_bounded = ["ran out of fuel", "nested too deeply"].iter().any(|e| error.contains(e));
        assert!(is_bounded && error.contains("model/chat_template.jinja"), "{source}: {error}");
    }
    let long = template(&"x".repeat(2 << 20)).unwrap_err().to_string();
    assert!(long.contains("2097152 bytes"), "{long}");
}

#[test]
fn a_long_conversation_has_fuel() {
    let words = "many words of an answer ".repeat(200);
    let messages: Vec<Message> = (0..200)
        .flat_map(|_| [Message::user(&*words), Message::assistant(&*words).reasoning(&*words)])
        .collect();
    for name in ["deepseek.jinja", "glm.jinja", "gpt_oss.jinja", "kimi.jinja", "qwen.jinja"] {
        template(source(name)).unwrap().render(&messages, true, &ChatOptions::default()).unwrap();
    }
}

#[test]
fn thoughts_are_where_templates_look_for_them() {
    let messages = [Message::user("Hi"), Message::assistant("Hello").reasoning("hm")];
    let names = "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}{{ m.thinking }}\
                 |{% endfor %}";
    assert_eq!(render(names, &messages).unwrap(), "|hmhmhm|");
    let json = serde_json::to_string(&messages[1]).unwrap();
    assert_eq!(json, r#"{"role":"assistant","content":"Hello","reasoning_content":"hm"}"#);
    assert_eq!(serde_json::from_str::<Message>(&json).unwrap(), messages[1]);
    assert_eq!(Message::assistant("Hello").reasoning("").reasoning_content, None);
}
