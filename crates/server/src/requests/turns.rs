//! Turn memory: answers as they were generated, found again by what clients send back.
//!
//! Clients send an answer back as text and JSON, many of them without its thoughts. The memory puts
//! the thoughts back and gives the exact tokens, so that the next turn continues the session. An
//! answer with calls is found by the random id of its first call, others by text and the messages
//! before them. Answers that a client has changed are not used.

use std::{
    collections::HashMap,
    fmt::Display,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use moeflux::{
    Message,
    text::{ChatPrompt, ToolCall, Turn},
};

use super::{
    answered_turn::{AnsweredTurn, CallIds, TURNS_BYTES, TurnHash},
    delta::Delta,
    turn_folder::TurnFolder,
};

/// Turns of all conversations.
#[derive(Debug)]
pub(crate) struct TurnMemory {
    limit: usize,
    /// Hash of the model, whose tokens the turns have.
    model: TurnHash,
    /// Turns that outlive the process.
    folder: Option<TurnFolder>,
    turns: Mutex<Remembered>,
}

#[derive(Debug, Default)]
struct Remembered {
    entries: HashMap<TurnHash, Entry>,
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
    hash: TurnHash,
    ids: CallIds,
}

/// Records an answer, and remembers it at its end.
pub(crate) struct TurnRecorder {
    memory: Arc<TurnMemory>,
    start: TurnStart,
    tokens: Vec<u32>,
    message: Message,
}

impl TurnMemory {
    /// A memory for answers of a model, which is told by its identity. With a folder they outlive
    /// the process.
    pub(crate) fn new(model: impl Display, folder: Option<TurnFolder>) -> Self {
        let model = TurnHash::of_model(model);
        Self { limit: TURNS_BYTES, model, folder, turns: Mutex::default() }
    }

    /// The messages with the thoughts of remembered answers that the client did not send, and
    /// those answers. Calls get the ids that they had.
    pub(crate) fn recall(&self, messages: &[Message], ids: CallIds) -> Recalled {
        let mut recalled = Recalled { messages: messages.to_vec(), turns: Vec::new() };
        let mut hash = self.model;
        let mut found_ids = HashMap::new();
        for message in &mut recalled.messages {
            hash = hash.message(message, ids);
            if let Some(id) = message.tool_call_id.as_mut()
                && let Some(found) = found_ids.get(id)
            {
                String::clone_from(id, found);
            }
            if message.role != "assistant" {
                continue;
            }
            let Some(turn) = self.find(&self.key(message, hash, ids)) else { continue };
            if turn.is_same(message, ids) {
                message.reasoning_content.clone_from(&turn.message.reasoning_content);
                for (call, ours) in message.tool_calls.iter_mut().zip(&turn.message.tool_calls) {
                    found_ids
                        .insert(std::mem::replace(&mut call.id, ours.id.clone()), ours.id.clone());
                }
                recalled.turns.push(turn);
            }
        }
        recalled.turns.reverse();
        recalled
    }

    /// Start of the turn with `prompt`, made of `messages`.
    pub(crate) fn start(
        &self,
        prompt: ChatPrompt,
        messages: &[Message],
        ids: CallIds,
    ) -> TurnStart {
        let hash = messages.iter().fold(self.model, |hash, message| hash.message(message, ids));
        TurnStart { prompt, hash, ids }
    }

    /// Key of an answer: the id of its first call, or else `hash`, that of the messages up to it.
    fn key(&self, answer: &Message, hash: TurnHash, ids: CallIds) -> TurnHash {
        let call = answer.tool_calls.first().filter(|_| ids == CallIds::Kept);
        call.map_or(hash, |call| self.model.call(&call.id))
    }

    fn find(&self, key: &TurnHash) -> Option<Arc<AnsweredTurn>> {
        if let Some(turn) = self.lock().find(key) {
            return Some(turn);
        }
        let turn = Arc::new(self.folder.as_ref()?.load(key)?);
        self.lock().add(*key, Arc::clone(&turn), self.limit);
        Some(turn)
    }

    fn add(&self, key: TurnHash, turn: AnsweredTurn) {
        let turn = Arc::new(turn);
        if let Some(folder) = &self.folder {
            folder.save(key, Arc::clone(&turn));
        }
        self.lock().add(key, turn, self.limit);
    }

    fn lock(&self) -> MutexGuard<'_, Remembered> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Remembered {
    fn find(&mut self, key: &TurnHash) -> Option<Arc<AnsweredTurn>> {
        self.uses += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.uses;
        Some(Arc::clone(&entry.turn))
    }

    /// Adds a turn, and forgets the least recently used ones beyond `limit` bytes.
    fn add(&mut self, key: TurnHash, turn: Arc<AnsweredTurn>, limit: usize) {
        let bytes = turn.bytes();
        if bytes > limit {
            return;
        }
        self.uses += 1;
        self.bytes += bytes;
        let entry = Entry { turn, used: self.uses };
        if let Some(replaced) = self.entries.insert(key, entry) {
            self.bytes -= replaced.turn.bytes();
        }
        while self.bytes > limit {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used);
            let Some(key) = oldest.map(|(key, _)| *key) else { return };
            let forgotten = self.entries.remove(&key);
            self.bytes -= forgotten.map_or(0, |entry| entry.turn.bytes());
        }
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
            Delta::Start(_)
            | Delta::Usage(_)
            | Delta::Token(_)
            | Delta::Logprobs(_)
            | Delta::CallEnd { .. }
            | Delta::End { .. } => {}
        }
    }

    /// Remembers the answer.
    pub(crate) fn finish(self) {
        let Self { memory, start: TurnStart { prompt, hash, ids }, tokens, message } = self;
        let key = memory.key(&message, hash.message(&message, ids), ids);
        memory.add(key, AnsweredTurn { message, turn: Turn::new(prompt, &tokens) });
    }
}

