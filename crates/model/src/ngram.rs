//! Hash of n-grams to rows of a table of embeddings, as Qwen3.8's per-layer embedding (PLE) has it.
//!
//! Each token has `heads_per_ngram` rows for each n-gram that ends with it, from the bigram to the
//! n-gram of `ngram_size` tokens. Tokens beyond the start of the text, or up to an end token, count
//! as end tokens. The rows depend on token ids only, so they can be read before a layer runs.
//! As `qwen4_exp` of transformers computes them.

use serde::Deserialize;

/// Largest supported base of the heads' table sizes. Primes up to it are found in milliseconds.
const MAX_BASE: u64 = 1 << 36;
/// Most heads in all layers: the primes of a layer follow those of the layers before it.
const MAX_HEADS: usize = 1024;

/// Increment of SplitMix64: Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014.
const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;
/// Distance of the seeds of layers.
const LAYER_SEED: u64 = 10_007;

/// Settings of an n-gram hash, by the keys of config.json.
#[derive(Clone, Copy, Debug)]
pub struct NgramSettings {
    /// `vocab_size`: ids of tokens are below it.
    #[doc(hidden)]
    pub vocab: usize,
    /// `ngram_size`: tokens of the longest n-gram, at least 2.
    #[doc(hidden)]
    pub ngram_size: usize,
    /// `heads_per_ngram`: rows for each n-gram.
    #[doc(hidden)]
    pub heads_per_ngram: usize,
    /// `ngram_vocab_size_base`: the sizes of the heads' tables are the primes from here on.
    #[doc(hidden)]
    pub base: u64,
    /// `make_ngram_vocab_size_divisible_by`: the whole table has a multiple of this many rows.
    #[doc(hidden)]
    pub divisor: u64,
    /// `seed`.
    #[doc(hidden)]
    pub seed: u64,
    /// The first `eos_token_id`.
    #[doc(hidden)]
    pub eos: u32,
    /// Index of the layer among those with a table.
    #[doc(hidden)]
    pub table: usize,
}

/// Constants of a hash and the rows of its table, where a checkpoint has no base and seed.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct NgramConstants {
    multipliers: Vec<u64>,
    offsets: Vec<u64>,
    sizes: Vec<u64>,
    pub(crate) rows: u64,
}

/// Table of one head: rows `first..first + size` of the whole table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    first: u64,
    size: u64,
}

/// An n-gram hash: rows of a table for a token and those before it.
#[derive(Clone, Debug)]
pub struct NgramHash {
    /// Odd factor of each token of an n-gram, the last token first.
    multipliers: Vec<u64>,
    /// Heads of bigrams, then of trigrams, and so on.
    heads: Vec<Head>,
    heads_per_ngram: usize,
    eos: u32,
    table_rows: u64,
}

impl NgramHash {
    /// # Errors
    /// The problem with a setting, with its key.
    #[doc(hidden)]
    pub fn new(settings: &NgramSettings) -> Result<Self, String> {
        let &NgramSettings { vocab, ngram_size, heads_per_ngram, base, divisor, .. } = settings;
        if !(2..=16).contains(&ngram_size) {
            return Err(format!("ngram_size is {ngram_size}, from 2 to 16 is supported"));
        }
        let count = heads_per_ngram.saturating_mul(ngram_size - 1);
        let first = settings.table.saturating_mul(count);
        if count == 0 || first.saturating_add(count) > MAX_HEADS {
            return Err(format!(
                "heads_per_ngram is {heads_per_ngram}, from 1 to {MAX_HEADS} heads of all n-grams \
                 and layers are supported"
            ));
        }
        if base > MAX_BASE {
            return Err(format!("ngram_vocab_size_base is {base}, up to {MAX_BASE} is supported"));
        }
        if divisor == 0 || divisor > MAX_BASE {
            return Err(format!("make_ngram_vocab_size_divisible_by is {divisor}"));
        }
        let mut end = 0;
        let primes = (base.max(2)..).filter(|n| is_prime(*n)).skip(first).take(count);
        let heads = primes
            .map(|size| {
                end += size;
                Head { first: end - size, size }
            })
            .collect();
        // Products with token ids stay below 2^63.
        let largest = i64::MAX as u64 / vocab.max(1) as u64;
        let half = (largest / 2).max(1);
        let seed = settings.seed.wrapping_add(LAYER_SEED.wrapping_mul(settings.table as u64));
        let multiplier = |i: u64| 2 * (mix(seed.wrapping_add(GAMMA.wrapping_mul(i))) % half) + 1;
        Ok(Self {
            multipliers: (1..=ngram_size as u64).map(multiplier).collect(),
            heads,
            heads_per_ngram,
            eos: settings.eos,
            table_rows: end.next_multiple_of(divisor),
        })
    }

