//! Compiled constraints, kept for the next request that has the same one.

use std::fmt::{self, Write};

use super::{form::Constraint, grammar::Grammar};

/// Most grammars that are kept. With [`MAX_KEY`] a part of the plan's line for grammars.
const MAX_KEPT: usize = 8;

/// Most bytes of all constraints that are kept, as text. A compiled one takes some 100 times as
/// many.
const MAX_KEY: usize = 64 << 10;

/// Compiled constraints, the most recently used one last.
#[derive(Default)]
pub(super) struct CompiledCache(Vec<KeptGrammar>);

struct KeptGrammar {
    key: String,
    grammar: Grammar,
}

impl CompiledCache {
    /// A constraint as text; `None` if it is too long to be kept.
    pub(super) fn key(constraint: &Constraint) -> Option<String> {
        let mut key = BoundedText(String::new());
        write!(key, "{constraint:?}").ok().map(|()| key.0)
    }

    /// The grammar of a constraint, if it is kept.
    pub(super) fn get(&mut self, key: &str) -> Option<Grammar> {
        let index = self.0.iter().position(|kept| kept.key == key)?;
        let kept = self.0.remove(index);
        let grammar = kept.grammar.clone();
        self.0.push(kept);
        Some(grammar)
    }

    /// Keeps a grammar in place of the least recently used one.
    pub(super) fn insert(&mut self, key: String, grammar: Grammar) {
        self.0.retain(|kept| kept.key != key);
        let length = |kept: &[KeptGrammar]| kept.iter().map(|kept| kept.key.len()).sum::<usize>();
        while self.0.len() == MAX_KEPT || length(&self.0) + key.len() > MAX_KEY {
            self.0.remove(0);
        }
        self.0.push(KeptGrammar { key, grammar });
    }
}

/// Text up to the length of a key.
struct BoundedText(String);

impl Write for BoundedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > MAX_KEY {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}
