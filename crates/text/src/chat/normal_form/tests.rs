//! Tests of conversations in the form that a template takes, with templates that differ as
//! published ones do.

use std::path::Path;

use serde_json::json;

use crate::chat::{
    literal::Literal,
    message::Message,
    template::{ChatOptions, ChatTemplate},
    tools::{Tool, ToolCall, ToolSet},
};

/// Shows everything, as JSON.
const WIDE: &str = "{% if tools %}[tools]{{ tools | tojson }}/{% endif %}\
    {% for m in messages %}[{{ m.role }}]{{ m.reasoning_content or '' }}{{ m.content }}\
    {% for c in m.tool_calls or [] %}[call]{{ c.function | tojson }}{% endfor %}/{% endfor %}";
/// Takes a system message only at the start, and asks for a question; as Qwen3.5.
const STRICT: &str = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}\
    {{ raise_exception('No user query found') }}{% endif %}\
    {% if tools %}[tools]{{ tools | tojson }}/{% endif %}\
    {% for m in messages %}{% if m.role == 'system' and not loop.first %}\
    {{ raise_exception('System message must be at the beginning.') }}{% endif %}\
    [{{ m.role }}]{{ m.content | trim }}{% for c in m.tool_calls or [] %}\
    [call {{ c.function.name }}]{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};\
    {% endfor %}{% endfor %}/{% endfor %}";
/// Adds strings, joins system messages at the start, has no list of tools; as DeepSeek-V3.1.
const ADDING: &str = "{% set ns = namespace(s='') %}{% for m in messages %}\
    {% if m.role == 'system' %}{% set ns.s = ns.s + m.content %}{% endif %}{% endfor %}{{ ns.s }}\
    {% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}\
    {% elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content }}\
    {% for c in m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + c.function.name + \
    '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}\
    {% elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content }}{% endif %}{% endfor %}";
/// Shows the first system message only, a result only behind a call; as MiniMax-M2.
const DROPPING: &str = "{% for t in tools or [] %}<tool>{{ t.function | tojson }}</tool>{% endfor %}\
    {% for m in messages %}{% if m.role == 'system' and loop.first or m.role == 'user' %}\
    [{{ m.role }}]{{ m.content }}{% elif m.role == 'assistant' %}[ai]{{ m.content }}\
    {% for c in m.tool_calls or [] %}<invoke name=\"{{ c.function.name }}\">\
    {% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}</invoke>\
    {% endfor %}{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role not in \
    ['assistant', 'tool'] %}{{ raise_exception('no call') }}{% endif %}[result]{{ m.content }}\
    {% endif %}{% endfor %}";
/// Asks for turns, ids of nine letters, and an answer after results; as Mistral's.
const TURNS: &str = "{% set ns = namespace(n=0) %}{% for m in messages %}\
    {% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}\
    {% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}\
    {% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}\
    {% for t in tools or [] %}[AVAILABLE]{{ t | tojson }}{% endfor %}\
    {% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}\
    {% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}\
    [CALL]{{ c.function | tojson }}[ID]{{ c.id }}{% endfor %}\
    {% elif m.role == 'system' and not loop.first %}{{ raise_exception('no system') }}\
    {% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}";
/// One call in a message, and its text only before the last answer; as gpt-oss.
const SINGLE: &str = "{% for t in tools or [] %}{{ t.function.name + t.function.description }}\
    {{ t.function.parameters | tojson }}{% endfor %}\
    {% for m in messages %}{% if m.role == 'system' and not loop.first %}{% elif m.tool_calls %}\
    {% set ns = namespace(done=false) %}{% for f in messages[loop.index:] %}\
    {% if f.role == 'assistant' and not f.tool_calls %}{% set ns.done = true %}{% endif %}\
    {% endfor %}{% if m.content and m.thinking %}{{ raise_exception('content and thinking') }}\
    {% elif not ns.done %}{{ '<analysis>' + (m.content or m.thinking or '') }}{% endif %}\
    {{ '<to=' + m.tool_calls[0].function.name }}>{{ m.tool_calls[0].function.arguments | tojson }}\
    {% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}{% endfor %}";
/// Shows the ids of calls; as Kimi-K2.
const NUMBERED: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}\
    <|im_{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}\
    <|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}\
    <|tool_call_end|>{% endfor %}{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}\
    {% endfor %}";
/// Has no system messages, tools and calls.
const BARE: &str = "{% for m in messages %}{% if m.role == 'user' %}[Q]{{ m.content }}\
    {% elif m.role == 'assistant' %}[A]{{ m.content }}{% endif %}{% endfor %}";

