//! Text to tokens and back.

use std::ffi::c_char;

use moeflux_binding::{RequestOptions, messages};

use crate::{
    caller::{self, Caller},
    model::Model,
    status::Status,
};

/// Options of a request as JSON; NULL is the defaults.
pub(crate) fn request_options(
    caller: &Caller,
    json: *const c_char,
    len: usize,
) -> Result<RequestOptions, moeflux_binding::Fault> {
    if json.is_null() {
        return Ok(RequestOptions::default());
    }
    RequestOptions::from_openai(caller.text("request_json", json, len)?)
}

/// Tokens of a text. As snprintf does, writes at most `room` tokens, and to `count` the number that
/// there are. `add_start` adds the tokens that the model's texts begin with.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_encode(
    model: *const Model,
    text: *const c_char,
    len: usize,
    add_start: bool,
    tokens: *mut u32,
    room: usize,
    count: *mut usize,
) -> Status {
    caller::call(|caller| {
        let model = &caller.handle("model", model)?.model;
        let text = caller.text("text", text, len)?;
        let ids = model.with_text(|own| moeflux_binding::encode(own, text, add_start))?;
        caller.fill("tokens", tokens, room, &ids)?;
        caller.write(count, ids.len());
        Ok(())
    })
}

/// Text of tokens. As snprintf does, writes whole characters and a NUL to at most `room` bytes, and
/// to `len` the bytes that there are without the NUL.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_decode(
    model: *const Model,
    tokens: *const u32,
    count: usize,
    skip_special: bool,
    text: *mut c_char,
    room: usize,
    len: *mut usize,
) -> Status {
    caller::call(|caller| {
        let model = &caller.handle("model", model)?.model;
        let tokens = caller.slice("tokens", tokens, count)?;
        let all = model.with_text(|own| moeflux_binding::decode(own, tokens, skip_special))?;
        if room > 0 {
            let end = (0..room.min(all.len() + 1)).rev().find(|end| all.is_char_boundary(*end));
            let part = [&all.as_bytes()[..end.unwrap_or(0)], &[0]].concat();
            caller.fill("text", text.cast(), room, &part)?;
        }
        caller.write(len, all.len());
        Ok(())
    })
}

/// Tokens of a conversation: messages as OpenAI's JSON array; options, which may be NULL, as in
/// moeflux_session_generate. Writes tokens as moeflux_encode does.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_chat_tokens(
    model: *const Model,
    messages_json: *const c_char,
    len: usize,
    options_json: *const c_char,
    options_len: usize,
    tokens: *mut u32,
    room: usize,
    count: *mut usize,
) -> Status {
    caller::call(|caller| {
        let model = &caller.handle("model", model)?.model;
        let messages = messages(caller.text("messages_json", messages_json, len)?)?;
        let options = request_options(caller, options_json, options_len)?;
        let (ids, _) =
            model.with_text(|text| moeflux_binding::chat_tokens(text, &messages, &options))?;
        caller.fill("tokens", tokens, room, &ids)?;
        caller.write(count, ids.len());
        Ok(())
    })
}
