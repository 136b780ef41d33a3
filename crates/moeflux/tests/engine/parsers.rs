//! Every parser on the corpus of its fuzzing target, whole, cut short and with bytes changed.

use std::{fs, path::Path, time::Instant};

use moeflux::{base::SplitMix64, tools::parsers::Parser};

/// Changed copies of each file.
const COPIES: u64 = 12;
/// Files of more bytes are changed less often.
const SMALL: usize = 4096;

#[test]
fn no_file_of_the_corpus_is_a_panic() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    let (mut total, since) = (0, Instant::now());
    for parser in Parser::ALL {
        let mut files: Vec<_> =
            fs::read_dir(corpus.join(parser.name())).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        assert!(!files.is_empty(), "{parser:?} has a corpus");
        for path in files {
            let bytes = fs::read(&path).unwrap();
            total += bytes.len();
            let read = |bytes: &[u8]| {
                let folder = tempfile::tempdir().unwrap();
                let _ = parser.read(bytes, folder.path());
            };
            read(&bytes);
            let mut random = SplitMix64::new(bytes.len() as u64);
            for _ in 0..if bytes.len() > SMALL { COPIES / 4 } else { COPIES } {
                let mut copy = bytes.clone();
                let place = (random.next_u64() % copy.len() as u64) as usize;
                copy[place] = random.next_u64() as u8;
                read(&copy);
                read(&copy[..place]);
            }
        }
    }
    assert!(total < 500_000, "the corpus has {total} bytes");
    assert!(since.elapsed().as_secs() < 60, "{:?}", since.elapsed());
}

#[test]
fn every_parser_has_a_fuzzing_target() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
    for parser in Parser::ALL {
        let target = format!("fuzz_targets/{}.rs", parser.name());
        let source = fs::read_to_string(fuzz.join(&target)).unwrap();
        assert!(source.contains(&format!("{:?}", parser.name())), "{target}");
        assert!(manifest.contains(&target), "{target} in fuzz/Cargo.toml");
    }
}
