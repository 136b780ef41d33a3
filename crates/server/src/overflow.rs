//! Prompts over the context: which messages may be dropped.

use std::ops::Range;

use moeflux::Message;

/// Rule for a prompt over the context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Overflow {
    /// It is an error.
    #[default]
    Error,
    /// The oldest turns are dropped.
    DropOldestTurns,
}

/// Part of the context that stays free for the answer when messages are dropped.
const ANSWER_SHARE: usize = 8;

/// Tokens that a prompt may have after messages were dropped.
pub(crate) fn room(context: usize) -> usize {
    context - context / ANSWER_SHARE
}

/// Messages that may be dropped, in their order: turns before the last one, then the last one's
/// calls with their results. The last question, and what follows the last calls, stays.
pub(crate) fn droppable(messages: &[Message]) -> Vec<Range<usize>> {
    let is_question = |message: &Message| message.role == "user";
    let is_system = |message: &&Message| message.role == "system";
    let first = messages.iter().take_while(is_system).count();
    let questions = (first..messages.len()).filter(|i| is_question(&messages[*i]));
    let mut starts: Vec<usize> = questions.skip_while(|i| *i == first).collect();
    starts.insert(0, first);
    let mut parts: Vec<Range<usize>> = starts.windows(2).map(|pair| pair[0]..pair[1]).collect();
    // The last turn: its question, then answers with calls, each with its results.
    let last = starts.last().map_or(first, |start| start + 1);
    let rounds: Vec<usize> = (last..messages.len())
        .filter(|i| messages[*i].role == "assistant" && !messages[*i].tool_calls.is_empty())
        .collect();
    parts.extend(rounds.windows(2).map(|pair| pair[0]..pair[1]));
    parts
}

/// The messages without the first of `droppable`. System messages stay.
pub(crate) fn without(messages: &[Message], dropped: &[Range<usize>]) -> Vec<Message> {
    let stays = |(i, message): &(usize, &Message)| {
        message.role == "system" || !dropped.iter().any(|range| range.contains(i))
    };
    messages.iter().enumerate().filter(stays).map(|(_, message)| message.clone()).collect()
}

#[cfg(test)]
mod tests {
    use moeflux::text::ToolCall;

    use super::*;

    fn calling(id: &str) -> Message {
        let call = ToolCall { id: id.into(), name: "f".into(), arguments: "{}".into() };
        Message::assistant("").tool_calls(vec![call])
    }

    #[test]
    fn turns_are_dropped_whole_and_calls_with_their_results() {
        let messages = [
            Message::system("s"),
            Message::user("1"),
            Message::system("later"),
            calling("a"),
            Message::tool("a", "x"),
            Message::assistant("one"),
            Message::user("2"),
            Message::assistant("two"),
            Message::user("3"),
            calling("b"),
            Message::tool("b", "x"),
            calling("c"),
            Message::tool("c", "x"),
        ];
        let parts = droppable(&messages);
        assert_eq!(parts, [1..6, 6..8, 9..11]);
        let kept = without(&messages, &parts);
        let roles: Vec<&str> = kept.iter().map(|message| &*message.role).collect();
        assert_eq!(roles, ["system", "system", "user", "assistant", "tool"]);
        assert_eq!(kept[2].content, "3");
        assert!(droppable(&messages[..3]).is_empty());
        assert!(droppable(&[]).is_empty());
    }
}
