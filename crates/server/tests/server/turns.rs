//! Second turns: they compute their new tokens only, on models with recurrent states too.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryRequest,
    base::Notices,
    runtime::DeviceOptions,
    serve::{ForcedTokens, ServingCore, ServingOptions},
    session::SnapshotFolder,
};
use moeflux_server::{LoadedModel, ServerOptions};
use serde_json::{Value, json};

use crate::{
    TestServer,
    client::{chat, post},
};

/// A template whose prompt opens the thoughts, and which drops those before the last question, as
/// in Qwen3.5's.
const TEMPLATE: &str = "\
{%- set ns = namespace(last=0) %}\
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}\
{%- endfor %}\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}\
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}\
{{- 'Call one as <tool_call>\\n{\"name\": NAME, \"arguments\": OBJECT}\\n</tool_call>' }}\
{{- '<|im_end|>\\n' }}{%- endif %}\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}\
{%- if message.reasoning_content and loop.index0 > ns.last %}\
{{- '<think>\\n' + message.reasoning_content.strip() + '\\n</think>\\n\\n' }}{%- endif %}\
{{- message.content }}\
{%- for call in message.tool_calls or [] %}\
{{- '\\n<tool_call>\\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}\
{%- if call.function.arguments is string %}{{- call.function.arguments }}\
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}\
{{- '}\\n</tool_call>' }}{%- endfor %}\
{{- '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}";

/// Thoughts, text and a call whose JSON has no spaces, unlike the template's.
const CALL: &str = "I have to look at it first, and I think about that for a while, so that the \
                    thoughts are longer than what a turn may compute again.\n</think>\n\nLet me \
                    look.\n<tool_call>\n{\"name\":\"read\",\"arguments\":{\"path\":\"a\"}}\n\
                    </tool_call>";

/// Thoughts and text.
const ANSWER: &str = "It is there, and I think about that for a while, so that the thoughts are \
                      longer than what a turn may compute again.\n</think>\n\nIt is there.";

/// Tokens that a turn may compute beside its new message.
const EXTRA: usize = 64;

/// The files of a model of which the template is [`TEMPLATE`].
type Files = Vec<(&'static str, &'static [u8])>;

/// The built-in model: attention only.
fn attention() -> Files {
    let files = moeflux_tales::FILES.map(|(name, bytes)| match name {
        "chat_template.jinja" => (name, TEMPLATE.as_bytes()),
        _ => (name, bytes),
    });
    files.into()
}

/// A small model with recurrent states, whose tokens are bytes.
fn recurrent() -> Files {
    let folder = moeflux_goldens::golden("qwen3_next");
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&read("tokenizer.json")).unwrap();
    for (id, content) in [(258, "<|im_start|>"), (259, "<|im_end|>")] {
        tokenizer["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }));
    }
    let leaked = |bytes: Vec<u8>| -> &'static [u8] { bytes.leak() };
    vec![
        ("config.json", leaked(read("config.json"))),
        ("model.safetensors", leaked(read("model.safetensors"))),
        ("tokenizer.json", leaked(tokenizer.to_string().into_bytes())),
        ("tokenizer_config.json", leaked(read("tokenizer_config.json"))),
        ("chat_template.jinja", TEMPLATE.as_bytes()),
    ]
}

fn engine(files: &Files, sessions: usize) -> Engine {
    let memory = MemoryRequest::default().sessions(sessions);
    let device = DeviceOptions::default().name("cpu").threads(1).exact(true);
    let options = EngineOptions::default().memory(memory).device(device);
    Engine::open(Checkpoint::embedded(files).unwrap(), options, &mut |_, _| {}).unwrap()
}

/// A server whose answers are these.
fn scripted(files: &Files, sessions: usize, script: &[&str]) -> TestServer {
    scripted_with(files, sessions, script, None)
}

/// A server whose answers are these, and which saves prompts in a folder.
fn scripted_with(
    files: &Files,
    sessions: usize,
    script: &[&str],
    folder: Option<&Path>,
) -> TestServer {
    scripted_saying(files, script, SavedIn { sessions, folder, notices: Notices::default() })
}

