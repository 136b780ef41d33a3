//! Values of fields that clients send, in all APIs: limits, numbers, seeds, stop strings, `null`,
//! and fields of other servers.

use std::sync::Arc;

use moeflux::serve::ForcedTokens;
use moeflux_server::ServerOptions;
use serde_json::{Map, Value, json};

use crate::{
    TestServer,
    client::{Reply, post},
    engine,
};

const PROMPT: &str = "Tell me the fable of The Fox and the Crow.";

/// The same prompt as the model reads it.
const RAW: &str = "<|im_start|>user\nTell me the fable of The Fox and the Crow.<|im_end|>\n\
                   <|im_start|>assistant\n";

/// An API that answers.
struct Api {
    path: &'static str,
    /// Names of its limit.
    limits: &'static [&'static str],
    /// Whether its sampling is in `options`.
    has_options: bool,
}

const fn api(path: &'static str, limits: &'static [&'static str]) -> Api {
    Api { path, limits, has_options: false }
}

const APIS: [Api; 7] = [
    api("/v1/chat/completions", &["max_tokens", "max_completion_tokens", "n_predict"]),
    api("/v1/completions", &["max_tokens", "n_predict"]),
    api("/v1/responses", &["max_output_tokens"]),
    api("/v1/messages", &["max_tokens"]),
    Api { has_options: true, ..api("/api/chat", &["num_predict"]) },
    Api { has_options: true, ..api("/api/generate", &["num_predict"]) },
    api("/completion", &["n_predict"]),
];

/// Text, tokens and reason for the end of an answer.
#[derive(Debug, PartialEq)]
struct Answer {
    text: String,
    tokens: u64,
    is_cut: bool,
}

impl Api {
    fn body(&self, more: &Value) -> Value {
        let mut body = match self.path {
            "/v1/responses" => json!({"input": PROMPT}),
            "/v1/completions" | "/completion" => json!({"prompt": RAW}),
            "/api/generate" => json!({"prompt": PROMPT, "stream": false}),
            "/api/chat" => {
                json!({"messages": [{"role": "user", "content": PROMPT}], "stream": false})
            }
            _ => json!({"messages": [{"role": "user", "content": PROMPT}]}),
        };
        let target = match self.has_options {
            true => {
                body["options"] = json!({});
                &mut body["options"]
            }
            false => &mut body,
        };
        target.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    }

    fn ask(&self, server: &TestServer, more: &Value) -> Reply {
        post(server, self.path, &self.body(more))
    }

    fn answer(&self, server: &TestServer, more: &Value) -> Answer {
        let reply = self.ask(server, more);
        assert_eq!(reply.status, 200, "{} {more}: {}", self.path, reply.body);
        let json = reply.json();
        let (text, tokens, is_cut) = match self.path {
            "/v1/chat/completions" => {
                let choice = &json["choices"][0];
                let tokens = &json["usage"]["completion_tokens"];
                (&choice["message"]["content"], tokens, choice["finish_reason"] == "length")
            }
            "/v1/completions" => {
                let choice = &json["choices"][0];
                let tokens = &json["usage"]["completion_tokens"];
                (&choice["text"], tokens, choice["finish_reason"] == "length")
            }
            "/v1/responses" => {
                let text = &json["output"][0]["content"][0]["text"];
                let reason = &json["incomplete_details"]["reason"];
                (text, &json["usage"]["output_tokens"], *reason == "max_output_tokens")
            }
            "/v1/messages" => {
                let text = &json["content"][0]["text"];
                (text, &json["usage"]["output_tokens"], json["stop_reason"] == "max_tokens")
            }
            "/api/chat" => {
                (&json["message"]["content"], &json["eval_count"], json["done_reason"] == "length")
            }
            "/api/generate" => {
                (&json["response"], &json["eval_count"], json["done_reason"] == "length")
            }
            _ => (&json["content"], &json["tokens_predicted"], json["stop_type"] == "limit"),
        };
        let text = text.as_str().unwrap_or_default().to_owned();
        Answer { text, tokens: tokens.as_u64().unwrap(), is_cut }
    }

    /// Checks that a request is refused, and that the error names the field.
    fn refuses(&self, server: &TestServer, more: &Value, name: &str) {
        let reply = self.ask(server, more);
        assert_eq!(reply.status, 400, "{} {more}: {}", self.path, reply.body);
        assert!(reply.body.contains(name), "{} {more}: {}", self.path, reply.body);
    }
}

/// Fields with some more.
fn with(fields: &Value, name: &str, value: Value) -> Value {
    let mut fields = fields.clone();
    fields[name] = value;
    fields
}

#[test]
fn limits_of_all_apis_have_the_same_values() {
    let server = TestServer::start(1, 4, "");
    // The first sentence is longer than the limit of OpenAI's completions.
    let greedy = json!({"temperature": 0, "stop": "."});
    for api in APIS {
        let whole = api.answer(&server, &greedy);
        assert!(!whole.is_cut && whole.tokens > 16, "{}: {whole:?}", api.path);
        for name in api.limits {
            let limited = |value: Value| api.answer(&server, &with(&greedy, name, value));
            let others = [json!(null), json!(-1.0), json!(1_000_000)];
            let others = others.into_iter().take(if *name == api.limits[0] { 3 } else { 1 });
            for none in others.chain([json!(-1)]) {
                assert_eq!(limited(none), whole, "{} {name}", api.path);
            }
            let empty = Answer { text: String::new(), tokens: 0, is_cut: true };
            assert_eq!(limited(json!(0)), empty, "{} {name}", api.path);
            for three in [json!(3), json!(3.0), json!(0.3e1)] {
                let answer = limited(three);
                assert_eq!((answer.tokens, answer.is_cut), (3, true), "{} {name}", api.path);
            }
            let refused = |value: Value| api.refuses(&server, &with(&greedy, name, value), name);
            [json!(-3), json!(2.5), json!(1e300), json!("3")].into_iter().for_each(refused);
            match name.ends_with("_predict") {
                true => assert_eq!(limited(json!(-2)), whole, "{} {name}", api.path),
                false => api.refuses(&server, &with(&greedy, name, json!(-2)), name),
            }
        }
    }
}

#[test]
fn sampling_of_all_apis_has_the_same_values() {
    let server = TestServer::start(1, 4, "");
    for api in APIS {
        let limit = api.limits[0];
        let short = json!({limit: 6});
        let ask = |more: &Value| {
            let mut fields = short.clone();
            fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            api.answer(&server, &fields).text
        };
        let greedy = ask(&json!({"temperature": 0}));
        // The most probable token, whatever the temperature.
        assert_eq!(ask(&json!({"temperature": 5, "top_p": 0, "seed": 3})), greedy, "{}", api.path);
        assert_eq!(ask(&json!({"temperature": 5, "top_k": 1.0})), greedy, "{}", api.path);
        let random = |seed: Value| ask(&json!({"temperature": 3, "seed": seed}));
        for seed in [json!(i64::MIN), json!(u64::MAX), json!(-7), json!(20.0)] {
            assert_eq!(random(seed.clone()), random(seed), "{}", api.path);
        }
        assert_eq!(random(json!(20)), random(json!(20.0)), "{}", api.path);
        // One pair of random seeds in forty gives the same six tokens.
        let is_random = (0..8).any(|_| random(json!(-1)) != random(json!(-1)));
        let is_native = api.has_options || api.path == "/completion";
        assert_eq!(is_random, is_native, "{}", api.path);
        for seed in [json!(20.5), json!(1e30), json!("1"), json!(true)] {
            api.refuses(&server, &with(&short, "seed", seed), "seed");
        }
        api.refuses(&server, &with(&short, "top_k", json!(20.5)), "top_k");
        api.refuses(&server, &with(&short, "top_p", json!(1.5)), "top_p");
        api.refuses(&server, &with(&short, "repeat_penalty", json!(-1)), "repeat_penalty");
        let stop = if api.path == "/v1/messages" { "stop_sequences" } else { "stop" };
        for none in [json!(""), json!([]), json!([""]), json!(null)] {
            let none = with(&json!({"temperature": 0}), stop, none);
            assert_eq!(ask(&none), greedy, "{}", api.path);
        }
    }
}

/// A server whose answers are empty.
fn silent() -> TestServer {
    let engine = engine(&moeflux_tales::FILES, 2);
    let mut options = ServerOptions::default();
    let end = engine.end_tokens().ids()[0];
    options.masks = vec![Arc::new(ForcedTokens::new(Vec::new(), end))];
    TestServer::serve(&engine, 64, options)
}

/// Optional fields of all APIs, and of servers that extend them.
const OPTIONAL: &str = "
    model stream stream_options temperature top_p top_k min_p seed stop stop_sequences max_tokens
    max_completion_tokens max_output_tokens n_predict num_predict n n_cmpl logprobs top_logprobs
    n_probs logit_bias presence_penalty frequency_penalty repetition_penalty repeat_penalty
    repeat_last_n penalize_nl penalize_newline tools tool_choice functions function_call
    parallel_tool_calls response_format structured_outputs guided_json guided_regex guided_choice
    guided_grammar json_schema grammar format enable_thinking thinking reasoning_effort reasoning
    thinking_budget reasoning_budget chat_template_kwargs chat_template add_generation_prompt
    continue_final_message truncation truncate shift return_progress timings_per_token verbose
    verbosity audio modalities prediction best_of suffix echo service_tier store metadata user
    safety_identifier prompt_cache_key web_search_options instructions previous_response_id include
    text background conversation context_management max_tool_calls system container mcp_servers
    output_config output_format top_a typical_p tfs_z mirostat mirostat_tau mirostat_eta
    dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    xtc_probability xtc_threshold dynatemp_range dynatemp_exponent top_n_sigma min_keep samplers
    ignore_eos min_tokens stop_token_ids include_stop_str_in_output bad_words use_beam_search
    length_penalty skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    prompt_logprobs allowed_token_ids logits_processors cache_prompt id_slot n_keep n_indent
    t_max_prompt_ms t_max_predict_ms response_fields return_tokens image_data lora
    post_sampling_probs options keep_alive think template context raw images num_ctx num_keep
    num_batch num_gpu num_thread add_special with_pieces encoding_format dimensions pooling
    input_extra input_prefix input_suffix order priority";

/// Paths with a request that has the required fields only.
fn requests() -> Vec<(&'static str, Value)> {
    let mut requests: Vec<_> = APIS.iter().map(|api| (api.path, api.body(&json!({})))).collect();
    let messages = json!({"messages": [{"role": "user", "content": "Hello"}]});
    requests.extend([
        ("/v1/chat/completions/input_tokens", messages.clone()),
        ("/v1/messages/count_tokens", messages.clone()),
        ("/v1/responses/input_tokens", json!({"input": "Hello"})),
        ("/apply-template", messages),
        ("/v1/embeddings", json!({"input": "Hello"})),
        ("/api/embed", json!({"input": "Hello"})),
        ("/api/embeddings", json!({"prompt": "Hello"})),
        ("/tokenize", json!({"content": "Hello"})),
        ("/detokenize", json!({"tokens": [5, 6]})),
        ("/api/show", json!({"model": "tales"})),
    ]);
    requests
}

#[test]
fn null_is_as_good_as_absent() {
    let server = silent();
    let check = |path: &str, body: &Value| {
        let reply = post(&server, path, body);
        assert_eq!(reply.status, 200, "{path} {body}: {}", reply.body);
    };
    let names: Vec<&str> = OPTIONAL.split_whitespace().collect();
    for (path, body) in requests() {
        let required = |name: &&&str| body.get(**name).is_none_or(|_| **name == "stream");
        let optional: Vec<&&str> = names.iter().filter(required).collect();
        let nulls = |names: &[&&str]| -> Map<String, Value> {
            names.iter().map(|name| ((**name).to_owned(), Value::Null)).collect()
        };
        for some in optional.chunks(8).chain([&optional[..]]) {
            let mut body = body.clone();
            body.as_object_mut().unwrap().extend(nulls(some));
            if path.starts_with("/api/") && body["stream"].is_null() {
                body["stream"] = json!(false);
            }
            check(path, &body);
            if body.get("options").is_some_and(Value::is_object) {
                body["options"] = Value::Object(nulls(some));
                check(path, &body);
            }
        }
    }
}

/// Sets each field of a request in turn to `null`, also inner ones.
fn nulls(value: &Value) -> Vec<(String, Value)> {
    match value {
        Value::Object(map) => {
            // A schema says more with `null` than without.
            let names = map.keys().filter(|name| *name != "parameters" && *name != "input_schema");
            let field = |name: &String| {
                let with = |inner: Value| {
                    let mut map = map.clone();
                    map[name] = inner;
                    Value::Object(map)
                };
                let inner = nulls(&map[name]).into_iter();
                let inner = inner.map(|(path, value)| (format!("{name}.{path}"), with(value)));
                let own = (name.clone(), with(Value::Null));
                inner.chain([own]).collect::<Vec<_>>()
            };
            names.flat_map(field).collect()
        }
        Value::Array(list) => {
            let element = |i: usize| {
                let with = |inner: Value| {
                    let mut list = list.clone();
                    list[i] = inner;
                    Value::Array(list)
                };
                let inner = nulls(&list[i]).into_iter();
                inner.map(|(path, value)| (path, with(value))).collect::<Vec<_>>()
            };
            (0..list.len()).flat_map(element).collect()
        }
        _ => Vec::new(),
    }
}

#[test]
fn inner_fields_may_be_null() {
    let server = silent();
    let schema = json!({"type": "object", "properties": {}});
    let function = json!({"name": "f", "description": "d", "parameters": schema, "strict": true});
    let chat = json!({
        "stream_options": {"include_usage": true}, "thinking": {"type": "enabled"},
        "response_format": {"type": "text"}, "chat_template_kwargs": {"x": 1},
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "system", "content": "Be kind.", "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "n"},
            {"role": "assistant", "content": "x", "reasoning_content": "Hm.", "reasoning": "Hm.",
                "refusal": "x", "audio": {}, "function_call": null, "tool_calls": [
                    {"id": "c", "type": "function", "index": 0,
                        "function": {"name": "f", "arguments": "{}"}},
                ]},
            {"role": "tool", "tool_call_id": "c", "name": "f", "content": "x"},
        ],
    });
    let messages = json!({
        "max_tokens": 4, "thinking": {"type": "adaptive", "budget_tokens": 5},
        "output_config": {"effort": "high", "format": null}, "metadata": {"user_id": "u"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "f", "description": "d", "input_schema": schema, "strict": false}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello", "citations": []}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {}, "caller": {}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "is_error": false, "content": "x"},
            ]},
        ],
    });
    let responses = json!({
        "reasoning": {"effort": "low", "summary": "auto"}, "store": false,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tools": [
            {"type": "function", "name": "f", "description": "d", "parameters": schema,
                "strict": true},
        ],
        "input": [
            {"type": "message", "role": "user", "id": "m", "status": "completed",
                "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [],
                "encrypted_content": "x"},
            {"type": "function_call", "id": "x", "call_id": "c", "name": "f", "arguments": "{}",
                "namespace": null, "status": "completed"},
            {"type": "function_call_output", "call_id": "c", "output": "x", "id": "y"},
        ],
    });
    let ollama = json!({
        "stream": false, "options": {"num_predict": 1}, "keep_alive": "5m",
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "user", "content": "Hello", "images": []},
            {"role": "assistant", "content": "x", "thinking": "Hm.", "tool_calls": [
                {"id": "c", "function": {"index": 0, "name": "f", "arguments": {}}},
            ]},
            {"role": "tool", "tool_call_id": "c", "tool_name": "f", "content": "x"},
        ],
    });
    // Without these a request, a message or a call has no meaning.
    let required = [
        "messages",
        "messages.role",
        "messages.tool_call_id",
        "messages.tool_use_id",
        "messages.content.type",
        "messages.content.text",
        "messages.content.tool_use_id",
        "messages.content.id",
        "messages.content.name",
        "messages.tool_calls",
        "messages.tool_calls.function",
        "messages.tool_calls.function.name",
        "messages.tool_calls.id",
        "messages.content",
        "tools.function",
        "tools.function.name",
        "tools.name",
        "system.type",
        "system.text",
        "tool_choice.type",
        "response_format.type",
        "input",
        "input.content",
        "input.call_id",
        "input.name",
        "input.type",
        "input.role",
        "input.content.text",
        "input.content.type",
        "text.format.type",
    ];
    for (path, body) in [
        ("/v1/chat/completions", chat),
        ("/v1/messages", messages),
        ("/v1/responses", responses),
        ("/api/chat", ollama),
    ] {
        for (place, body) in nulls(&body).into_iter().chain([(String::new(), body)]) {
            let reply = post(&server, path, &body);
            let is_fine = reply.status == 200 || required.contains(&&*place);
            assert!(is_fine, "{path} {place}: {}", reply.body);
        }
    }
}

