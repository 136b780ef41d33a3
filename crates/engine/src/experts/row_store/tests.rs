//! Rows of every token, from files, mirrors and both backends; errors with tensor and row.

use std::{fs, path::Path};

use moeflux_compute::Scalar;
use moeflux_model::{
    checkpoint::{RowFormat, RowScale, RowShard},
    seam::NgramSettings,
};

use super::*;
use crate::experts::io::{Access, PageCache, ReadOptions, ReaderKind, open_rows};

const WIDTH: usize = 3;
const CHUNK: usize = 100;

fn hash() -> NgramHash {
    let settings = NgramSettings {
        vocab: 272,
        ngram_size: 3,
        heads_per_ngram: 8,
        base: 100,
        divisor: 128,
        seed: 1234,
        eos: 1,
        table: 0,
    };
    NgramHash::new(&settings).unwrap()
}

/// Value of an element, exact in f32.
fn value(row: u64, column: usize) -> f32 {
    (row * 4 + column as u64) as f32
}

/// Files of a table in two shards, at an odd offset.
fn write(folder: &Path, file: &str, rows: std::ops::Range<u64>) {
    let mut bytes = vec![7; 13];
    for row in rows {
        (0..WIDTH).for_each(|column| bytes.extend(value(row, column).to_le_bytes()));
    }
    fs::write(folder.join(file), bytes).unwrap();
}

/// A store of [`CHUNK`] tokens over the files of a folder.
fn store(folder: &Path, mirrors: &[PathBuf], kind: ReaderKind, pages: PageCache) -> RowStore {
    let (rows, each) = (hash().table_rows(), hash().table_rows() / 2);
    for (file, rows) in [("a", 0..each), ("b", each..rows)] {
        write(folder, file, rows.clone());
        mirrors.iter().for_each(|mirror| write(mirror, file, rows.clone()));
    }
    let format = RowFormat::Plain(Scalar::F32);
    let shards = [0, 1].map(|file| RowShard {
        name: format!("rows.shard_{file}"),
        rows: each,
        format,
        first: Segment { file, offset: 13, bytes: format.bytes(WIDTH) },
        scale: RowScale::Shard(1.0),
    });
    let files = ["a", "b"].map(|file| DataFile::open(&folder.join(file)).unwrap());
    let own = Arc::new(Vec::from(files));
    let table = RowTable { width: WIDTH, shards: shards.into() };
    let sources = vec![TableSource { layer: 1, hash: hash(), table }];
    let access = match pages {
        PageCache::Everything => Access::Buffered,
        _ => Access::Direct,
    };
    let options = ReadOptions::default().kind(kind).access(access).depth(4);
    let files = ModelFiles { own: &own, mirrors };
    let open = |batches: &Arc<RowBatches>, slots| open_rows(batches, &options, slots, pages);
    RowStore::of_tables(files, sources, CHUNK, &open).unwrap()
}

fn text() -> Vec<u32> {
    (0..CHUNK as u32).map(|i| if i % 17 == 5 { 1 } else { i * i % 40 }).collect()
}

/// Values of a step's rows.
fn step(store: &mut RowStore, before: &[u32], tokens: &[u32], stats: &mut Stats) -> Vec<f32> {
    store.start([NgramSpan { before, tokens }].into_iter(), stats).unwrap();
    store.wait(1, stats).unwrap().unwrap().to_vec()
}

