//! Ids that clients keep: random, as they may come from several servers.

use std::hash::{BuildHasher, Hasher, RandomState};

const ALPHABET: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

/// Random characters of an id.
const ID_CHARS: usize = 24;

/// Characters that 64 random bits make.
const CHARS_PER_WORD: usize = 10;

/// `prefix` and random characters.
pub(crate) fn random_id(prefix: &str) -> String {
    let mut id = prefix.to_owned();
    let mut word = 0;
    for i in 0..ID_CHARS {
        if i % CHARS_PER_WORD == 0 {
            word = random_word();
        }
        id.push(char::from(ALPHABET[(word % 62) as usize]));
        word /= 62;
    }
    id
}

/// A random number. The standard library seeds each state from the operating system.
pub(crate) fn random_word() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_differ() {
        let ids: BTreeSet<String> = (0..1000).map(|_| random_id("call_")).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == 29 && id.starts_with("call_")));
    }
}