#[test]
fn fields_of_other_servers_are_refused_unless_they_change_nothing() {
    let server = silent();
    let everywhere = [
        ("mirostat", json!(2), json!(0)),
        ("typical_p", json!(0.5), json!(1.0)),
        ("tfs_z", json!(0.5), json!(1)),
        ("xtc_probability", json!(0.5), json!(0.0)),
        ("dry_multiplier", json!(0.8), json!(0)),
        ("dynatemp_range", json!(0.5), json!(0)),
        ("top_n_sigma", json!(1.5), json!(-1)),
        ("min_keep", json!(3), json!(0)),
    ];
    for api in &APIS {
        for (name, value, neutral) in &everywhere {
            api.refuses(&server, &json!({*name: value}), name);
            api.answer(&server, &json!({*name: neutral}));
        }
        // A window of penalties matters where there are penalties.
        let window = |size: i64, penalty: f64| {
            let body = json!({"repeat_last_n": size, "repeat_penalty": penalty});
            with(&body, "penalize_newline", json!(true))
        };
        api.refuses(&server, &window(33, 1.1), "repeat_last_n");
        for (size, penalty) in [(33, 1.0), (64, 1.1), (-1, 1.1), (0, 1.1)] {
            api.answer(&server, &window(size, penalty));
        }
    }
    for (path, name, value, neutral) in [
        ("/v1/chat/completions", "audio", json!({"voice": "x"}), json!(null)),
        ("/v1/chat/completions", "modalities", json!(["text", "audio"]), json!(["text"])),
        ("/v1/chat/completions", "function_call", json!({"name": "f"}), json!("auto")),
        ("/v1/chat/completions", "use_beam_search", json!(true), json!(false)),
        ("/v1/chat/completions", "best_of", json!(2), json!(1)),
        ("/v1/chat/completions", "chat_template", json!("x"), json!("")),
        ("/v1/chat/completions", "skip_special_tokens", json!(false), json!(true)),
        ("/v1/chat/completions", "allowed_token_ids", json!([1]), json!([])),
        ("/v1/chat/completions", "prompt_logprobs", json!(1), json!(null)),
        ("/v1/chat/completions", "reasoning_format", json!("none"), json!("auto")),
        ("/v1/completions", "best_of", json!(2), json!(1.0)),
        ("/v1/completions", "truncate_prompt_tokens", json!(5), json!(null)),
        ("/v1/responses", "background", json!(true), json!(false)),
        ("/v1/responses", "prompt", json!({"id": "x"}), json!(null)),
        ("/v1/messages", "mcp_servers", json!([{"url": "x"}]), json!([])),
        ("/completion", "image_data", json!([{"id": 1}]), json!([])),
        ("/completion", "post_sampling_probs", json!(true), json!(false)),
    ] {
        let api = APIS.iter().find(|api| api.path == path).unwrap();
        api.refuses(&server, &json!({name: value}), name);
        api.answer(&server, &json!({name: neutral}));
    }
    let ollama = &APIS[4];
    ollama.refuses(&server, &json!({"rope_frequency_base": 1e6}), "options.rope_frequency_base");
    // All options of Ollama's documentation that have no effect here.
    let harmless = json!({
        "num_ctx": 131_072, "num_keep": 5, "num_batch": 2, "num_gpu": 1, "main_gpu": 0,
        "use_mmap": true, "num_thread": 8, "numa": false, "low_vram": false, "f16_kv": true,
    });
    ollama.answer(&server, &harmless);
    // Fields of other servers that change no answer.
    let harmless = json!({
        "prediction": {"type": "content", "content": "x"}, "service_tier": "auto", "store": true,
        "metadata": {"a": "b"}, "user": "u", "priority": 1, "cache_prompt": true, "id_slot": 0,
        "mirostat_tau": 5, "xtc_threshold": 0.1, "dry_base": 1.75, "verbosity": "low",
    });
    APIS[0].answer(&server, &harmless);
}