#[test]
fn rows_are_in_token_order_however_they_are_read() {
    let text = text();
    let hash = hash();
    let expected: Vec<f32> = (0..text.len())
        .flat_map(|i| hash.rows(&[], &text, i).collect::<Vec<_>>())
        .flat_map(|row| (0..WIDTH).map(move |column| value(row, column)))
        .collect();
    let token = hash.rows_per_token() * WIDTH;
    for kind in [ReaderKind::Threads, ReaderKind::Uring] {
        for pages in [PageCache::Nothing, PageCache::ReadAgain, PageCache::Everything] {
            let folder = tempfile::tempdir().unwrap();
            let mut store = store(folder.path(), &[], kind, pages);
            let mut stats = Stats::default();
            assert_eq!(step(&mut store, &[], &text, &mut stats), expected);
            assert_eq!(stats.rows_needed, 16 * text.len() as u64);
            assert!(stats.rows_read < stats.rows_needed, "repeated rows are read once");
            assert!(stats.row_bytes_read >= stats.rows_read * 4 * WIDTH as u64);
            assert!(stats.rows_hidden().is_some());
            for i in 0..text.len() {
                let got = step(&mut store, &text[..i], &text[i..=i], &mut stats);
                assert_eq!(got, expected[i * token..][..token], "token {i}");
            }
            // Two sequences in a step, and a step whose rows are not awaited.
            let spans = [10, 40].map(|i| NgramSpan { before: &text[..i], tokens: &text[i..i + 5] });
            store.start(spans.into_iter(), &mut stats).unwrap();
            store.start(spans.into_iter(), &mut stats).unwrap();
            let both = [&expected[10 * token..15 * token], &expected[40 * token..45 * token]];
            assert_eq!(store.wait(1, &mut stats).unwrap().unwrap(), both.concat());
            assert!(store.wait(0, &mut stats).unwrap().is_none());
        }
    }
}

#[test]
fn a_file_that_ends_early_is_an_error_with_tensor_and_row_unless_a_mirror_has_it() {
    let (text, token) = (text(), 16 * WIDTH);
    for kind in [ReaderKind::Threads, ReaderKind::Uring] {
        let [folder, mirror] = [0; 2].map(|_| tempfile::tempdir().unwrap());
        let mirrors = [mirror.path().to_path_buf()];
        for mirrors in [&[][..], &mirrors] {
            let pages = PageCache::Everything;
            let mut store = store(folder.path(), mirrors, kind, pages);
            let mut stats = Stats::default();
            let whole = step(&mut store, &[], &text, &mut stats);
            let cut = |len| {
                let file = fs::File::options().write(true).open(folder.path().join("b"));
                file.unwrap().set_len(len).unwrap();
            };
            cut(13);
            store
                .start([NgramSpan { before: &[], tokens: &text }].into_iter(), &mut stats)
                .unwrap();
            match store.wait(1, &mut stats) {
                Ok(rows) => assert!(!mirrors.is_empty() && rows.unwrap() == whole),
                Err(error) => {
                    let error = error.to_string();
                    assert!(mirrors.is_empty(), "{error}");
                    let file = folder.path().join("b");
                    for part in ["rows.shard_1", "row ", &file.to_string_lossy(), "ends before"] {
                        assert!(error.contains(part), "{error}");
                    }
                }
            }
            // Later steps do not depend on the failed one.
            write(folder.path(), "b", hash().table_rows() / 2..hash().table_rows());
            let got = step(&mut store, &text[..7], &text[7..8], &mut stats);
            assert_eq!(got, whole[7 * token..8 * token]);
        }
    }
}

#[test]
fn a_row_that_is_not_finite_is_an_error_with_its_index() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = store(folder.path(), &[], ReaderKind::Threads, PageCache::Everything);
    let row = hash().rows(&[], &[9], 0).next().unwrap();
    let mut bytes = fs::read(folder.path().join("a")).unwrap();
    bytes[13 + row as usize * 4 * WIDTH..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(folder.path().join("a"), bytes).unwrap();
    let mut stats = Stats::default();
    store.start([NgramSpan { before: &[], tokens: &[9] }].into_iter(), &mut stats).unwrap();
    let error = store.wait(1, &mut stats).unwrap_err().to_string();
    for part in ["rows.shard_0", &format!("row {row} "), "NaN"] {
        assert!(error.contains(part), "{error}");
    }
}