/// Every template: these, the built-in one, and the fixtures.
pub(crate) const TEMPLATES: [(&str, &str); 15] = [
    ("wide", WIDE),
    ("strict", STRICT),
    ("adding", ADDING),
    ("dropping", DROPPING),
    ("turns", TURNS),
    ("single", SINGLE),
    ("numbered", NUMBERED),
    ("bare", BARE),
    ("dsml", include_str!("../dsml.jinja")),
    ("deepseek", include_str!("../fixtures/deepseek.jinja")),
    ("glm", include_str!("../fixtures/glm.jinja")),
    ("gpt_oss", include_str!("../fixtures/gpt_oss.jinja")),
    ("kimi", include_str!("../fixtures/kimi.jinja")),
    ("mistral", include_str!("../fixtures/mistral.jinja")),
    ("qwen", include_str!("../fixtures/qwen.jinja")),
];

pub(crate) fn template(source: &str) -> ChatTemplate {
    let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
    let tokens = tokens.map(|(role, token)| (role.to_owned(), token.to_owned())).into();
    ChatTemplate::new(source, Path::new("chat_template.jinja"), &tokens).unwrap()
}

fn render(source: &str, messages: &[Message]) -> String {
    render_with(source, messages, &ChatOptions::default())
}

fn render_with(source: &str, messages: &[Message], options: &ChatOptions) -> String {
    template(source).render_conversation(messages, true, options, &Literal::AS_IS).unwrap().text
}

pub(crate) fn call(id: &str, name: &str, arguments: &str) -> ToolCall {
    ToolCall { id: id.into(), name: name.into(), arguments: arguments.into() }
}

pub(crate) fn calling(calls: &[ToolCall]) -> Message {
    Message::assistant("").tool_calls(calls.to_vec())
}

pub(crate) fn options(description: &str) -> ChatOptions {
    let schema = json!({"type": "object", "properties": {"path": {"type": "string"}}});
    let tools = vec![Tool::new("read", schema).description(description), Tool::default()];
    ChatOptions::default().tools(ToolSet { tools })
}

/// Whether `text` has each of `words` once.
fn assert_once(text: &str, words: &[&str], what: &str) {
    for word in words {
        assert_eq!(text.matches(word).count(), 1, "{what}: {word} in {text}");
    }
}

/// As an agent's second and third request: a system message after the question, thoughts and text
/// before two calls, results out of order.
#[test]
fn every_word_of_an_agents_request_is_shown_once() {
    let second = vec![
        Message::system("ruleword"),
        Message::new("developer", "moreword"),
        Message::user("askword"),
        Message::system("noteword"),
        Message::assistant("textword").reasoning("thoughtword").tool_calls(vec![
            call("a", "read", "{\"path\": \"oneword\"}"),
            call("b", "read", "{\"path\": \"twoword\"}"),
        ]),
        Message::tool("b", "lateword\npartword"),
        Message::tool("a", "soonword"),
    ];
    let words = [
        "ruleword",
        "moreword",
        "askword",
        "noteword",
        "textword",
        "oneword",
        "twoword",
        "soonword",
        "lateword",
        "partword",
        "purposeword",
    ];
    let last = [Message::user("nextword"), Message::system("endword")];
    let third = [&second[..], &[Message::assistant("saidword")], &last].concat();
    // A question beside the results.
    let beside = [&second[..], &last].concat();
    let options = options("purposeword");
    for (name, source) in TEMPLATES {
        let text = render_with(source, &second, &options);
        assert_once(&text, &words, name);
        assert!(text.find("soonword") < text.find("lateword"), "{name}: {text}");
        let text = render_with(source, &third, &options);
        assert_once(&text, &[&words[..], &["saidword", "nextword", "endword"]].concat(), name);
        let text = render_with(source, &beside, &options);
        assert_once(&text, &[&words[..], &["nextword", "endword"]].concat(), name);
    }
}

#[test]
fn odd_conversations_are_taken_by_every_template() {
    let conversations = [
        vec![Message::system("oneword")],
        vec![Message::system("oneword"), Message::system("twoword"), Message::user("askword")],
        vec![Message::assistant("oneword"), Message::user("twoword")],
        vec![Message::user("oneword"), Message::user("twoword")],
        vec![Message::user("oneword"), Message::assistant("twoword"), Message::assistant("word")],
        vec![Message::user("oneword"), Message::system("twoword")],
        vec![Message::user("oneword"), Message::assistant("askword"), Message::system("twoword")],
        vec![Message::user("oneword"), Message::new("developer", "twoword"), Message::user("a")],
        vec![Message::user("oneword"), calling(&[call("", "read", "")]), Message::user("twoword")],
    ];
    for (name, source) in TEMPLATES {
        for messages in &conversations {
            let text = render(source, messages);
            let words: Vec<_> =
                messages.iter().map(|m| &*m.content).filter(|c| c.contains("word")).collect();
            assert!(words.iter().all(|word| text.contains(word)), "{name}: {messages:?}: {text}");
        }
    }
}