#[test]
fn the_end_of_an_answer_is_the_requests() {
    let server = TestServer::start(1, 4, "");
    let ends = server.core.engine().end_tokens().ids().to_vec();
    let token = |text: &str| {
        let reply = post(&server, "/tokenize", &json!({"content": text})).json();
        reply["tokens"][0].clone()
    };
    for api in APIS {
        let limit = api.limits[0];
        let ask = |more: Value| {
            let mut fields = json!({"temperature": 0, limit: 12});
            fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            api.answer(&server, &fields)
        };
        let plain = ask(json!({}));
        // A bias forces the end.
        let bias: Vec<Value> = ends.iter().map(|id| json!([id, 100])).collect();
        let ended = ask(json!({"logit_bias": bias}));
        assert!(ended.tokens == 1 && !ended.is_cut, "{}: {ended:?}", api.path);
        let ignored = ask(json!({"logit_bias": bias, "ignore_eos": true}));
        assert!(ignored.tokens == 12 && ignored.is_cut, "{}: {ignored:?}", api.path);
        let late = ask(json!({"logit_bias": bias, "min_tokens": 4}));
        assert!(late.tokens == 5 && !late.is_cut, "{}: {late:?}", api.path);
        // A word of the answer ends it, or is not in it.
        let word = plain.text.split_whitespace().nth(2).unwrap();
        let stopped = ask(json!({"stop_token_ids": [token(&format!(" {word}"))]}));
        assert!(stopped.tokens < 12 && !stopped.is_cut, "{}: {stopped:?}", api.path);
        assert!(plain.text.starts_with(&stopped.text), "{}: {stopped:?}", api.path);
        let included = ask(json!({"stop": word, "include_stop_str_in_output": true}));
        assert!(included.text.ends_with(word), "{}: {included:?}", api.path);
        let without = ask(json!({"bad_words": [word]}));
        assert!(!without.text.contains(word), "{}: {without:?}", api.path);
        for (name, value) in [
            ("min_tokens", json!(13)),
            ("stop_token_ids", json!([u32::MAX])),
            ("bad_words", json!("x")),
            ("ignore_eos", json!(1)),
        ] {
            api.refuses(&server, &json!({name: value, limit: 12}), name);
        }
    }
}
