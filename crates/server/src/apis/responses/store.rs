//! Responses that later requests continue, in memory.

use std::{
    collections::{HashMap, VecDeque},
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use moeflux::Message;
use tokio::sync::oneshot;

use super::{
    earlier::EarlierMessages,
    encoder::ResponseEncoder,
    items::{ItemStatus, ResponseEvent, ResponseObject},
};
use crate::{
    requests::{delta::Delta, images::ImageTable, respond::Encoder},
    transport::{error::ApiError, json},
};

/// Most stored responses.
const RESPONSES: usize = 256;

/// Most bytes of stored responses, and of the images of running ones that will be stored.
pub(crate) const RESPONSES_BYTES: usize = 24 << 20;

/// Maximum bytes of the images of a stored response. With more it is not stored.
const IMAGES_BYTES: usize = 8 << 20;

/// Bytes of a message beside its texts.
const MESSAGE_BYTES: usize = 128;

/// The last responses that were used. The least recently used ones are dropped.
#[derive(Debug, Default)]
pub(crate) struct ResponseStore(Mutex<StoredResponses>);

#[derive(Debug, Default)]
struct StoredResponses {
    /// The most recently used one last.
    entries: VecDeque<Arc<StoredResponse>>,
    bytes: usize,
    /// Bytes of the images of responses that are being generated and will be stored.
    running_bytes: usize,
    /// Responses that are being generated, by their id.
    running: HashMap<String, RunningEntry>,
}

/// A response that is being generated.
#[derive(Debug)]
struct RunningEntry {
    /// Cancels it; `None` once that is done.
    cancel: Option<oneshot::Sender<()>>,
    /// Requests that wait for the response in JSON.
    waiting: Vec<oneshot::Sender<String>>,
}

/// A response that is being generated, for its encoder and its answer.
pub(super) struct RunningResponse {
    pub(super) end: RunningEnd,
    /// Resolves when the response is cancelled.
    pub(super) cancelled: oneshot::Receiver<()>,
}

/// End of a response that is being generated: when it is dropped, it runs no more.
pub(super) struct RunningEnd {
    store: Arc<ResponseStore>,
    id: String,
    /// Bytes of its images, if it is to be stored.
    image_bytes: usize,
}

impl RunningEnd {
    /// Takes room for the images of the response, of which stored ones make way for it. Returns
    /// whether there is enough.
    fn reserve(&mut self, image_bytes: usize) -> bool {
        let mut stored = self.store.lock();
        let has_room = stored.running_bytes + image_bytes <= RESPONSES_BYTES;
        if has_room {
            stored.running_bytes += image_bytes;
            self.image_bytes += image_bytes;
            stored.evict();
        }
        has_room
    }

    fn release(&mut self) {
        self.store.lock().running_bytes -= mem::take(&mut self.image_bytes);
    }

    /// Gives the response in JSON to the requests that wait for it.
    fn give(&self, text: &str) {
        let ended = self.store.lock().running.remove(&self.id);
        for waiting in ended.into_iter().flat_map(|entry| entry.waiting) {
            // A request that is gone does not wait.
            let _ = waiting.send(text.to_owned());
        }
    }
}

impl Drop for RunningEnd {
    fn drop(&mut self) {
        self.release();
        self.store.lock().running.remove(&self.id);
    }
}

/// A response and its conversation.
#[derive(Debug)]
pub(super) struct StoredResponse {
    pub(super) id: String,
    /// JSON text.
    pub(super) text: String,
    /// Messages up to the answer, which is the last one.
    pub(super) conversation: EarlierMessages,
}

impl StoredResponse {
    fn bytes(&self) -> usize {
        let bytes = |message: &Message| {
            let calls = message.tool_calls.iter();
            let calls = calls.map(|call| call.id.len() + call.name.len() + call.arguments.len());
            let thoughts = message.reasoning_content.as_ref().map_or(0, String::len);
            message.content.len() + thoughts + calls.sum::<usize>() + MESSAGE_BYTES
        };
        let EarlierMessages { messages, images } = &self.conversation;
        self.text.len() + messages.iter().map(bytes).sum::<usize>() + images.bytes()
    }
}

impl StoredResponses {
    fn remove(&mut self, id: &str) -> Option<Arc<StoredResponse>> {
        let index = self.entries.iter().position(|entry| entry.id == id)?;
        let removed = self.entries.remove(index)?;
        self.bytes -= removed.bytes();
        Some(removed)
    }

    fn add(&mut self, entry: Arc<StoredResponse>) {
        self.bytes += entry.bytes();
        self.entries.push_back(entry);
        self.evict();
    }

    /// Drops the least recently used responses beyond the limits.
    fn evict(&mut self) {
        while self.bytes + self.running_bytes > RESPONSES_BYTES && !self.entries.is_empty()
            || self.entries.len() > RESPONSES
        {
            let dropped = self.entries.pop_front();
            self.bytes -= dropped.map_or(0, |entry| entry.bytes());
        }
    }
}

impl ResponseStore {
    /// The response with this id, which the field `param` of a request names.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn get(
        &self,
        param: &'static str,
        id: &str,
    ) -> Result<Arc<StoredResponse>, ApiError> {
        let mut stored = self.lock();
        let found = stored.remove(id).ok_or_else(|| ApiError::no_response(param, id))?;
        stored.add(Arc::clone(&found));
        Ok(found)
    }

    /// Removes a response.
    ///
    /// # Errors
    /// There is none with this id.
    pub(super) fn delete(&self, id: &str) -> Result<(), ApiError> {
        let removed = self.lock().remove(id);
        removed.map(drop).ok_or_else(|| ApiError::no_response("response_id", id))
    }

    /// Begins a response.
    pub(super) fn run(self: &Arc<Self>, id: &str) -> RunningResponse {
        let (cancel, cancelled) = oneshot::channel();
        let entry = RunningEntry { cancel: Some(cancel), waiting: Vec::new() };
        self.lock().running.insert(id.to_owned(), entry);
        RunningResponse {
            end: RunningEnd { store: Arc::clone(self), id: id.to_owned(), image_bytes: 0 },
            cancelled,
        }
    }

    /// Cancels a response that is being generated. Resolves to the response in JSON at its end,
    /// which may have come before.
    ///
    /// # Errors
    /// There is none with this id.
    pub(super) fn cancel(&self, id: &str) -> Result<oneshot::Receiver<String>, ApiError> {
        let (sender, receiver) = oneshot::channel();
        if let Some(entry) = self.lock().running.get_mut(id) {
            // An answer that has just ended needs no cancel.
            let _ = entry.cancel.take().map(|cancel| cancel.send(()));
            entry.waiting.push(sender);
            return Ok(receiver);
        }
        let _ = sender.send(self.get("response_id", id)?.text.clone());
        Ok(receiver)
    }

    fn add(&self, response: StoredResponse) {
        self.lock().add(Arc::new(response));
    }

    fn lock(&self) -> MutexGuard<'_, StoredResponses> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An encoder whose response is stored at its end.
pub(super) struct StoringEncoder {
    encoder: ResponseEncoder,
    /// Set until the response ends.
    end: Option<RunningEnd>,
    /// Messages before the response, if it is to be stored.
    before: Option<EarlierMessages>,
}

impl StoringEncoder {
    pub(super) fn new(
        encoder: ResponseEncoder,
        end: RunningEnd,
        before: Option<Vec<Message>>,
    ) -> Self {
        let of_messages = |messages| EarlierMessages { messages, ..EarlierMessages::default() };
        let before = before.map(of_messages);
        Self { encoder, end: Some(end), before }
    }

    /// Stores a response that has ended, and gives it to the requests that cancelled it.
    fn store(&mut self) {
        let response = self.encoder.response();
        if response.status == ItemStatus::InProgress {
            return;
        }
        let Some(mut end) = self.end.take() else { return };
        end.release();
        // A response is made of strings and numbers, which always have a JSON form.
        let Ok(text) = json::line(response) else { return };
        if let Some(mut conversation) = self.before.take() {
            conversation.messages.push(response.message());
            let (id, text) = (response.id.clone(), text.clone());
            end.store.add(StoredResponse { id, text, conversation });
        }
        end.give(&text);
    }
}

impl Encoder for StoringEncoder {
    type Event = ResponseEvent;
    type Whole = ResponseObject;

    fn images(&mut self, images: &ImageTable) {
        let Some(end) = &mut self.end else { return };
        let bytes = images.bytes();
        self.before.take_if(|_| bytes > IMAGES_BYTES || !end.reserve(bytes));
        if let Some(before) = &mut self.before {
            before.images = images.clone();
        }
    }

    fn on(&mut self, choice: usize, delta: Delta) -> Vec<ResponseEvent> {
        let events = self.encoder.on(choice, delta);
        self.store();
        events
    }

    fn name(event: &ResponseEvent) -> Option<&'static str> {
        ResponseEncoder::name(event)
    }

    fn ping(&mut self) -> String {
        self.encoder.ping()
    }

    fn early_error(error: &ApiError) -> String {
        ResponseEncoder::failed(error)
    }

    fn error(&mut self, error: &ApiError) -> String {
        self.encoder.error(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_responses_are_dropped() {
        let store = ResponseStore::default();
        let add = |i: usize, bytes: usize| {
            let (id, text) = (format!("resp_{i}"), "x".repeat(bytes));
            let messages = vec![Message::user("Hi")];
            let conversation = EarlierMessages { messages, ..EarlierMessages::default() };
            store.add(StoredResponse { id, text, conversation });
        };
        let has = |i: usize| store.get("response_id", &format!("resp_{i}")).is_ok();
        (0..RESPONSES).for_each(|i| add(i, 1));
        assert!(has(0));
        add(RESPONSES, 1);
        assert!(has(0) && !has(1) && has(2));
        store.delete("resp_2").unwrap();
        assert!(!has(2) && store.delete("resp_2").is_err());
        add(1000, RESPONSES_BYTES - 1000);
        assert!(has(1000) && !has(3));
        add(1001, RESPONSES_BYTES + 1);
        assert!(!has(1001) && !has(0));
        assert_eq!(store.lock().bytes, 0);
    }

    #[test]
    fn images_of_running_responses_take_the_room_of_stored_ones() {
        let store = Arc::new(ResponseStore::default());
        let text = "x".repeat(RESPONSES_BYTES / 2);
        let conversation = EarlierMessages::default();
        store.add(StoredResponse { id: "resp_0".into(), text, conversation });
        let has_stored = || store.get("response_id", "resp_0").is_ok();
        let mut first = store.run("resp_1").end;
        assert!(first.reserve(RESPONSES_BYTES / 2) && has_stored());
        let mut second = store.run("resp_2").end;
        assert!(second.reserve(IMAGES_BYTES) && !has_stored());
        assert!(!second.reserve(RESPONSES_BYTES / 2));
        drop(first);
        assert!(second.reserve(RESPONSES_BYTES / 2));
        drop(second);
        assert_eq!(store.lock().running_bytes, 0);
    }
}
