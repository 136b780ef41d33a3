//! Messages of the library.

use std::{
    ffi::{c_char, c_void},
    sync::Arc,
};

use crate::{
    caller::{self, User},
    status::c_text,
};

/// Called with a message and its level, on any thread. It must not call the library.
pub type OnMessage = Option<extern "C" fn(user: *mut c_void, level: i32, message: *const c_char)>;

/// Sends messages of the library up to a level, from 1 (errors) to 5 (traces), to `receiver`. NULL
/// is none, as at first. Once it returns, the former receiver is not called any more.
#[unsafe(no_mangle)]
pub extern "C" fn moeflux_log(receiver: OnMessage, level: i32, user: *mut c_void) {
    let user = User::new(user);
    caller::call(|_| {
        let receiver = receiver.map(|receiver| -> moeflux_binding::LogReceiver {
            Arc::new(move |level, message| {
                receiver(user.pointer(), level, c_text(message).as_ptr());
            })
        });
        moeflux_binding::log_to(level, receiver);
        Ok(())
    });
}
