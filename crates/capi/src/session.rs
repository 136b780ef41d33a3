//! Sessions: tokens and the state after them.

use std::{
    ffi::{c_char, c_void},
    path::PathBuf,
    ptr,
    sync::{Mutex, PoisonError},
};

use moeflux_binding::{Fault, HostProcess};

use crate::{
    answers::answer_json,
    callbacks::{DeltaSender, OnDelta},
    caller::{self, Caller, Handle, NUL, User},
    cancel::Cancel,
    model::Model,
    status::Status,
    structs::Synced,
    text::request_options,
};

/// A sequence of tokens and the state after them, for one thread at a time: a second call at once
/// is MOEFLUX_BUSY.
pub struct Session {
    process: HostProcess,
    session: moeflux_binding::Session,
    /// Values that the caller borrows.
    tokens: Mutex<Vec<u32>>,
    logits: Mutex<Vec<f32>>,
}

/// A point of a session, to return to.
pub struct Mark {
    process: HostProcess,
    mark: moeflux_binding::Mark,
}

impl Handle for Session {
    fn process(&self) -> HostProcess {
        self.process
    }
}

impl Handle for Mark {
    fn process(&self) -> HostProcess {
        self.process
    }
}

impl Session {
    fn new(session: moeflux_binding::Session) -> Self {
        Self {
            process: HostProcess::current(),
            session,
            tokens: Mutex::default(),
            logits: Mutex::default(),
        }
    }
}

impl Synced {
    fn write(
        caller: &Caller,
        to: *mut Self,
        synced: moeflux::session::Synced,
    ) -> Result<(), Fault> {
        if to.is_null() {
            return Ok(());
        }
        let synced = Self {
            reused: synced.reused as u64,
            restored: synced.restored as u64,
            rewound: synced.rewound as u64,
            computed: synced.computed as u64,
            ..Self::DEFAULT
        };
        caller.write_sized("synced", to, &synced)
    }
}

/// Result of `run` with a session and the caller's flag.
fn with_session(
    session: *const Session,
    cancel: *const Cancel,
    run: impl FnOnce(
        &Caller,
        &moeflux_binding::Session,
        Option<&moeflux_binding::Cancel>,
    ) -> Result<(), Fault>,
) -> Status {
    caller::call(|caller| {
        let session = &caller.handle("session", session)?.session;
        let cancel = caller.optional_handle(cancel).map(|cancel| &cancel.cancel);
        if cancel.is_some_and(moeflux_binding::Cancel::is_set) {
            return Err(moeflux::Error::Cancelled.into());
        }
        run(caller, session, cancel)
    })
}

/// A new session. MOEFLUX_CONTEXT: all sessions of the plan are taken.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_new(model: *const Model, out: *mut *mut Session) -> Status {
    caller::call(|caller| {
        caller.expect_out("out", out)?;
        let session = caller.handle("model", model)?.model.session()?;
        caller.write_handle(out, Session::new(session));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_free(session: *mut Session) {
    caller::free(session);
}

/// Makes the session hold exactly these tokens; computes what is missing. `cancel` and `synced` may
/// be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_sync(
    session: *mut Session,
    tokens: *const u32,
    count: usize,
    cancel: *const Cancel,
    synced: *mut Synced,
) -> Status {
    with_session(session, cancel, |caller, session, cancel| {
        let tokens = caller.slice("tokens", tokens, count)?.to_vec();
        caller.expect_sized("synced", synced)?;
        Synced::write(caller, synced, session.sync(tokens, cancel, &mut |_| Ok(()))?)
    })
}

/// Appends tokens. After an error or MOEFLUX_CANCELLED, tokens of complete steps stay:
/// moeflux_session_tokens has them.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_feed(
    session: *mut Session,
    tokens: *const u32,
    count: usize,
    cancel: *const Cancel,
) -> Status {
    with_session(session, cancel, |caller, session, cancel| {
        let tokens = caller.slice("tokens", tokens, count)?.to_vec();
        session.feed(tokens, cancel, &mut |_| Ok(()))
    })
}

/// Truncates the session to its first `count` tokens. Models with recurrent states compute again
/// from an earlier point.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_truncate(
    session: *mut Session,
    count: usize,
    cancel: *const Cancel,
    synced: *mut Synced,
) -> Status {
    with_session(session, cancel, |caller, session, cancel| {
        caller.expect_sized("synced", synced)?;
        Synced::write(caller, synced, session.truncate(count, cancel, &mut |_| Ok(()))?)
    })
}

