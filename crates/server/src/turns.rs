//! Turn memory: answers as they were generated, found again by what clients send back.
//!
//! Clients send an answer back as text and JSON, many of them without its thoughts. The memory puts
//! the thoughts back and gives the exact tokens, so that the next turn continues the session. An
//! answer with calls is found by the random id of its first call, others by text and the messages
//! before them. Answers that a client has changed are not used.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use moeflux::{
    Message,
    text::{ChatPrompt, ToolCall, Turn},
};
use serde_json::Value;

use crate::answer::Delta;

/// Most bytes of remembered turns. The least recently used ones are forgotten.
pub(crate) const TURNS_BYTES: usize = 64 << 20;

/// Bytes of an entry beside its text and tokens.
const ENTRY_BYTES: usize = 256;

/// Turns of all conversations.
#[derive(Debug)]
pub(crate) struct TurnMemory {
    limit: usize,
    /// Hashes of messages, with a random seed.
    hashes: RandomState,
    turns: Mutex<Remembered>,
}

#[derive(Debug, Default)]
struct Remembered {
    entries: HashMap<TurnKey, Entry>,
    bytes: usize,
    /// Uses so far.
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    turn: Arc<AnsweredTurn>,
    /// Number of its last use.
    used: u64,
}

/// Name of a turn.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum TurnKey {
    /// Id of the first call.
    Call(String),
    /// Hash of the messages up to the answer, which has no calls.
    Text(u64),
}

impl TurnKey {
    /// Key of an answer. `hash` is that of the messages up to it.
    fn new(answer: &Message, hash: u64) -> Self {
        match answer.tool_calls.first() {
            Some(call) => Self::Call(call.id.clone()),
            None => Self::Text(hash),
        }
    }
}

/// A prompt and its answer.
#[derive(Debug)]
pub(crate) struct AnsweredTurn {
    message: Message,
    turn: Turn,
}

/// Messages with their thoughts, and remembered turns among them.
#[derive(Debug, Default)]
pub(crate) struct Recalled {
    pub(crate) messages: Vec<Message>,
    /// The last one first.
    turns: Vec<Arc<AnsweredTurn>>,
}

/// A prompt whose answer will be remembered.
#[derive(Clone, Debug)]
pub(crate) struct TurnStart {
    prompt: ChatPrompt,
    /// Hash of its messages.
    hash: u64,
}

/// Records an answer, and remembers it at its end.
pub(crate) struct TurnRecorder {
    memory: Arc<TurnMemory>,
    start: TurnStart,
    tokens: Vec<u32>,
    message: Message,
}

impl Default for TurnMemory {
    fn default() -> Self {
        Self { limit: TURNS_BYTES, hashes: RandomState::new(), turns: Mutex::default() }
    }
}

impl TurnMemory {
    /// The messages with the thoughts of remembered answers that the client did not send, and
    /// those answers.
    pub(crate) fn recall(&self, messages: &[Message]) -> Recalled {
        let mut recalled = Recalled { messages: messages.to_vec(), turns: Vec::new() };
        let mut hash = 0;
        for message in &mut recalled.messages {
            hash = self.hash(hash, message);
            if message.role != "assistant" {
                continue;
            }
            let Some(turn) = self.find(&TurnKey::new(message, hash)) else { continue };
            if turn.is_same(message) {
                message.reasoning_content.clone_from(&turn.message.reasoning_content);
                recalled.turns.push(turn);
            }
        }
        recalled.turns.reverse();
        recalled
    }

    /// Start of the turn with `prompt`, made of `messages`.
    pub(crate) fn start(&self, prompt: ChatPrompt, messages: &[Message]) -> TurnStart {
        let hash = messages.iter().fold(0, |hash, message| self.hash(hash, message));
        TurnStart { prompt, hash }
    }

    /// Hash of the messages with the hash `before`, and of the next one. Thoughts do not count, as
    /// a client may send them or not.
    fn hash(&self, before: u64, message: &Message) -> u64 {
        let Message { role, content, tool_calls, tool_call_id, .. } = message;
        let calls: Vec<&str> = tool_calls.iter().map(|call| &*call.id).collect();
        self.hashes.hash_one((before, role, content.trim(), calls, tool_call_id))
    }

