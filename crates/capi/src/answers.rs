//! Answers as JSON.

use std::sync::Arc;

use moeflux::Error;
use moeflux_binding::{Answer, Fault, TokenLogprob};
use serde_json::{Value, json};

/// JSON of an answer. One that its caller cancelled is an error; one that a callback ended
/// (`is_stopped`) is not.
pub(crate) fn answer_json(answer: &Answer, is_stopped: bool) -> Result<String, Fault> {
    let finish = match (is_stopped, answer.finish) {
        (true, _) => "stopped",
        (false, "cancelled") => return Err(Fault::Engine(Arc::new(Error::Cancelled))),
        (false, finish) => finish,
    };
    let call = |call: &moeflux::text::ToolCall| {
        json!({
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        })
    };
    let usage = answer.usage;
    let mut json = json!({
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": answer.tool_calls.iter().map(call).collect::<Vec<_>>(),
        "tokens": answer.tokens,
        "finish": finish,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "reused_tokens": usage.reused_tokens,
            "completion_tokens": usage.completion_tokens,
            "reasoning_tokens": usage.reasoning_tokens,
        },
        "timings": {
            "seconds": answer.seconds,
            "decode_seconds": answer.decode_seconds,
            "tokens_per_second": answer.tokens_per_second(),
        },
    });
    if let Some(logprobs) = &answer.logprobs {
        json["logprobs"] = logprobs.iter().map(logprob).collect();
    }
    Ok(json.to_string())
}

fn logprob(entry: &TokenLogprob) -> Value {
    let top = |(token, logprob): &(u32, f32)| json!({"token": token, "logprob": logprob});
    json!({
        "token": entry.token,
        "bytes": entry.bytes,
        "logprob": entry.logprob,
        "top_logprobs": entry.top.iter().map(top).collect::<Vec<_>>(),
    })
}
