//! Messages of the library, from any of its threads.

use std::{
    fmt::{self, Write},
    sync::{Arc, Once, PoisonError, RwLock},
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id, Record},
    subscriber::{Interest, set_global_default},
};

/// Gets the level of a message, from 1 (errors) to 5 (traces), and its text. It must not call the
/// library.
pub type LogReceiver = Arc<dyn Fn(i32, &str) + Send + Sync>;

/// Receiver, and the highest level that it gets.
static RECEIVER: RwLock<Option<(i32, LogReceiver)>> = RwLock::new(None);

/// Sends the messages of the library up to `level`, from 1 (errors) to 5 (traces), to a receiver.
/// Without one nothing is sent.
pub fn log_to(level: i32, receiver: Option<LogReceiver>) {
    static SUBSCRIBED: Once = Once::new();
    let new = receiver.map(|receiver| (level, receiver));
    let mut kept = RECEIVER.write().unwrap_or_else(PoisonError::into_inner);
    let old = std::mem::replace(&mut *kept, new);
    drop(kept);
    // Its end may be a message.
    drop(old);
    // A Rust program may have its own subscriber, which then gets the messages.
    SUBSCRIBED.call_once(|| drop(set_global_default(LogSubscriber)));
}

fn number(level: &Level) -> i32 {
    match *level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        Level::TRACE => 5,
    }
}

struct LogSubscriber;

impl Subscriber for LogSubscriber {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        // The receiver may change.
        Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let receiver = RECEIVER.read().unwrap_or_else(PoisonError::into_inner);
        let is_ours = metadata.is_event() && metadata.target().starts_with("moeflux");
        is_ours && receiver.as_ref().is_some_and(|(level, _)| number(metadata.level()) <= *level)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = MessageText::default();
        event.record(&mut text);
        // Held over the call: after `log_to` the former receiver is not called.
        let receiver = RECEIVER.read().unwrap_or_else(PoisonError::into_inner);
        let Some((_, receiver)) = &*receiver else { return };
        receiver(number(event.metadata().level()), &(text.message + &text.fields));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[derive(Default)]
struct MessageText {
    message: String,
    fields: String,
}

impl Visit for MessageText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, ", {name}: {value:?}"),
        };
    }
}
