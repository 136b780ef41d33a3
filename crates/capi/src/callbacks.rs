//! Parts of answers, and the callbacks that get them.

use std::{
    ffi::{c_char, c_void},
    mem, ptr,
};

use moeflux_binding::{Fault, Waiting};
use serde_json::json;

use crate::caller::User;

/// Kinds of parts. More may come: ignore the ones that you do not know.
#[repr(i32)]
#[allow(non_camel_case_types, clippy::enum_variant_names)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    MOEFLUX_TEXT = 0,
    MOEFLUX_REASONING = 1,
    MOEFLUX_TOOL_CALL = 2,
    MOEFLUX_PROGRESS = 3,
}

/// Part of an answer. Pointers are borrowed until the callback returns.
#[repr(C)]
pub struct Delta {
    /// Size of the struct, which grows at its end.
    pub size: usize,
    /// A moeflux_part.
    pub part: i32,
    /// Whole characters of UTF-8, with a NUL at the end; of a tool call: JSON {"index", "id",
    /// "name", "arguments"}.
    pub text: *const c_char,
    /// Bytes of the text, without the NUL.
    pub len: usize,
    /// Tokens of the part, and of parts before it that had no text; of moeflux_submit only.
    pub tokens: *const u32,
    pub token_count: usize,
    /// Part of the prompt that is computed, 0 to 1.
    pub progress: f64,
}

/// Called with each part of an answer. False ends the answer: MOEFLUX_OK, "finish" is "stopped".
pub type OnDelta = Option<extern "C" fn(user: *mut c_void, delta: *const Delta) -> bool>;

/// Sends the parts of an answer to a callback.
pub(crate) struct DeltaSender {
    on_delta: OnDelta,
    user: User,
    calls: usize,
    progress: f64,
    /// Whether the callback ended the answer.
    pub(crate) is_stopped: bool,
}

impl DeltaSender {
    pub(crate) fn new(on_delta: OnDelta, user: User) -> Self {
        Self { on_delta, user, calls: 0, progress: 0.0, is_stopped: false }
    }

    /// Sends all parts that `next` returns, unless the callback ends the answer.
    pub(crate) fn send_all(
        &mut self,
        mut next: impl FnMut(&mut Waiting<'_>) -> Result<Option<moeflux_binding::Delta>, Fault>,
    ) -> Result<(), Fault> {
        while !self.is_stopped {
            let mut waiting = |share| {
                self.progress(share);
                if self.is_stopped { Err(Fault::Interrupted) } else { Ok(()) }
            };
            match next(&mut waiting) {
                Ok(Some(delta)) => self.send(&delta),
                Ok(None) => break,
                Err(_) if self.is_stopped => break,
                Err(fault) => return Err(fault),
            }
        }
        Ok(())
    }

    fn send(&mut self, delta: &moeflux_binding::Delta) {
        // Nothing is computed of the prompt any more.
        self.progress = 1.0;
        let mut tokens = &delta.tokens[..];
        for (part, text) in
            [(Part::MOEFLUX_REASONING, &delta.reasoning), (Part::MOEFLUX_TEXT, &delta.text)]
        {
            if !text.is_empty() {
                self.send_part(part, text, mem::take(&mut tokens));
            }
        }
        if let Some(call) = &delta.tool_call {
            let index = self.calls;
            self.calls += 1;
            let json = json!({
                "index": index, "id": call.id, "name": call.name, "arguments": call.arguments,
            });
            self.send_part(Part::MOEFLUX_TOOL_CALL, &json.to_string(), tokens);
        }
    }

    fn progress(&mut self, share: f64) {
        if share > self.progress {
            self.progress = share;
            self.send_part(Part::MOEFLUX_PROGRESS, "", &[]);
        }
    }

    fn send_part(&mut self, part: Part, text: &str, tokens: &[u32]) {
        let Some(on_delta) = self.on_delta.filter(|_| !self.is_stopped) else { return };
        let ended = [text.as_bytes(), &[0]].concat();
        let delta = Delta {
            size: mem::size_of::<Delta>(),
            part: part as i32,
            text: ended.as_ptr().cast(),
            len: text.len(),
            tokens: if tokens.is_empty() { ptr::null() } else { tokens.as_ptr() },
            token_count: tokens.len(),
            progress: self.progress,
        };
        self.is_stopped = !on_delta(self.user.pointer(), &delta);
    }
}