    fn find(&self, key: &TurnKey) -> Option<Arc<AnsweredTurn>> {
        let mut turns = self.lock();
        turns.uses += 1;
        let used = turns.uses;
        let entry = turns.entries.get_mut(key)?;
        entry.used = used;
        Some(Arc::clone(&entry.turn))
    }

    fn add(&self, key: TurnKey, turn: AnsweredTurn) {
        let mut turns = self.lock();
        let bytes = turn.bytes();
        if bytes > self.limit {
            return;
        }
        turns.uses += 1;
        let entry = Entry { turn: Arc::new(turn), used: turns.uses };
        turns.bytes += bytes;
        if let Some(replaced) = turns.entries.insert(key, entry) {
            turns.bytes -= replaced.turn.bytes();
        }
        while turns.bytes > self.limit {
            let oldest = turns.entries.iter().min_by_key(|(_, entry)| entry.used);
            let Some(key) = oldest.map(|(key, _)| key.clone()) else { return };
            let forgotten = turns.entries.remove(&key);
            turns.bytes -= forgotten.map_or(0, |entry| entry.turn.bytes());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Remembered> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recalled {
    /// The same turns, with other messages.
    pub(crate) fn with(&self, change: impl FnOnce(&[Message]) -> Vec<Message>) -> Self {
        Self { messages: change(&self.messages), turns: self.turns.clone() }
    }

    /// The remembered turns, the last one first.
    pub(crate) fn turns(&self) -> impl Iterator<Item = &Turn> {
        self.turns.iter().map(|turn| &turn.turn)
    }
}

impl AnsweredTurn {
    /// Whether a client's message is this answer, with its thoughts or without.
    fn is_same(&self, message: &Message) -> bool {
        let ours = &self.message;
        let is_same_call = |(a, b): (&ToolCall, &ToolCall)| {
            a.id == b.id && a.name == b.name && same_json(&a.arguments, &b.arguments)
        };
        let thoughts = |message: &Message| message.reasoning_content.clone().unwrap_or_default();
        ours.content.trim() == message.content.trim()
            && ours.tool_calls.len() == message.tool_calls.len()
            && ours.tool_calls.iter().zip(&message.tool_calls).all(is_same_call)
            && (message.reasoning_content.is_none()
                || thoughts(ours).trim() == thoughts(message).trim())
    }

    fn bytes(&self) -> usize {
        let Message { content, reasoning_content, tool_calls, .. } = &self.message;
        let calls = tool_calls.iter().map(|c| c.id.len() + c.name.len() + c.arguments.len());
        let thoughts = reasoning_content.as_ref().map_or(0, String::len);
        self.turn.bytes() + content.len() + thoughts + calls.sum::<usize>() + ENTRY_BYTES
    }
}

impl TurnRecorder {
    /// Records the answer to a prompt.
    pub(crate) fn new(memory: &Arc<TurnMemory>, start: TurnStart) -> Self {
        let message = Message::assistant("");
        Self { memory: Arc::clone(memory), start, tokens: Vec::new(), message }
    }

    /// Takes the next token, which is no end token.
    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Takes a delta that the client sees.
    pub(crate) fn on(&mut self, delta: &Delta) {
        let message = &mut self.message;
        match delta {
            Delta::Reasoning(thoughts) => {
                message.reasoning_content.get_or_insert_default().push_str(thoughts);
            }
            Delta::Text(text) => message.content.push_str(text),
            Delta::CallStart { id, name, .. } => {
                let (id, name, arguments) = (id.clone(), name.clone(), String::new());
                message.tool_calls.push(ToolCall { id, name, arguments });
            }
            Delta::CallArguments { json, .. } => {
                message.tool_calls.last_mut().iter_mut().for_each(|c| c.arguments.push_str(json));
            }
            Delta::Start(_) | Delta::Logprobs(_) | Delta::CallEnd { .. } | Delta::End { .. } => {}
        }
    }

    /// Remembers the answer.
    pub(crate) fn finish(self) {
        let Self { memory, start: TurnStart { prompt, hash }, tokens, message } = self;
        let key = TurnKey::new(&message, memory.hash(hash, &message));
        memory.add(key, AnsweredTurn { message, turn: Turn::new(prompt, &tokens) });
    }
}

/// Whether two texts are the same JSON, or the same text.
fn same_json(a: &str, b: &str) -> bool {
    let value = |text: &str| serde_json::from_str::<Value>(text).ok();
    a == b || value(a).is_some_and(|a| Some(a) == value(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::{AnswerFinish, AnswerUsage};

    fn prompt(tokens: usize) -> ChatPrompt {
        let mut prompt = ChatPrompt::default();
        prompt.tokens = vec![1; tokens];
        prompt
    }

    /// Remembers an answer to `messages`.
    fn answer(memory: &Arc<TurnMemory>, messages: &[Message], deltas: &[Delta]) {
        let start = memory.start(prompt(4), messages);
        let mut recorder = TurnRecorder::new(memory, start);
        recorder.push(7);
        deltas.iter().for_each(|delta| recorder.on(delta));
        recorder.finish();
    }

    fn call(id: &str, arguments: &str) -> ToolCall {
        ToolCall { id: id.to_owned(), name: "read".to_owned(), arguments: arguments.to_owned() }
    }

    #[test]
    fn thoughts_come_back_where_the_client_sends_the_same_answer() {
        let memory = Arc::new(TurnMemory::default());
        let asked = [Message::user("Read it.")];
        let deltas = [
            Delta::Start(AnswerUsage::default()),
            Delta::Reasoning("Hm.".into()),
            Delta::Text("Let me look.\n".into()),
            Delta::CallStart { index: 0, id: "call_a".into(), name: "read".into() },
            Delta::CallArguments { index: 0, json: "{\"a\": 1, ".into() },
            Delta::CallArguments { index: 0, json: "\"b\": \"x\"}".into() },
            Delta::CallEnd { index: 0 },
            Delta::End { finish: AnswerFinish::Calls, usage: AnswerUsage::default() },
        ];
        answer(&memory, &asked, &deltas);
        let calls = |arguments| vec![call("call_a", arguments)];
        let recall = |answer: Message| {
            let messages = [asked[0].clone(), answer, Message::tool("call_a", "1")];
            memory.recall(&messages)
        };
        let said = Message::assistant("Let me look.");
        let same = recall(said.clone().tool_calls(calls("{\"b\":\"x\",\"a\":1}")));
        assert_eq!(same.messages[1].reasoning_content.as_deref(), Some("Hm."));
        assert_eq!(same.turns().next().unwrap().tokens(), [1, 1, 1, 1, 7]);
        for changed in [
            said.clone().tool_calls(calls("{\"a\":2,\"b\":\"x\"}")),
            Message::assistant("Let me see.").tool_calls(calls("{\"a\":1,\"b\":\"x\"}")),
            said.clone().tool_calls(calls("{\"a\":1,\"b\":\"x\"}")).reasoning("Ha."),
            said.tool_calls(vec![call("call_b", "{\"a\":1,\"b\":\"x\"}")]),
        ] {
            let recalled = recall(changed.clone());
            assert_eq!((recalled.messages[1].clone(), recalled.turns.len()), (changed, 0));
        }
    }

    #[test]
    fn answers_without_calls_belong_to_their_conversation() {
        let memory = Arc::new(TurnMemory::default());
        let [asked, other] = [Message::user("One?"), Message::user("Two?")];
        let deltas = [Delta::Reasoning("Hm.".into()), Delta::Text("Yes.".into())];
        answer(&memory, std::slice::from_ref(&asked), &deltas);
        let yes = Message::assistant("Yes.");
        assert_eq!(memory.recall(&[asked, yes.clone()]).turns.len(), 1);
        assert_eq!(memory.recall(&[other, yes]).turns.len(), 0);
    }

    #[test]
    fn the_least_recently_used_turns_are_forgotten() {
        let memory = TurnMemory { limit: 2 * (ENTRY_BYTES + 64), ..TurnMemory::default() };
        let memory = Arc::new(memory);
        let asked = |i: usize| [Message::user(i.to_string())];
        let said = [Delta::Text("Yes.".into())];
        let is_known = |i: usize| {
            let messages = [asked(i)[0].clone(), Message::assistant("Yes.")];
            !memory.recall(&messages).turns.is_empty()
        };
        (0..2).for_each(|i| answer(&memory, &asked(i), &said));
        assert!(is_known(0) && is_known(1) && is_known(0));
        answer(&memory, &asked(2), &said);
        assert!(is_known(0) && !is_known(1) && is_known(2));
        let start = memory.start(prompt(1000), &asked(3));
        TurnRecorder::new(&memory, start).finish();
        assert!(is_known(0) && is_known(2), "too large for the memory");
    }
}