/// A second session with the same state.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_fork(session: *const Session, out: *mut *mut Session) -> Status {
    with_session(session, ptr::null(), |caller, session, _| {
        caller.expect_out("out", out)?;
        caller.write_handle(out, Session::new(session.fork()?));
        Ok(())
    })
}

/// A point to return to.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_mark(session: *const Session, out: *mut *mut Mark) -> Status {
    with_session(session, ptr::null(), |caller, session, _| {
        caller.expect_out("out", out)?;
        let mark = Mark { process: HostProcess::current(), mark: session.mark()? };
        caller.write_handle(out, mark);
        Ok(())
    })
}

/// Returns to a mark. Computes nothing.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_rewind(session: *mut Session, mark: *const Mark) -> Status {
    with_session(session, ptr::null(), |caller, session, _| {
        session.rewind(&caller.handle("mark", mark)?.mark)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn moeflux_mark_free(mark: *mut Mark) {
    caller::free(mark);
}

/// Tokens of the session, borrowed until the next call with it. NULL if the call failed.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_tokens(session: *const Session, count: *mut usize) -> *const u32 {
    caller::value(ptr::null(), |caller| {
        caller.write(count, 0);
        let handle = caller.handle("session", session)?;
        let tokens = handle.session.tokens()?;
        let mut kept = handle.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = tokens;
        caller.write(count, kept.len());
        Ok(kept.as_ptr())
    })
}

/// Logits after the last token, borrowed until the next call with the session. The count is 0 if
/// there are none yet; NULL if the call failed.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_logits(session: *const Session, count: *mut usize) -> *const f32 {
    caller::value(ptr::null(), |caller| {
        caller.write(count, 0);
        let handle = caller.handle("session", session)?;
        let logits = handle.session.logits()?;
        let mut kept = handle.logits.lock().unwrap_or_else(PoisonError::into_inner);
        kept.clone_from(&logits);
        caller.write(count, kept.len());
        Ok(kept.as_ptr())
    })
}

/// Saves the session to a file.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_save(session: *const Session, file: *const c_char) -> Status {
    with_session(session, ptr::null(), |caller, session, _| {
        let file = PathBuf::from(caller.text("file", file, NUL)?);
        session.save(file, None, false).map(drop)
    })
}

/// Restores a saved session. After an error the session is as it was.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_restore(session: *mut Session, file: *const c_char) -> Status {
    with_session(session, ptr::null(), |caller, session, _| {
        session.restore(PathBuf::from(caller.text("file", file, NUL)?))
    })
}

/// Brings the session to `prompt`, or leaves it if `prompt` is NULL, and generates an answer,
/// which the session then holds; of one that is stopped or cancelled it may hold a few tokens
/// more than the last part, or lack the last token. `request_json`, which may be NULL, has
/// sampling, max_tokens, stop, seed, logit_bias, logprobs, response_format, tools and tool_choice
/// as in OpenAI's API, also top_k, min_p, repetition_penalty, stop_token_ids, enable_thinking,
/// thinking_budget, chat_template_kwargs, and raw: true for text that is no conversation.
/// `out_json`, which may be NULL, gets text, reasoning, tool_calls, tokens, finish ("stop",
/// "length", "tool_calls", "stopped"), usage, timings, and logprobs: free it with
/// moeflux_string_free. `on_delta`, which may be NULL, is called on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_session_generate(
    session: *mut Session,
    prompt: *const u32,
    count: usize,
    request_json: *const c_char,
    request_len: usize,
    cancel: *const Cancel,
    on_delta: OnDelta,
    user: *mut c_void,
    out_json: *mut *mut c_char,
) -> Status {
    with_session(session, cancel, |caller, session, cancel| {
        let options = request_options(caller, request_json, request_len)?;
        let prompt = match prompt.is_null() && count == 0 {
            true => None,
            false => Some(caller.slice("prompt", prompt, count)?.to_vec()),
        };
        let mut answer = session.stream(prompt, options)?;
        let mut sender = DeltaSender::new(on_delta, User::new(user));
        sender.send_all(|waiting| answer.next(cancel, waiting))?;
        let json = answer_json(&answer.into_answer(), sender.is_stopped)?;
        caller.write_string(out_json, json)
    })
}