#[test]
fn a_plain_conversation_stays_as_it_is() {
    let messages = [
        Message::system("Be brief."),
        Message::user("Hi"),
        Message::assistant("Hello"),
        Message::user("Why?"),
    ];
    for (name, source) in TEMPLATES.iter().filter(|(name, _)| *name != "bare") {
        let as_is = template(source).render(&messages, true, &ChatOptions::default()).unwrap();
        assert_eq!(render(source, &messages), as_is, "{name}");
    }
}

#[test]
fn a_later_system_message_stays_where_the_template_shows_it() {
    let messages = [Message::user("Hi"), Message::system("Now"), Message::user("Why?")];
    assert_eq!(render(WIDE, &messages), "[user]Hi/[system]Now/[user]Why?/");
    assert_eq!(
        render(STRICT, &messages),
        "[user]Hi\n\n<system-reminder>\nNow\n</system-reminder>/[user]Why?/"
    );
    let messages = [
        Message::system("A"),
        Message::system("B"),
        Message::user("Hi"),
        Message::assistant("Yes"),
        Message::system("Now"),
        Message::user("Why?"),
    ];
    let end = "[assistant]Yes/[user]<system-reminder>\nNow\n</system-reminder>\n\nWhy?/";
    assert_eq!(render(STRICT, &messages), format!("[system]A\n\nB/[user]Hi/{end}"));
    assert_eq!(render(BARE, &messages[..3]), "[Q]A\n\nB\n\nHi");
    // The result of a tool has it, so that the turn goes on.
    let messages = [
        Message::user("Hi"),
        calling(&[call("a", "f", "{}")]),
        Message::tool("a", "1"),
        Message::system("Now"),
    ];
    let end = "[tool]1\n\n<system-reminder>\nNow\n</system-reminder>/";
    assert!(render(STRICT, &messages).ends_with(end));
}

#[test]
fn arguments_are_what_the_template_takes() {
    let shown = |source: &str, arguments: &str| {
        let messages = [Message::user("Hi"), calling(&[call("a", "f", arguments)])];
        render(source, &messages)
    };
    for (given, json) in [
        ("{\"a\": 1}", "{\"a\": 1}"),
        ("", "{}"),
        ("null", "{}"),
        ("{\"a\": tru", "{}"),
        ("[1]", "{}"),
        ("\"{\\\"a\\\": 1}\"", "{\"a\": 1}"),
    ] {
        let text = shown(WIDE, given);
        assert!(text.contains(&format!("\"arguments\": {json}}}")), "{given}: {text}");
    }
    assert!(shown(STRICT, "{\"a\": \"b\", \"c\": [1]}").contains("[call f]a=b;c=[1];"));
    for (given, json) in [("{\"a\":1}", "{\"a\":1}"), ("", "{}"), ("{\"a\": tru", "{\"a\": tru")] {
        assert!(shown(ADDING, given).contains(&format!("f<｜tool▁sep｜>{json}<｜")));
    }
}

#[test]
fn results_follow_their_calls() {
    let calls = [call("a", "f", "{}"), call("b", "g", "{}"), call("c", "h", "{}")];
    let names = "{% for m in messages %}{{ m.role }}:{{ m.name }}:{{ m.content }}\
                 {{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}";
    let tail = |results: &[Message]| {
        let messages = [&[Message::user("Hi"), calling(&calls)], results].concat();
        let text = render(names, &messages);
        text.split_once("];").unwrap().1.to_owned()
    };
    let all = "tool:f:1;tool:g:2;tool:h:(no result);";
    assert_eq!(tail(&[Message::tool("b", "2"), Message::tool("a", "1")]), all);
    assert_eq!(tail(&[Message::new("tool", "1"), Message::new("function", "2")]), all);
    assert_eq!(tail(&[Message::new("tool", "2").name("g"), Message::new("tool", "1")]), all);
    assert_eq!(
        tail(&[Message::tool("a", "1"), Message::user("So?"), Message::tool("b", "2")]),
        format!("{all}user::So?;")
    );
    let template = template(names);
    for (messages, part) in [
        (
            vec![Message::user("Hi"), Message::tool("x", "1")],
            "messages[1] is the result of the call \"x\"",
        ),
        (vec![Message::new("tool", "1")], "messages[0] is the result"),
        (
            vec![
                calling(&calls[..1]),
                Message::tool("a", ""),
                calling(&calls[1..]),
                Message::tool("a", ""),
            ],
            "messages[3]",
        ),
    ] {
        let options = ChatOptions::default();
        let error = template.render_conversation(&messages, true, &options, &Literal::AS_IS);
        assert!(error.unwrap_err().to_string().contains(part), "{part}");
    }
}