    /// The hash with these constants, of which only the settings of heads and tokens count.
    ///
    /// # Errors
    /// The problem with the constants.
    pub(crate) fn of_constants(
        settings: &NgramSettings,
        constants: &NgramConstants,
    ) -> Result<Self, String> {
        let &NgramSettings { ngram_size, heads_per_ngram, eos, .. } = settings;
        let NgramConstants { multipliers, offsets, sizes, rows } = constants;
        let count = heads_per_ngram.saturating_mul(ngram_size.saturating_sub(1));
        if multipliers.len() != ngram_size || ngram_size < 2 {
            let found = multipliers.len();
            return Err(format!("n-grams of {ngram_size} tokens have {found} multipliers"));
        }
        if !(1..=MAX_HEADS).contains(&count) || [offsets.len(), sizes.len()] != [count; 2] {
            let (offsets, sizes) = (offsets.len(), sizes.len());
            return Err(format!("{count} heads of n-grams have {offsets} offsets, {sizes} sizes"));
        }
        let heads =
            offsets.iter().zip(sizes).map(|(first, size)| Head { first: *first, size: *size });
        let heads: Vec<_> = heads.collect();
        let fits = |head: &Head| {
            let end = head.first.checked_add(head.size);
            head.size > 0 && end.is_some_and(|end| end <= *rows)
        };
        match heads.iter().find(|head| !fits(head)) {
            None => Ok(Self {
                multipliers: multipliers.clone(),
                heads,
                heads_per_ngram,
                eos,
                table_rows: *rows,
            }),
            Some(Head { first, size }) => {
                Err(format!("a head has {size} rows from {first} on, of a table of {rows}"))
            }
        }
    }

    /// Rows of the whole table, including padding.
    pub fn table_rows(&self) -> u64 {
        self.table_rows
    }

    /// Rows per token.
    pub fn rows_per_token(&self) -> usize {
        self.heads.len()
    }

    /// Tokens before a token that its rows depend on, at most.
    pub fn context(&self) -> usize {
        self.multipliers.len() - 1
    }

    /// Factors of an n-gram's tokens, the last token first: `layer_multipliers`.
    #[doc(hidden)]
    pub fn multipliers(&self) -> Vec<i64> {
        self.multipliers.iter().map(|m| *m as i64).collect()
    }

    /// First row of each head: `ngram_heads_offsets`.
    #[doc(hidden)]
    pub fn offsets(&self) -> Vec<i64> {
        self.heads.iter().map(|head| head.first as i64).collect()
    }

    /// Rows of each head: `ngram_heads_vocab_sizes`.
    #[doc(hidden)]
    pub fn sizes(&self) -> Vec<i64> {
        self.heads.iter().map(|head| head.size as i64).collect()
    }

