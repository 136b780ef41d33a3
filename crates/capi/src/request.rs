//! Requests beside others.

use std::{
    ffi::{c_char, c_void},
    sync::{
        Mutex, PoisonError,
        mpsc::{Receiver, channel},
    },
    thread::{self, JoinHandle, ThreadId},
};

use moeflux::Error;
use moeflux_binding::{HostProcess, RequestStopper};

use crate::{
    answers::answer_json,
    callbacks::{DeltaSender, OnDelta},
    caller::{self, Handle, User},
    model::Model,
    status::{Status, c_text},
    text::request_options,
};

/// Called once, after the last part: with MOEFLUX_OK and the answer's JSON, or with another status
/// and its message.
pub type OnEnd =
    Option<extern "C" fn(user: *mut c_void, status: Status, answer_json_or_message: *const c_char)>;

/// A request that runs beside others.
pub struct Request {
    process: HostProcess,
    stopper: RequestStopper,
    thread: ThreadId,
    /// `None` once its end was waited for.
    ends: Mutex<Option<JoinHandle<()>>>,
}

impl Handle for Request {
    fn process(&self) -> HostProcess {
        self.process
    }
}

/// A request on the way to its callbacks.
struct Submitted {
    request: moeflux_binding::Request,
    on_delta: OnDelta,
    on_end: OnEnd,
    user: User,
}

impl Submitted {
    /// Calls the callbacks, once the caller has the handle.
    fn run(mut self, has_handle: &Receiver<()>) {
        if has_handle.recv().is_err() {
            return;
        }
        let mut json = String::new();
        let (status, message) = caller::outcome(|_| {
            let mut sender = DeltaSender::new(self.on_delta, self.user);
            sender.send_all(|waiting| self.request.next(None, waiting))?;
            json = answer_json(&self.request.answer(), sender.is_stopped)?;
            Ok(())
        });
        drop(self.request);
        let text = c_text(if status == Status::MOEFLUX_OK { &json } else { &message });
        if let Some(on_end) = self.on_end {
            on_end(self.user.pointer(), status, text.as_ptr());
        }
    }
}

/// Submits a request, which joins the running steps, and returns. `on_delta` and `on_end` are
/// called on one thread of the library, which is the request's and computes nothing: a slow
/// callback pauses its own request only. `on_end` is called exactly once, last. `request_json` is
/// as in moeflux_session_generate; `out` gets the handle before the first callback.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_submit(
    model: *const Model,
    prompt: *const u32,
    count: usize,
    request_json: *const c_char,
    request_len: usize,
    on_delta: OnDelta,
    on_end: OnEnd,
    user: *mut c_void,
    out: *mut *mut Request,
) -> Status {
    caller::call(|caller| {
        caller.expect_out("out", out)?;
        let model = &caller.handle("model", model)?.model;
        let prompt = caller.slice("prompt", prompt, count)?.to_vec();
        let options = request_options(caller, request_json, request_len)?;
        let request = model.submit(prompt, Vec::new(), &options, None)?;
        let stopper = request.stopper();
        let submitted = Submitted { request, on_delta, on_end, user: User::new(user) };
        let (written, has_handle) = channel();
        let thread = thread::Builder::new().name("request".into());
        let ends = thread.spawn(move || submitted.run(&has_handle));
        let ends = ends.map_err(|source| Error::Thread { purpose: "of a request", source })?;
        let request = Request {
            process: HostProcess::current(),
            stopper,
            thread: ends.thread().id(),
            ends: Mutex::new(Some(ends)),
        };
        caller.write_handle(out, request);
        // The thread waits for it.
        let _ = written.send(());
        Ok(())
    })
}

/// Ends a request at its next step: MOEFLUX_CANCELLED. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_request_cancel(request: *const Request) {
    caller::call(|caller| {
        caller.handle("request", request)?.stopper.stop();
        Ok(())
    });
}

/// Frees a request. Cancels it if it runs, and waits for the end of its `on_end`, unless a callback
/// of the request calls it. From a callback free no other request: two that free each other wait
/// for ever.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_request_free(request: *mut Request) {
    caller::quietly(|caller| {
        let Ok(owned) = caller.handle("request", request) else { return };
        owned.stopper.stop();
        let ends = owned.ends.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(ends) = ends.filter(|_| thread::current().id() != owned.thread) {
            // A panic has ended the thread.
            let _ = ends.join();
        }
    });
    caller::free(request);
}