#[test]
fn ids_have_the_form_that_the_template_shows() {
    let turn = |id: &str| {
        [
            Message::user("Hi"),
            calling(&[call(id, "f", "{}")]),
            Message::tool(id, "1"),
            Message::assistant("So"),
        ]
    };
    // Clients may send the same id in each turn.
    let messages = [turn("call_7"), turn("call_7")].concat();
    let text = render(NUMBERED, &messages);
    for part in [
        "<|tool_call_begin|>functions.f:0<|",
        "<|tool_call_begin|>functions.f:1<|",
        "(functions.f:1)",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let text = render(TURNS, &messages);
    assert!(text.contains("[ID]call00000") && text.contains("[ID]call00001"), "{text}");
}

#[test]
fn tools_are_in_the_system_message_of_templates_without_them() {
    let messages = [Message::system("Be brief."), Message::user("Hi")];
    let text = render_with(ADDING, &messages, &options("Reads."));
    let start = "Be brief.\n\n## Tools\nYou have access to the following tools:\n\n### read\n\
                 Description: Reads.\n\nParameters: {";
    assert!(text.starts_with(start) && text.ends_with("<｜User｜>Hi"), "{text}");
    let text = render_with(BARE, &messages, &options("Reads."));
    assert!(text.contains("<tools>\n{\"name\":\"read\",\"description\":\"Reads.\""), "{text}");
    let calls = [
        Message::user("Hi"),
        calling(&[call("a", "read", "{\"path\": \"x\"}")]),
        Message::tool("a", "1"),
    ];
    assert_eq!(
        render(BARE, &calls),
        "[Q]Hi[A]<tool_call>\n{\"name\": \"read\", \"arguments\": {\"path\": \"x\"}}\n</tool_call>\
         [Q]<tool_response>\n1\n</tool_response>"
    );
}

#[test]
fn a_rejected_conversation_has_the_reason_of_the_template() {
    let source = "{{ messages[0].content }}{% if messages[0].content == 'no' %}\
                  {{ raise_exception('not this') }}{% endif %}";
    let options = ChatOptions::default();
    let error = template(source).render_conversation(
        &[Message::user("no")],
        true,
        &options,
        &Literal::AS_IS,
    );
    assert!(error.unwrap_err().to_string().contains("not this"));
}

/// Expected texts follow the published encoder.
#[test]
fn the_built_in_template_of_deepseek_v32() {
    let source = include_str!("../dsml.jinja");
    let thinking = ChatOptions::default().thinking(true);
    let asked = [Message::system("Be brief."), Message::user("Hi")];
    assert_eq!(render(source, &asked), "<s>Be brief.<｜User｜>Hi<｜Assistant｜></think>");
    let text = render_with(source, &asked, &thinking);
    assert_eq!(text, "<s>Be brief.<｜User｜>Hi<｜Assistant｜><think>");

    let calls = [call("a", "f", "{\"s\": \"x\\n\", \"n\": [1, 2]}"), call("b", "g", "{}")];
    let messages = [
        Message::user("Hi"),
        Message::assistant("Old.").reasoning("Old thought."),
        Message::user("Go"),
        Message::assistant("Look.").reasoning("Hm.").tool_calls(calls.to_vec()),
        Message::tool("a", "1"),
        Message::tool("b", "2"),
    ];
    let invokes = "\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n\
        <｜DSML｜parameter name=\"s\" string=\"true\">x\n</｜DSML｜parameter>\n\
        <｜DSML｜parameter name=\"n\" string=\"false\">[1, 2]</｜DSML｜parameter>\n\
        </｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n\n</｜DSML｜invoke>\n\
        </｜DSML｜function_calls><｜end▁of▁sentence｜>\n\n<function_results>\n<result>1</result>\n\
        <result>2</result>\n</function_results>\n\n";
    let old = "<s><｜User｜>Hi<｜Assistant｜></think>Old.<｜end▁of▁sentence｜><｜User｜>Go<｜Assistant｜>";
    assert_eq!(
        render_with(source, &messages, &thinking),
        format!("{old}<think>Hm.</think>Look.{invokes}<think>")
    );
    assert_eq!(render(source, &messages), format!("{old}</think>Look.{invokes}</think>"));

    let text = render_with(source, &asked, &options("Reads."));
    assert!(text.starts_with("<s>Be brief.\n\n## Tools\n\nYou have access to a set of tools"));
    let end = "<functions>\n{\"name\": \"read\", \"description\": \"Reads.\", \"parameters\": \
               {\"type\": \"object\", \"properties\": {\"path\": {\"type\": \"string\"}}}}\n";
    assert!(text.contains(end), "{text}");
    assert!(text.ends_with("</functions>\n<｜User｜>Hi<｜Assistant｜></think>"), "{text}");
}