    /// Rows of the last token of `before` and `tokens[..=i]`, in the order of the heads.
    #[doc(hidden)]
    pub fn rows<'a>(
        &'a self,
        before: &'a [u32],
        tokens: &'a [u32],
        i: usize,
    ) -> impl Iterator<Item = u64> + 'a {
        let previous = move |distance: usize| match i.checked_sub(distance) {
            Some(i) => tokens.get(i),
            None => before.get((before.len() + i).checked_sub(distance)?),
        };
        let mut hash = 0;
        let mut is_cut = false;
        let mut heads = self.heads.chunks(self.heads_per_ngram);
        let hashes = self.multipliers.iter().enumerate().map(move |(distance, multiplier)| {
            // An end token before the current one ends its segment.
            let token = previous(distance).copied().filter(|_| !is_cut);
            is_cut |= distance > 0 && token.is_none_or(|token| token == self.eos);
            hash ^= u64::from(token.unwrap_or(self.eos)).wrapping_mul(*multiplier);
            hash
        });
        hashes.skip(1).flat_map(move |hash| {
            let heads = heads.next().unwrap_or_default();
            heads.iter().map(move |head| head.first + hash % head.size)
        })
    }
}

/// The output of SplitMix64 in state `value`.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(GAMMA);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// Trial division, for numbers up to [`MAX_BASE`].
fn is_prime(n: u64) -> bool {
    let divisors = || (3..).step_by(2).take_while(|d: &u64| d * d <= n);
    n == 2 || n > 2 && n % 2 == 1 && !divisors().any(|d| n.is_multiple_of(d))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> NgramSettings {
        NgramSettings {
            vocab: 272,
            ngram_size: 3,
            heads_per_ngram: 8,
            base: 100,
            divisor: 128,
            seed: 1234,
            eos: 1,
            table: 0,
        }
    }

    /// Values of transformers for the golden's config.
    #[test]
    fn multipliers_sizes_and_offsets_are_those_of_transformers() {
        let hash = NgramHash::new(&settings()).unwrap();
        let multipliers = [2175817888646129, 31215934654987533, 4449929463106639];
        assert_eq!(hash.multipliers(), multipliers);
        let sizes =
            [101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179];
        assert_eq!(hash.sizes(), sizes);
        let offsets =
            [0, 101, 204, 311, 420, 533, 660, 791, 928, 1067, 1216, 1367, 1524, 1687, 1854, 2027];
        assert_eq!(hash.offsets(), offsets);
        assert_eq!((hash.table_rows(), hash.rows_per_token(), hash.context()), (2304, 16, 2));
        // A second table continues the primes, with other factors.
        let second = NgramHash::new(&NgramSettings { table: 1, ..settings() }).unwrap();
        assert_eq!((second.sizes()[0], second.offsets()[0]), (181, 0));
        assert_ne!(second.multipliers(), hash.multipliers());
    }

    #[test]
    fn published_tables_have_distinct_primes_of_320_001_446_rows() {
        let published = NgramSettings { vocab: 248_320, base: 20_000_000, ..settings() };
        let hash = NgramHash::new(&published).unwrap();
        let sizes = hash.sizes();
        assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]) && sizes[0] >= 20_000_000);
        assert_eq!(sizes.iter().sum::<i64>(), 320_001_446);
        assert_eq!(hash.table_rows(), 320_001_536);
    }

    /// Rows by the formula, with the segment rule of transformers: the token at distance `d` counts
    /// only if no end token is among those at distances 1 to `d`.
    fn naive(hash: &NgramHash, text: &[u32], last: usize) -> Vec<u64> {
        let token = |d: usize| {
            let ends = (1..=d).any(|d| last < d || text[last - d] == hash.eos);
            if ends { hash.eos } else { text[last - d] }
        };
        let mut rows = Vec::new();
        for n in 2..=hash.multipliers.len() {
            let mixed = (0..n).fold(0, |x, d| x ^ (u64::from(token(d)) * hash.multipliers[d]));
            for head in &hash.heads[(n - 2) * hash.heads_per_ngram..][..hash.heads_per_ngram] {
                rows.push(head.first + mixed % head.size);
            }
        }
        rows
    }

    #[test]
    fn constants_are_those_of_the_settings_or_refused() {
        let hash = NgramHash::new(&settings()).unwrap();
        let numbers = |numbers: Vec<i64>| numbers.into_iter().map(|n| n as u64).collect();
        let constants = NgramConstants {
            multipliers: numbers(hash.multipliers()),
            offsets: numbers(hash.offsets()),
            sizes: numbers(hash.sizes()),
            rows: 2304,
        };
        let same = NgramHash::of_constants(&settings(), &constants).unwrap();
        let text = [1, 139, 191, 1, 32];
        assert!(same.rows(&[], &text, 4).eq(hash.rows(&[], &text, 4)));
        let wrong = |change: fn(&mut NgramConstants)| {
            let mut changed = constants.clone();
            change(&mut changed);
            NgramHash::of_constants(&settings(), &changed).unwrap_err()
        };
        assert!(wrong(|c| c.multipliers.truncate(2)).contains("2 multipliers"));
        assert!(wrong(|c| c.sizes.truncate(15)).contains("15 sizes"));
        assert!(wrong(|c| c.sizes[3] = 0).contains("0 rows"));
        assert!(wrong(|c| c.rows = 2000).contains("of a table of 2000"));
        assert!(wrong(|c| c.offsets[0] = u64::MAX).contains("of a table of 2304"));
    }

    #[test]
    fn rows_do_not_depend_on_the_division_into_steps() {
        for ngram_size in [2, 3, 4] {
            let hash = NgramHash::new(&NgramSettings { ngram_size, ..settings() }).unwrap();
            let text = [1, 139, 191, 1, 1, 32, 16, 229, 1, 206, 234, 16, 93, 101, 183, 154];
            for last in 0..text.len() {
                let expected = naive(&hash, &text, last);
                assert_eq!(expected.len(), hash.rows_per_token());
                for cut in 0..=last {
                    let before = &text[cut.saturating_sub(hash.context())..cut];
                    let rows: Vec<_> = hash.rows(before, &text[cut..], last - cut).collect();
                    assert_eq!(rows, expected, "{last} after a step that ended at {cut}");
                }
            }
        }
    }

    /// Rows of transformers for the golden's first tokens, some of them after end tokens.
    #[test]
    fn rows_are_those_of_transformers() {
        let hash = NgramHash::new(&settings()).unwrap();
        let expected: [(&[u32], [u64; 16]); 4] = [
            (
                &[1, 139],
                [
                    9, 167, 255, 339, 483, 603, 671, 927, 961, 1121, 1219, 1432, 1553, 1701, 1881,
                    2168,
                ],
            ),
            (
                &[1, 139, 191, 32],
                [
                    31, 106, 258, 358, 449, 612, 694, 884, 936, 1113, 1253, 1511, 1534, 1743, 1959,
                    2063,
                ],
            ),
            (
                &[5, 139, 1, 191, 7],
                [
                    45, 121, 229, 337, 440, 605, 684, 863, 934, 1068, 1357, 1433, 1650, 1694, 1936,
                    2062,
                ],
            ),
            (
                &[1, 1],
                [
                    43, 201, 283, 363, 457, 542, 671, 824, 940, 1183, 1218, 1388, 1641, 1720, 2022,
                    2163,
                ],
            ),
        ];
        for (text, expected) in expected {
            let rows: Vec<_> = hash.rows(&[], text, text.len() - 1).collect();
            assert_eq!(rows, expected, "{text:?}");
        }
    }

    #[test]
    fn hostile_settings_are_errors_with_their_key() {
        let says = |settings: NgramSettings, key: &str| {
            let problem = NgramHash::new(&settings).unwrap_err();
            assert!(problem.contains(key), "{problem}");
        };
        says(NgramSettings { ngram_size: 1, ..settings() }, "ngram_size");
        says(NgramSettings { ngram_size: usize::MAX, ..settings() }, "ngram_size");
        says(NgramSettings { heads_per_ngram: 0, ..settings() }, "heads_per_ngram");
        says(NgramSettings { heads_per_ngram: usize::MAX, ..settings() }, "heads_per_ngram");
        says(NgramSettings { table: usize::MAX, ..settings() }, "heads_per_ngram");
        says(NgramSettings { base: u64::MAX, ..settings() }, "ngram_vocab_size_base");
        says(NgramSettings { divisor: 0, ..settings() }, "divisible_by");
    }
}