#[cfg(test)]
mod tests {
    use moeflux::{base::Notices, text::MessageImage};

    use super::*;
    use crate::requests::{
        answered_turn::ENTRY_BYTES,
        delta::{AnswerFinish, AnswerUsage},
    };

    fn prompt(tokens: usize) -> ChatPrompt {
        let mut prompt = ChatPrompt::default();
        prompt.tokens = vec![1; tokens];
        prompt
    }

    /// Remembers an answer to `messages`.
    fn answer(memory: &Arc<TurnMemory>, messages: &[Message], deltas: &[Delta]) {
        answer_with(memory, messages, deltas, CallIds::Kept);
    }

    fn answer_with(memory: &Arc<TurnMemory>, messages: &[Message], deltas: &[Delta], ids: CallIds) {
        let start = memory.start(prompt(4), messages, ids);
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
        let memory = Arc::new(TurnMemory::new("model", None));
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
            memory.recall(&messages, CallIds::Kept)
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
    fn answers_without_ids_of_calls_belong_to_their_conversation() {
        let memory = Arc::new(TurnMemory::new("model", None));
        let asked = Message::user("Read it.");
        let deltas = [
            Delta::Reasoning("Hm.".into()),
            Delta::CallStart { index: 0, id: "call_random".into(), name: "read".into() },
            Delta::CallArguments { index: 0, json: "{\"a\": 1}".into() },
            Delta::CallEnd { index: 0 },
        ];
        let ids = CallIds::Dropped;
        answer_with(&memory, std::slice::from_ref(&asked), &deltas, ids);
        let recall = |arguments: &str, result: &str| {
            let said = Message::assistant("").tool_calls(vec![call("call_0", arguments)]);
            memory.recall(&[asked.clone(), said, Message::tool("call_0", result)], ids)
        };
        let same = recall("{\"a\":1}", "x");
        assert_eq!(same.messages[1].reasoning_content.as_deref(), Some("Hm."));
        assert_eq!(same.messages[1].tool_calls[0].id, "call_random");
        assert_eq!(same.messages[2].tool_call_id.as_deref(), Some("call_random"));
        assert!(recall("{\"a\":2}", "x").turns.is_empty());
        // The second answer follows the first one's result.
        let said = Message::assistant("").tool_calls(vec![call("call_0", "{\"a\":1}")]);
        let asked = [asked, said, Message::tool("call_0", "x")];
        answer_with(&memory, &asked, &[Delta::Text("Yes.".into())], ids);
        let recall = |result: &str| {
            let mut messages = asked.to_vec();
            messages[2] = Message::tool("call_0", result);
            messages.push(Message::assistant("Yes."));
            memory.recall(&messages, ids).turns.len()
        };
        assert_eq!((recall("x"), recall("y")), (2, 1));
    }

    #[test]
    fn answers_without_calls_belong_to_their_conversation() {
        let memory = Arc::new(TurnMemory::new("model", None));
        let [asked, other] = [Message::user("One?"), Message::user("Two?")];
        let deltas = [Delta::Reasoning("Hm.".into()), Delta::Text("Yes.".into())];
        answer(&memory, std::slice::from_ref(&asked), &deltas);
        let yes = Message::assistant("Yes.");
        assert_eq!(memory.recall(&[asked, yes.clone()], CallIds::Kept).turns.len(), 1);
        assert_eq!(memory.recall(&[other, yes], CallIds::Kept).turns.len(), 0);
    }

    #[test]
    fn answers_belong_to_the_images_of_their_conversation() {
        let memory = Arc::new(TurnMemory::new("model", None));
        let image = |at, n| MessageImage { at, tokens: 4, digest: [n; 32] };
        let seen = |images: Vec<MessageImage>| Message::user("Look").images(images);
        let asked = seen(vec![image(0, 1), image(4, 2)]);
        for ids in [CallIds::Kept, CallIds::Dropped] {
            let said = [Delta::Reasoning("Hm.".into()), Delta::Text("Yes.".into())];
            answer_with(&memory, std::slice::from_ref(&asked), &said, ids);
            for (images, turns) in [
                (vec![image(0, 1), image(4, 2)], 1),
                (vec![image(0, 1), image(4, 3)], 0),
                (vec![image(0, 1), image(3, 2)], 0),
                (vec![image(0, 1)], 0),
                (Vec::new(), 0),
            ] {
                let messages = [seen(images), Message::assistant("Yes.")];
                assert_eq!(memory.recall(&messages, ids).turns.len(), turns, "{messages:?}");
            }
        }
    }

    #[test]
    fn the_least_recently_used_turns_are_forgotten() {
        let memory = TurnMemory { limit: 2 * (ENTRY_BYTES + 64), ..TurnMemory::new("model", None) };
        let memory = Arc::new(memory);
        let asked = |i: usize| [Message::user(i.to_string())];
        let said = [Delta::Text("Yes.".into())];
        let is_known = |i: usize| {
            let messages = [asked(i)[0].clone(), Message::assistant("Yes.")];
            !memory.recall(&messages, CallIds::Kept).turns.is_empty()
        };
        (0..2).for_each(|i| answer(&memory, &asked(i), &said));
        assert!(is_known(0) && is_known(1) && is_known(0));
        answer(&memory, &asked(2), &said);
        assert!(is_known(0) && !is_known(1) && is_known(2));
        let start = memory.start(prompt(1000), &asked(3), CallIds::Kept);
        TurnRecorder::new(&memory, start).finish();
        assert!(is_known(0) && is_known(2), "too large for the memory");
    }

    #[test]
    fn turns_outlive_the_process_for_the_same_model() {
        let folder = tempfile::tempdir().unwrap();
        let open = |model: &str| {
            let (path, notices) = (folder.path().to_owned(), Notices::default());
            let turns = TurnFolder::open(path, 1 << 20, notices).unwrap();
            Arc::new(TurnMemory::new(model, Some(turns)))
        };
        let memory = open("a");
        let asked = [Message::user("One?")];
        let deltas = [Delta::Reasoning("Hm.".into()), Delta::Text("Yes.".into())];
        answer(&memory, &asked, &deltas);
        drop(memory);
        let said = [asked[0].clone(), Message::assistant("Yes.")];
        let recalled = open("a").recall(&said, CallIds::Kept);
        assert_eq!(recalled.messages[1].reasoning_content.as_deref(), Some("Hm."));
        assert_eq!(recalled.turns().next().unwrap().tokens(), [1, 1, 1, 1, 7]);
        assert_eq!(open("b").recall(&said, CallIds::Kept).turns.len(), 0);
        // A damaged file is no turn.
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let path = entry.unwrap().path();
            let whole = std::fs::read(&path).unwrap();
            std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        }
        assert_eq!(open("a").recall(&said, CallIds::Kept).turns.len(), 0);
    }
}
