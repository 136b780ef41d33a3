//! Prompt lookup: the tokens that followed the last ones where those occurred before, in the prompt
//! or in the answer.

use super::drafter::Drafter;

/// Minimum number of tokens that must have occurred before. One alone is right too rarely.
const MIN_MATCH: usize = 2;
/// Length from which a longer match is no better.
const MAX_MATCH: usize = 16;
/// Tokens that are searched, the last ones of a session.
const SEARCHED: usize = 1 << 16;

/// Drafts by the longest match, the newest of several.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LookupDrafter;

impl Drafter for LookupDrafter {
    fn draft(&mut self, session: &[u32], next: &[u32], max: usize, drafts: &mut Vec<u32>) {
        let token = |i: usize| match i.checked_sub(session.len()) {
            Some(i) => next[i],
            None => session[i],
        };
        let len = session.len() + next.len();
        let Some(last) = len.checked_sub(1) else { return };
        // Length of the match that ends before `end`.
        let matched = |end: usize| {
            (1..=MAX_MATCH.min(end)).take_while(|n| token(end - n) == token(len - n)).count()
        };
        let (newest, mut best, mut best_len) = (token(last), None, MIN_MATCH - 1);
        for end in (len.saturating_sub(SEARCHED).max(1)..len).rev() {
            if token(end - 1) != newest {
                continue;
            }
            let n = matched(end);
            if n > best_len {
                (best, best_len) = (Some(end), n);
            }
            if n == MAX_MATCH {
                break;
            }
        }
        // Where the match reaches into what it predicts, the text repeats itself with this period.
        let Some(start) = best else { return };
        drafts.extend((start..).take(max).map(|i| token(start + (i - start) % (len - start))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafts(session: &[u32], next: &[u32], max: usize) -> Vec<u32> {
        let mut drafts = Vec::new();
        LookupDrafter.draft(session, next, max, &mut drafts);
        drafts
    }

    #[test]
    fn the_longest_match_proposes_what_followed_it() {
        // 2 3 occurs twice; 1 2 3 only at the start.
        let session = [1, 2, 3, 4, 5, 9, 2, 3, 6, 7, 1, 2];
        assert_eq!(drafts(&session, &[3], 3), [4, 5, 9]);
        assert_eq!(drafts(&session, &[3], 1), [4]);
        assert_eq!(drafts(&session[..11], &[8, 2, 3], 2), [6, 7]);
    }

    #[test]
    fn a_single_token_and_new_text_propose_nothing() {
        assert!(drafts(&[1, 2, 3, 4], &[2], 3).is_empty());
        assert!(drafts(&[], &[1], 3).is_empty());
        assert!(drafts(&[], &[], 3).is_empty());
        assert!(drafts(&[5, 6], &[7], 3).is_empty());
    }

    #[test]
    fn text_that_repeats_itself_goes_on_with_its_period() {
        assert_eq!(drafts(&[7, 8, 7], &[8], 3), [7, 8, 7]);
        assert_eq!(drafts(&[4, 4], &[4], 3), [4, 4, 4]);
    }
}
