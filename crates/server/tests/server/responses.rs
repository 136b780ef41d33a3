//! Responses: answers, streams, the store, rounds of tools, errors.

use std::io::{BufRead, BufReader, Read};

use serde_json::{Value, json};

use crate::{
    CONTEXT, TestServer,
    client::{Reply, get, post, receive, send},
    tools::{CALLS, schema, scripted},
};

/// A request for a fable, greedy.
fn fable(more: Value) -> Value {
    let mut body = json!({
        "model": "any",
        "input": "Tell me the fable of The Fox and the Crow.",
        "temperature": 0,
        "max_output_tokens": 40,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn ask(server: &TestServer, body: &Value) -> Value {
    let reply = post(server, "/v1/responses", body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.body);
    reply.json()
}

/// Data of the events of a stream, whose names and numbers are right.
fn events(reply: &Reply) -> Vec<Value> {
    let blocks = reply.body.split_terminator("\n\n").enumerate();
    let event = |(i, block): (usize, &str)| {
        let (name, data) = block.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"], name.strip_prefix("event: ").unwrap());
        assert_eq!(data["sequence_number"], i);
        data
    };
    blocks.map(event).collect()
}

/// A response without what differs between two answers to the same request.
fn comparable(response: &Value) -> Value {
    let mut response = response.clone();
    response["usage"]["input_tokens_details"].take();
    for name in ["id", "created_at"] {
        response[name].take();
    }
    for item in response["output"].as_array_mut().unwrap() {
        for name in ["id", "call_id"] {
            item.as_object_mut().unwrap().remove(name);
        }
    }
    response
}

#[test]
fn a_stream_has_the_response_of_the_whole_answer() {
    let server = TestServer::start(1, 4, "");
    for (more, status) in [
        (json!({}), "incomplete"),
        (json!({"max_output_tokens": 400}), "completed"),
        (json!({"max_output_tokens": 0}), "incomplete"),
        (
            json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2,
                "metadata": {"a": "b"}, "instructions": "Be brief."}),
            "incomplete",
        ),
    ] {
        let whole = ask(&server, &fable(more.clone()));
        assert_eq!((&whole["status"], &whole["object"]), (&json!(status), &json!("response")));
        let mut streamed = fable(more.clone());
        streamed["stream"] = json!(true);
        let reply = post(&server, "/v1/responses", &streamed);
        assert!(reply.head.contains("content-type: text/event-stream; charset=utf-8"));
        let events = events(&reply);
        let last = &events[events.len() - 1];
        assert_eq!(last["type"], format!("response.{status}"));
        assert_eq!(comparable(&last["response"]), comparable(&whole), "{more}");
        let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
        let content = &whole["output"][0]["content"][0];
        assert_eq!(content["text"].as_str().unwrap_or_default(), text);
        if more["top_logprobs"] == 2 {
            let tokens = content["logprobs"].as_array().unwrap().iter();
            let tokens = tokens.map(|entry| entry["token"].as_str().unwrap());
            assert_eq!(tokens.collect::<String>(), text);
            assert_eq!(whole["metadata"], json!({"a": "b"}));
        }
    }
}

#[test]
fn responses_are_stored_continued_and_deleted() {
    let server = TestServer::start(1, 4, "");
    let first = ask(&server, &fable(json!({"instructions": "Be brief."})));
    let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
    assert_eq!(get(&server, &path).json(), first);
    // The conversation goes on, without the instructions.
    let more = json!({"previous_response_id": first["id"], "input": "Go on."});
    let second = ask(&server, &fable(more));
    assert_eq!(second["previous_response_id"], first["id"]);
    let text = &first["output"][0]["content"][0]["text"];
    let items = json!([
        {"role": "user", "content": "Tell me the fable of The Fox and the Crow."},
        {"type": "message", "role": "assistant",
            "content": [{"type": "output_text", "text": text, "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ]);
    let alone = ask(&server, &fable(json!({"input": items, "store": false})));
    assert_eq!(alone["usage"]["input_tokens"], second["usage"]["input_tokens"]);
    assert_eq!(alone["output"][0]["content"], second["output"][0]["content"]);
    let known = |id: &Value| get(&server, &format!("/responses/{}", id.as_str().unwrap())).status;
    assert_eq!((known(&second["id"]), known(&alone["id"])), (200, 404));
    let delete = || receive(send(&server, &format!("DELETE {path}"), &[], b""));
    assert_eq!(delete().json()["deleted"], true);
    let reply = delete();
    assert_eq!((reply.status, known(&first["id"])), (404, 404));
    let error = &reply.json()["error"];
    assert!(error["message"].as_str().unwrap().contains("there is no such response"), "{error}");
    let more = json!({"previous_response_id": first["id"]});
    let reply = post(&server, "/v1/responses", &fable(more));
    assert_eq!(reply.status, 404);
    assert_eq!(reply.json()["error"]["param"], "previous_response_id");
}

#[test]
fn a_round_of_tools_in_responses() {
    let server = scripted(&[CALLS, CALLS, "All done."]);
    let tool = |name: &str| json!({"type": "function", "name": name, "parameters": schema()});
    let namespace = json!({"type": "namespace", "name": "files", "tools": [tool("read")]});
    let body = json!({
        "input": [
            {"type": "message", "role": "developer", "id": "msg_0",
                "content": [{"type": "input_text", "text": "You are an agent."}]},
            {"type": "message", "role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user",
                "content": [{"type": "input_text", "text": "What is here?"}]},
        ],
        "tools": [tool("list"), namespace, {"type": "web_search"}, {"type": "custom", "name": "x"}],
        "tool_choice": "auto", "parallel_tool_calls": true, "store": false,
        "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x", "client_metadata": {},
    });
    let whole = ask(&server, &body);
    assert_eq!(whole["status"], "completed", "{whole}");
    let output = whole["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["message", "function_call", "function_call"]);
    assert_eq!((&output[1]["name"], &output[1]["namespace"]), (&json!("list"), &Value::Null));
    assert_eq!((&output[2]["name"], &output[2]["namespace"]), (&json!("read"), &json!("files")));
    let arguments: Value = serde_json::from_str(output[2]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"path": "a\n"}));
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = events(&post(&server, "/v1/responses", &streamed));
    let last = &events[events.len() - 1]["response"];
    assert_eq!(comparable(last), comparable(&whole));
    for (i, item) in last["output"].as_array().unwrap().iter().enumerate() {
        let of_item = |event: &&Value| event["output_index"] == i;
        let deltas = events.iter().filter(of_item).filter_map(|event| event["delta"].as_str());
        let text = item["arguments"].as_str().or(item["content"][0]["text"].as_str()).unwrap();
        assert_eq!(deltas.collect::<String>(), text);
        let done = events.iter().rfind(of_item).unwrap();
        assert_eq!(done["item"], *item);
    }
    let mut next = body;
    let input = next["input"].as_array_mut().unwrap();
    let thoughts = json!({
        "type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "moeflux:Hm.",
    });
    input.extend([thoughts].into_iter().chain(output.iter().cloned()));
    input.push(json!({"type": "web_search_call", "id": "ws_1"}));
    for (i, content) in [(1, json!("a")), (2, json!([{"type": "input_text", "text": "text"}]))] {
        let id = &output[i]["call_id"];
        input.push(json!({"type": "function_call_output", "call_id": id, "output": content}));
    }
    let done = ask(&server, &next);
    assert_eq!(done["output"][0]["content"][0]["text"], "All done.");
}

#[test]
fn errors_name_the_field() {
    let server = TestServer::start(1, 4, "");
    let image = json!([{"role": "user", "content": [{"type": "input_image", "image_url": ""}]}]);
    let output = json!([{"type": "function_call_output", "call_id": "x", "output": "y"}]);
    for (more, param, words) in [
        (json!({"input": null}), "input", "missing"),
        (json!({"input": []}), "input", "empty"),
        (json!({"input": 7}), "input", "a string or a list"),
        (json!({"input": ["x"]}), "input[0]", "an object"),
        (json!({"input": [{"role": "king", "content": "x"}]}), "input[0].role", "king"),
        (json!({"input": image}), "input[0].content[0].image_url", "only data: URLs"),
        (json!({"input": output}), "input[0].call_id", "no earlier message"),
        (json!({"input": [{"type": "function_call"}]}), "input[0].name", "missing"),
        (json!({"input": [{"type": "item_reference"}]}), "input[0].type", "send the item"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name", "missing"),
        (json!({"tools": [{"type": "namespace"}]}), "tools[0].name", "missing"),
        (json!({"background": true}), "background", "not supported"),
        (json!({"reasoning": "much"}), "reasoning", "an object"),
        (json!({"truncation": "some"}), "truncation", "auto or disabled"),
        (json!({"max_output_tokens": -3}), "max_output_tokens", "at least 0"),
    ] {
        let reply = post(&server, "/v1/responses", &fable(more.clone()));
        assert_eq!(reply.status, 400, "{more}: {}", reply.body);
        let error = &reply.json()["error"];
        assert_eq!(error["param"], param, "{more}: {error}");
        assert!(error["message"].as_str().unwrap().contains(words), "{more}: {error}");
    }
    let long = json!({"input": "crow ".repeat(2 * CONTEXT), "stream": true});
    let reply = post(&server, "/v1/responses", &fable(long.clone()));
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json()["error"]["code"], "context_length_exceeded");
    let reply = get(&server, "/v1/responses/resp_none");
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (404, &json!("response_not_found")));
}

#[test]
fn a_response_that_is_cancelled_ends_early() {
    let server = TestServer::start(1, 4, "");
    for is_stored in [true, false] {
        let more = json!({
            "stream": true, "store": is_stored, "max_output_tokens": CONTEXT, "temperature": 2,
        });
        let body = fable(more).to_string();
        let stream = send(&server, "POST /v1/responses", &[], body.as_bytes());
        let mut stream = BufReader::new(stream);
        let mut head = String::new();
        while !head.contains("response.output_text.delta") {
            assert!(stream.read_line(&mut head).unwrap() > 0, "{head}");
        }
        let created = head.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
        let created: Value = serde_json::from_str(created).unwrap();
        let id = created["response"]["id"].as_str().unwrap();
        let path = format!("/v1/responses/{id}");
        let cancel = || post(&server, &format!("{path}/cancel"), &json!({}));
        let cancelled = std::thread::scope(|scope| {
            // The response ends as its client reads.
            let cancelled = scope.spawn(cancel);
            stream.read_to_string(&mut head).unwrap();
            cancelled.join().unwrap()
        });
        let response = cancelled.json();
        assert_eq!((&response["id"], &response["status"]), (&json!(id), &json!("cancelled")));
        assert_eq!(response["output"][0]["status"], "incomplete");
        let last = head.lines().rev().find_map(|line| line.strip_prefix("data: ")).unwrap();
        let last: Value = serde_json::from_str(last).unwrap();
        assert_eq!((&last["type"], &last["response"]), (&json!("response.incomplete"), &response));
        server.wait_for(|core| core.stats().running == 0);
        let again = cancel();
        assert_eq!(
            (again.status == 200, get(&server, &path).status == 200),
            (is_stored, is_stored)
        );
        assert!(!is_stored || again.json() == response);
    }
    assert_eq!(post(&server, "/v1/responses/resp_x/cancel", &json!({})).status, 404);
}

#[test]
fn the_input_of_a_response_is_counted_and_listed() {
    let server = TestServer::start(1, 4, "");
    let first = ask(&server, &fable(json!({"instructions": "Be brief."})));
    let count = |more: Value| post(&server, "/v1/responses/input_tokens", &fable(more));
    let counted = count(json!({"instructions": "Be brief."})).json();
    let tokens = &first["usage"]["input_tokens"];
    assert_eq!(counted, json!({"object": "response.input_tokens", "input_tokens": tokens}));
    let more = json!({"previous_response_id": first["id"], "input": "Go on."});
    let second = ask(&server, &fable(more.clone()));
    assert_eq!(count(more).json()["input_tokens"], second["usage"]["input_tokens"]);
    let long = count(json!({"input": "crow ".repeat(2 * CONTEXT)})).json();
    assert!(long["input_tokens"].as_u64().unwrap() > 2 * CONTEXT as u64, "{long}");
    assert_eq!(count(json!({"previous_response_id": "resp_x"})).status, 404);
    let path = format!("/v1/responses/{}/input_items", second["id"].as_str().unwrap());
    let page = |query: &str| get(&server, &format!("{path}{query}"));
    let list = page("?order=asc").json();
    let data = list["data"].as_array().unwrap();
    let texts: Vec<&Value> = data.iter().map(|item| &item["content"][0]["text"]).collect();
    let told = &first["output"][0]["content"][0]["text"];
    assert_eq!(texts, [&fable(json!({}))["input"], told, &json!("Go on.")]);
    assert_eq!((&list["object"], &list["has_more"]), (&json!("list"), &json!(false)));
    assert_eq!((&list["first_id"], &list["last_id"]), (&data[0]["id"], &data[2]["id"]));
    // The newest one first, page by page.
    let newest = page("?limit=2").json();
    assert_eq!(newest["data"], json!([data[2], data[1]]));
    assert_eq!(newest["has_more"], true);
    let rest = page(&format!("?limit=2&after={}", newest["last_id"].as_str().unwrap())).json();
    assert_eq!((&rest["data"], &rest["has_more"]), (&json!([data[0]]), &json!(false)));
    for (query, param) in [("?limit=0", "limit"), ("?order=up", "order"), ("?after=x", "after")] {
        let reply = page(query);
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)));
    }
    assert_eq!(get(&server, "/v1/responses/resp_x/input_items").status, 404);
}