/// Sessions of a server, and where it saves prompts.
struct SavedIn<'a> {
    sessions: usize,
    folder: Option<&'a Path>,
    notices: Notices,
}

fn scripted_saying(files: &Files, script: &[&str], saved: SavedIn<'_>) -> TestServer {
    let SavedIn { sessions, folder, notices } = saved;
    let engine = engine(files, sessions);
    let tokenizer = engine.text().unwrap().tokenizer();
    let answers = script.iter().map(|answer| tokenizer.encode(answer, false).unwrap()).collect();
    let mut options = ServerOptions::default();
    let end = engine.end_tokens().ids()[0];
    options.masks = vec![Arc::new(ForcedTokens::new(answers, end))];
    let turns = folder.map(|path| path.join("turns"));
    let open = |path| SnapshotFolder::open(path, 1 << 30).unwrap().notices(notices.clone());
    let folder = folder.map(open);
    let serving = ServingOptions::default().prefix_cache(folder);
    let core = ServingCore::start(&engine, serving).unwrap();
    TestServer::run(LoadedModel::new(core).turn_folder(turns).notices(notices), options)
}

/// A conversation with a long system prompt and a tool.
struct Talk {
    messages: Vec<Value>,
}

impl Talk {
    fn new(question: &str) -> Self {
        let system = "Read files with care, and say what is in them. ".repeat(40);
        let system = json!({"role": "system", "content": system});
        Self { messages: vec![system, json!({"role": "user", "content": question})] }
    }

    fn add(&mut self, message: Value) {
        self.messages.push(message);
    }

    fn user(&mut self, text: &str) {
        self.add(json!({"role": "user", "content": text}));
    }

    /// Adds the result of the last call.
    fn result(&mut self, text: &str) {
        let id = self.messages.last().unwrap()["tool_calls"][0]["id"].clone();
        assert!(id.is_string(), "{:?}", self.messages.last());
        self.add(json!({"role": "tool", "tool_call_id": id, "content": text}));
    }

    /// Asks, and adds the answer without its thoughts. Returns the number of computed tokens.
    fn ask(&mut self, server: &TestServer) -> usize {
        let schema = json!({"type": "object", "properties": {"path": {"type": "string"}}});
        let function = json!({"name": "read", "description": "Reads.", "parameters": schema});
        let reply = chat(
            server,
            &json!({
                "messages": self.messages,
                "tools": [{"type": "function", "function": function}],
            }),
        );
        assert_eq!(reply.status, 200, "{}", reply.body);
        let reply = reply.json();
        let mut message = reply["choices"][0]["message"].clone();
        let thoughts = message.as_object_mut().unwrap().remove("reasoning_content");
        message.as_object_mut().unwrap().remove("reasoning");
        assert!(thoughts.unwrap().as_str().unwrap().contains("I think about that"));
        self.add(message);
        let usage = &reply["usage"];
        let count = |value: &Value| value.as_u64().unwrap() as usize;
        count(&usage["prompt_tokens"]) - count(&usage["prompt_tokens_details"]["cached_tokens"])
    }
}

/// Tokens of a text.
fn tokens(server: &TestServer, text: &str) -> usize {
    let reply = post(server, "/tokenize", &json!({"content": text}));
    reply.json()["tokens"].as_array().unwrap().len()
}

fn two_conversations(files: &Files, sessions: usize) {
    let script = [CALL, CALL, CALL, CALL, ANSWER, ANSWER];
    let server = scripted(files, sessions, &script);
    let (mut a, mut b) = (Talk::new("Read a."), Talk::new("What do you find in a?"));
    let all = a.ask(&server);
    assert!(all > 400, "{all}");
    let b_first = b.ask(&server);
    let allowed = |text: &str| tokens(&server, text) + EXTRA;
    assert!(b_first <= allowed("What do you find in a?"), "{b_first} of {all}");
    for round in 0..2 {
        for talk in [&mut a, &mut b] {
            talk.result("It has letters.");
            let computed = talk.ask(&server);
            assert!(computed <= allowed("It has letters."), "{computed} in round {round}");
        }
    }
}

