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

/// Tokens that templates write around a message, about.
const MESSAGE_TOKENS: usize = 4;

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
    let (mut kept, mut dropped) = (Vec::new(), dropped.iter().peekable());
    for (i, message) in messages.iter().enumerate() {
        while dropped.next_if(|range| range.end <= i).is_some() {}
        let is_dropped = dropped.peek().is_some_and(|range| range.contains(&i));
        if message.role == "system" || !is_dropped {
            kept.push(message.clone());
        }
    }
    kept
}

/// Number of `droppable` to drop for the other texts to have at most `room` tokens, with some for
/// what the template writes around each. `count` tells the tokens of a text, up to a limit; the
/// last texts are counted first, so that most of the dropped ones are not.
///
/// # Errors
/// Those of `count`.
pub(crate) fn about_dropped<E>(
    messages: &[Message],
    droppable: &[Range<usize>],
    room: usize,
    mut count: impl FnMut(&str, usize) -> Result<Option<usize>, E>,
) -> Result<usize, E> {
    let is_system = |i: &usize| messages[*i].role == "system";
    let mut left = room;
    let mut fits = |places: &mut dyn Iterator<Item = usize>| -> Result<bool, E> {
        for i in places {
            let images: usize = messages[i].images.iter().map(|image| image.tokens).sum();
            let Some(room) = left.checked_sub(MESSAGE_TOKENS + images) else { return Ok(false) };
            let Some(tokens) = count(&messages[i].content, room)? else { return Ok(false) };
            left = room - tokens;
        }
        Ok(true)
    };
    let first = droppable.first().map_or(messages.len(), |range| range.start);
    let last = droppable.last().map_or(first, |range| range.end);
    let within = droppable.iter().cloned().flatten().filter(is_system);
    let between = droppable.windows(2).flat_map(|pair| pair[0].end..pair[1].start);
    let stays = (last..messages.len()).chain(between).chain(within).chain(0..first);
    if !fits(&mut stays.collect::<Vec<_>>().into_iter())? {
        return Ok(droppable.len());
    }
    for (i, range) in droppable.iter().enumerate().rev() {
        if !fits(&mut range.clone().filter(|i| !is_system(i)))? {
            return Ok(i + 1);
        }
    }
    Ok(0)
}

/// The smallest number up to `most` for which `try_number` has a result, and that result. Numbers
/// near `guess` are tried first; if one has a result, larger ones have, too.
///
/// # Errors
/// Those of `try_number`.
pub(crate) fn smallest<T, E>(
    most: usize,
    guess: usize,
    mut try_number: impl FnMut(usize) -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    // Numbers below `low` have no result.
    let (mut low, mut number, mut step) = (0, guess.min(most), 1);
    let mut found = loop {
        match try_number(number)? {
            Some(result) => break result,
            None if number == most => return Ok(None),
            None => {
                low = number + 1;
                number = (number + step).min(most);
                step *= 2;
            }
        }
    };
    let mut is_near = step == 1;
    step = 1;
    while low < number {
        let next = match is_near {
            true => number.saturating_sub(step).max(low),
            false => low.midpoint(number - 1),
        };
        match try_number(next)? {
            Some(result) => {
                (number, found) = (next, result);
                step *= 2;
            }
            None => (low, is_near) = (next + 1, false),
        }
    }
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use moeflux::text::{MessageImage, ToolCall};

    use super::*;

    fn calling(id: &str) -> Message {
        let call = ToolCall { id: id.into(), name: "f".into(), arguments: "{}".into() };
        Message::assistant("").tool_calls(vec![call])
    }

    #[test]
    fn the_smallest_number_is_found_with_few_tries() {
        for most in [0, 1, 2, 7, 100, 100_000] {
            for answer in [0, 1, 2, 5, 63, 64, 99, 50_000, most] {
                for guess in [0, 1, 60, 64, 49_000, most] {
                    let mut tries = 0;
                    let found = smallest(most, guess, |number| {
                        tries += 1;
                        Ok::<_, ()>((number >= answer).then_some(number))
                    });
                    assert_eq!(found, Ok((answer <= most).then_some(answer)));
                    let distance = answer.min(most).abs_diff(guess.min(most)) + 1;
                    assert!(tries <= 2 * distance.ilog2() + 3, "{tries} for {distance}");
                }
            }
        }
    }

    #[test]
    fn only_the_texts_that_may_stay_are_counted() {
        let messages: Vec<Message> = [Message::system("s")]
            .into_iter()
            .chain((0..1000).flat_map(|_| [Message::user("four"), Message::assistant("four")]))
            .chain([Message::user("last")])
            .collect();
        let droppable = droppable(&messages);
        assert_eq!(droppable.len(), 1000);
        for (room, expected) in
            [(12, 1000), (13, 1000), (29, 999), (44, 999), (45, 998), (16013, 0)]
        {
            let mut texts = 0;
            let found = about_dropped(&messages, &droppable, room, |text, limit| {
                texts += 1;
                Ok::<_, ()>((text.len() <= limit).then_some(text.len()))
            });
            assert_eq!(found, Ok(expected), "{room}");
            assert!(texts <= 4 + room / 4, "{texts}");
        }
    }

    #[test]
    fn images_count_by_their_tokens_and_go_with_their_turn() {
        let image = |n| MessageImage { at: 0, tokens: 100, digest: [n; 32] };
        let seen = |n| Message::user("four").images(vec![image(n)]);
        let messages = [seen(1), Message::assistant("four"), seen(2), Message::user("four")];
        let droppable = droppable(&messages);
        for (room, expected) in [(231, 1), (232, 0), (123, 1), (115, 2)] {
            let found = about_dropped(&messages, &droppable, room, |text, limit| {
                Ok::<_, ()>((text.len() <= limit).then_some(text.len()))
            });
            assert_eq!(found, Ok(expected), "{room}");
        }
        let kept = without(&messages, &droppable[..1]);
        assert_eq!(kept, messages[2..]);
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
