//! Models.

use std::ffi::c_char;

use moeflux::serve::Pooling;
use moeflux_binding::{Description, Fault, HostProcess};
use serde_json::json;

use crate::{
    caller::{self, Handle, NUL, User},
    status::Status,
    structs::OpenOptions,
};

/// Work of opening, as callbacks see it.
const OPENING: f64 = 1000.0;

/// A model with its scheduler. Any number of threads may use it.
pub struct Model {
    process: HostProcess,
    pub(crate) model: moeflux_binding::Model,
}

impl Handle for Model {
    fn process(&self) -> HostProcess {
        self.process
    }
}

/// Opens a model. `path` is a folder, a GGUF file, or "tales-18m", which is built in. Nothing is
/// downloaded. `options` may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_model_open(
    path: *const c_char,
    options: *const OpenOptions,
    out: *mut *mut Model,
) -> Status {
    caller::call(|caller| {
        caller.expect_out("out", out)?;
        let path = caller.text("path", path, NUL)?;
        let options = OpenOptions::read(caller, options)?;
        let (progress, user) = (options.progress, User::new(options.user));
        let mut waiting = |share: f64| match progress {
            Some(report) if !report(user.pointer(), (share * OPENING) as u64, OPENING as u64) => {
                Err(Fault::Interrupted)
            }
            _ => Ok(()),
        };
        let options = options.to_binding(caller)?;
        let model = moeflux_binding::Model::open(path, &options, None, &mut waiting)?;
        caller.write_handle(out, Model { process: HostProcess::current(), model });
        Ok(())
    })
}

/// Plans the memory of a model without loading it: JSON with "lines", "total", "slots", "experts",
/// "context", "sessions". Free it with moeflux_string_free.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_inspect(
    path: *const c_char,
    options: *const OpenOptions,
    out_json: *mut *mut c_char,
) -> Status {
    caller::call(|caller| {
        caller.expect_out("out_json", out_json)?;
        let path = caller.text("path", path, NUL)?;
        let options = OpenOptions::read(caller, options)?.to_binding(caller)?;
        let plan = moeflux_binding::Model::inspect(path, &options)?;
        caller.write_string(out_json, json!(plan).to_string())
    })
}

/// Ends running calls, and frees the memory of host and card before it returns, whoever holds
/// handles: their calls return MOEFLUX_CLOSED.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_model_close(model: *const Model) {
    caller::call(|caller| caller.handle("model", model)?.model.close());
}

#[unsafe(no_mangle)]
pub extern "C" fn moeflux_model_free(model: *mut Model) {
    caller::free(model);
}

fn described(model: *const Model, value: impl FnOnce(Description) -> usize) -> u32 {
    caller::value(0, |caller| {
        let described = caller.handle("model", model)?.model.describe()?;
        Ok(u32::try_from(value(described)).unwrap_or(u32::MAX))
    })
}

/// Tokens of the vocabulary; 0 if the call failed.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_model_vocab(model: *const Model) -> u32 {
    described(model, |model| model.vocab)
}

/// Values of a hidden state; 0 if the call failed.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_model_hidden(model: *const Model) -> u32 {
    described(model, |model| model.hidden)
}

/// Positions per session; 0 if the call failed.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_model_context(model: *const Model) -> u32 {
    described(model, |model| model.context)
}

/// Describes a model: JSON with "model" (path, architecture, device, sizes), "digest", "plan" (as
/// of moeflux_inspect) and "stats" (counters of all steps). Free it with moeflux_string_free.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_model_describe(
    model: *const Model,
    out_json: *mut *mut c_char,
) -> Status {
    caller::call(|caller| {
        caller.expect_out("out_json", out_json)?;
        let model = &caller.handle("model", model)?.model;
        let described = json!({
            "model": model.describe()?,
            "digest": model.digest()?,
            "plan": model.plan()?,
            "stats": model.stats()?,
        });
        caller.write_string(out_json, described.to_string())
    })
}

/// Frees a string that the library returned; NULL is nothing.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_string_free(string: *mut c_char) {
    caller::quietly(|caller| caller.free_string(string));
}

/// Pools the hidden states of tokens. `pooling` is "mean", "last" or "first"; `room` is at least
/// moeflux_model_hidden floats.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_embed(
    model: *const Model,
    tokens: *const u32,
    count: usize,
    pooling: *const c_char,
    normalize: bool,
    out: *mut f32,
    room: usize,
) -> Status {
    caller::call(|caller| {
        let model = &caller.handle("model", model)?.model;
        caller.expect_out("out", out)?;
        let tokens = caller.slice("tokens", tokens, count)?.to_vec();
        let pooling = match caller.text("pooling", pooling, NUL)? {
            "mean" => Pooling::Mean,
            "last" => Pooling::Last,
            "first" => Pooling::First,
            other => {
                let problem = format!("pooling is {other:?}: expected mean, last or first");
                return Err(Fault::Invalid(problem));
            }
        };
        let hidden = model.describe()?.hidden;
        if room < hidden {
            let problem = format!("room is {room}: expected at least {hidden} floats");
            return Err(Fault::Invalid(problem));
        }
        let mut request = model.submit_embedding(tokens, pooling, None)?;
        while request.next(None, &mut |_| Ok(()))?.is_some() {}
        let mut values = request.take_embedding().ok_or(Fault::Closed)?;
        if normalize {
            let norm = values.iter().map(|value| value * value).sum::<f32>().sqrt().max(1e-12);
            values.iter_mut().for_each(|value| *value /= norm);
        }
        caller.fill("out", out, room, &values)
    })
}