#[test]
fn a_round_of_tools_computes_its_new_tokens_only() {
    two_conversations(&attention(), 4);
    two_conversations(&recurrent(), 4);
}

/// Clients of Ollama's API drop the ids of calls.
#[test]
fn a_round_of_tools_without_ids_computes_its_new_tokens_only() {
    let server = scripted(&attention(), 1, &[CALL, ANSWER]);
    let function = json!({"name": "read", "description": "Reads.", "parameters": {}});
    let ask = |messages: &[Value]| {
        let body = json!({
            "messages": messages, "tools": [{"type": "function", "function": function}],
            "stream": false,
        });
        let before = server.core.stats();
        let message = post(&server, "/api/chat", &body).json()["message"].clone();
        let after = server.core.stats();
        let prompt = after.prompt_tokens - before.prompt_tokens;
        (message, (prompt - (after.reused_tokens - before.reused_tokens)) as usize)
    };
    let question = Talk::new("Read a.").messages;
    let (message, all) = ask(&question);
    let call = json!({"function": message["tool_calls"][0]["function"]});
    let answer = json!({"role": "assistant", "content": message["content"], "tool_calls": [call]});
    let result = json!({"role": "tool", "tool_name": "read", "content": "It has letters."});
    let (message, computed) = ask(&[question, vec![answer, result]].concat());
    assert!(message["thinking"].as_str().unwrap().contains("I think about that"), "{message}");
    let allowed = tokens(&server, "It has letters.") + EXTRA;
    assert!(computed <= allowed, "{computed} of {all}");
}

/// The prefix cache has what the only session had.
#[test]
fn conversations_that_share_a_session_compute_their_new_tokens_only() {
    two_conversations(&attention(), 1);
    two_conversations(&recurrent(), 1);
}

/// The template drops the thoughts of earlier turns, so the text of the last answer is computed
/// with the new question.
#[test]
fn a_new_question_computes_the_last_answer_and_itself() {
    for files in [attention(), recurrent()] {
        let server = scripted(&files, 1, &[ANSWER]);
        let (mut a, mut b) = (Talk::new("Is it there?"), Talk::new("Where is it?"));
        a.ask(&server);
        b.ask(&server);
        let allowed = tokens(&server, "It is there. And the other one?") + EXTRA;
        for talk in [&mut a, &mut b] {
            talk.user("And the other one?");
            let computed = talk.ask(&server);
            assert!(computed <= allowed, "{computed} of at most {allowed}");
        }
    }
}

#[test]
fn a_turn_after_a_restart_computes_its_new_tokens_only() {
    for files in [attention(), recurrent()] {
        let folder = tempfile::tempdir().unwrap();
        let mut server = scripted_with(&files, 1, &[ANSWER], Some(folder.path()));
        let mut a = Talk::new("Is it there?");
        a.ask(&server);
        server.wait_for(|core| core.stats().saved_prefixes > 0);
        server.end();

        let server = scripted_with(&files, 1, &[ANSWER], Some(folder.path()));
        let allowed = |text: &str| tokens(&server, text) + EXTRA;
        a.user("And the other one?");
        let (computed, most) = (a.ask(&server), allowed("It is there. And the other one?"));
        assert!(computed <= most, "{computed} of at most {most}");
        let (computed, most) = (Talk::new("Where?").ask(&server), allowed("Where?"));
        assert!(computed <= most, "{computed} of at most {most}");
        assert!(server.core.stats().restored_prompts > 0);
    }
}

/// The client sends no thoughts, so the second server needs those of the first one.
#[test]
fn a_round_of_tools_after_a_restart_computes_its_new_tokens_only() {
    for files in [attention(), recurrent()] {
        let folder = tempfile::tempdir().unwrap();
        let mut server = scripted_with(&files, 1, &[CALL], Some(folder.path()));
        let mut talk = Talk::new("Read a.");
        talk.ask(&server);
        server.end();

        let server = scripted_with(&files, 1, &[ANSWER], Some(folder.path()));
        talk.result("It has letters.");
        let (computed, most) = (talk.ask(&server), tokens(&server, "It has letters.") + EXTRA);
        assert!(computed <= most, "{computed} of at most {most}");
    }
}

#[test]
fn a_folder_that_vanishes_fails_nothing_and_is_said_once() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().join("cache");
    let lines = Arc::new(Mutex::new(Vec::new()));
    let written = Arc::clone(&lines);
    let notices = Notices::new(move |text| written.lock().unwrap().push(text.to_owned()));
    let saved = SavedIn { sessions: 1, folder: Some(&folder), notices };
    let mut server = scripted_saying(&attention(), &[ANSWER], saved);
    let ask = |question: &str| {
        Talk::new(question).ask(&server);
    };
    ask("Is it there?");
    server.wait_for(|core| core.stats().saved_prefixes > 0);
    let before = server.core.stats().saved_prefixes;
    // Both writers may still be at work.
    crate::wait_until(|| fs::remove_dir_all(&folder).is_ok());
    ask("Where is it?");
    server.wait_for(|core| core.stats().saved_prefixes > before);
    crate::wait_until(|| folder.join("turns").is_dir());
    // Something else is in its place.
    crate::wait_until(|| {
        let _ = fs::remove_dir_all(&folder);
        fs::write(&folder, "").is_ok()
    });
    ["Who has it?", "When was it there?", "Why is it there?"].into_iter().for_each(ask);
    server.end();
    let lines = lines.lock().unwrap();
    let said = |words: &str| lines.iter().filter(|line| line.contains(words)).count();
    assert!(said("made anew") > 0, "{lines:?}");
    assert_eq!((said("prompts are not saved"), said("answers are not saved")), (1, 1), "{lines:?}");
}

/// The script goes on with its thoughts behind a budget, which the mask does not let it.
#[test]
fn thoughts_end_within_their_budget() {
    let server = scripted(&attention(), 1, &[ANSWER]);
    let ask = |field: &str, budget: Value| {
        chat(&server, &json!({"messages": [{"role": "user", "content": "Hm?"}], field: budget}))
    };
    for budget in [json!(1000), json!(-1), json!(null)] {
        let reply = ask("thinking_budget", budget);
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    for (field, budget) in
        [("reasoning_budget", json!(2)), ("thinking", json!({"budget_tokens": 2}))]
    {
        let reply = ask(field, budget);
        assert!(reply.status == 500 && reply.body.contains("token 2"), "{}", reply.body);
    }
    let reply = ask("thinking", json!({"budget_tokens": -2}));
    assert!(reply.status == 400 && reply.body.contains("thinking.budget_tokens"), "{}", reply.body);
}

/// A question of this length.
fn long(words: usize) -> Value {
    json!({"role": "user", "content": "and so on ".repeat(words)})
}

#[test]
fn the_oldest_turns_are_dropped_only_where_that_is_asked_for() {
    let server = scripted(&attention(), 1, &[ANSWER]);
    let mut messages = vec![json!({"role": "system", "content": "Be brief."})];
    for _ in 0..3 {
        messages.push(long(300));
        messages.push(json!({"role": "assistant", "content": "Yes."}));
    }
    messages.push(json!({"role": "user", "content": "Is it there?"}));
    let mut body = json!({"messages": messages});
    let refused = chat(&server, &body);
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["code"], "context_length_exceeded");
    body["truncation"] = json!("auto");
    let reply = chat(&server, &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let dropped = reply.head.split("x-moeflux-dropped-messages: ").nth(1).unwrap();
    let dropped: usize = dropped.split("\r\n").next().unwrap().parse().unwrap();
    assert!(dropped > 0 && dropped.is_multiple_of(2), "{dropped}");
    let metrics = crate::client::get(&server, "/metrics").body;
    let line = format!("moeflux_dropped_messages_total {dropped}");
    assert!(metrics.lines().any(|found| found == line), "{metrics}");
    // The last question does not fit either.
    body["messages"].as_array_mut().unwrap().push(long(3000));
    assert_eq!(chat(&server, &body).status, 400);
    body["truncation"] = json!("never");
    assert_eq!(chat(&server, &body).status, 400);
}
