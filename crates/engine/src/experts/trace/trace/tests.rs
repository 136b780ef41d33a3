use proptest::prelude::*;

use super::*;
use crate::experts::trace::recorder::TraceRecorder;

/// Header of layers with the given experts and top-k.
pub(crate) fn header(layers: &[(usize, usize)]) -> TraceHeader {
    let layer = |(i, (experts, k)): (usize, &(usize, usize))| TraceLayer {
        layer: 2 * i + 1,
        experts: *experts,
        k: *k,
        bytes: 10 + i as u64,
    };
    TraceHeader {
        model: "test".into(),
        model_type: "none".into(),
        slot: 4096,
        fixed: 1 << 20,
        layers: layers.iter().enumerate().map(layer).collect(),
    }
}

/// Steps: rows, and by layer the expert ids needed.
pub(crate) type Steps = Vec<(u32, Vec<Vec<usize>>)>;

/// Routing that an engine could record: each row of each layer chooses k experts.
pub(crate) fn routing(most_rows: usize) -> impl Strategy<Value = (TraceHeader, Steps)> {
    let layers = prop::collection::vec((1usize..9).prop_flat_map(|n| (Just(n), 1..=n)), 1..5);
    (layers, 0usize..40, any::<u64>()).prop_map(move |(layers, steps, mut random)| {
        let mut next = move |below: usize| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        let step = |_| {
            let rows = 1 + if next(4) == 0 { next(most_rows) } else { 0 };
            let needed_ids = |(experts, k): &(usize, usize)| {
                let mut needed = vec![false; *experts];
                for _ in 0..rows {
                    let mut ids: Vec<usize> = (0..*experts).collect();
                    for i in 0..*k {
                        ids.swap(i, i + next(experts - i));
                        needed[ids[i]] = true;
                    }
                }
                (0..*experts).filter(|id| needed[*id]).collect()
            };
            (rows as u32, layers.iter().map(needed_ids).collect())
        };
        let steps = (0..steps).map(step).collect();
        (header(&layers), steps)
    })
}

/// File of the given steps, as the engine writes it.
fn record(header: &TraceHeader, steps: &Steps) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.trace");
    let mut recorder = TraceRecorder::create(&path, header).unwrap();
    // An unfinished step leaves nothing in the file.
    recorder.start_step(3);
    recorder.record_layer([0].into_iter());
    for (rows, layers) in steps {
        recorder.start_step(*rows as usize);
        layers.iter().for_each(|ids| recorder.record_layer(ids.iter().copied()));
        recorder.finish_step().unwrap();
    }
    std::fs::read(path).unwrap()
}

pub(crate) fn trace(header: &TraceHeader, steps: &Steps) -> Trace {
    read(&record(header, steps)).unwrap()
}

fn read(mut bytes: &[u8]) -> Result<Trace, String> {
    Trace::read(&mut bytes).map_err(|problem| match problem {
        TraceProblem::System(error) => error.to_string(),
        TraceProblem::Content(problem) => problem,
    })
}

/// Steps of a trace, as expert ids.
fn steps_of(trace: &Trace) -> Steps {
    let firsts: Vec<usize> = trace
        .header
        .layers
        .iter()
        .scan(0, |next, l| Some(std::mem::replace(next, *next + l.experts)))
        .collect();
    trace
        .each_step()
        .map(|(rows, layers)| {
            let ids = |(first, keys): (&usize, &[u32])| {
                keys.iter().map(|key| *key as usize - first).collect()
            };
            (rows, firsts.iter().zip(layers).map(ids).collect())
        })
        .collect()
}

fn damaged(bytes: Vec<u8>) -> String {
    read(&bytes).expect_err("it is damaged")
}

/// A file with one layer of 8 experts, k = 2, and one step.
fn one_step(layer: TraceLayer, rows: u32, ids: &[u16]) -> Vec<u8> {
    let header = TraceHeader { layers: vec![layer], ..header(&[]) };
    let json = serde_json::to_vec(&header).unwrap();
    let mut bytes = MAGIC.to_vec();
    bytes.extend(1u32.to_le_bytes());
    bytes.extend((json.len() as u32).to_le_bytes());
    bytes.extend(json);
    bytes.extend(rows.to_le_bytes());
    bytes.extend((ids.len() as u16).to_le_bytes());
    bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    bytes
}

const LAYER: TraceLayer = TraceLayer { layer: 0, experts: 8, k: 2, bytes: 100 };

#[test]
fn inconsistent_files_are_refused_with_the_offset() {
    assert!(read(&one_step(LAYER, 1, &[3, 5])).is_ok());
    let offset = one_step(LAYER, 1, &[3, 5]).len() - 10;
    for (rows, ids, problem) in [
        (0, vec![3, 5], "no rows"),
        (1, vec![3], "1 experts of layer 0"),
        (1, vec![3, 5, 7], "3 experts of layer 0"),
        (u32::MAX, (0..9).collect(), "9 experts of layer 0"),
        (1, vec![5, 3], "expert 3 of layer 0"),
        (1, vec![3, 3], "expert 3 of layer 0"),
        (1, vec![3, 8], "expert 8 of layer 0"),
    ] {
        let said = damaged(one_step(LAYER, rows, &ids));
        assert!(said.contains(problem) && said.contains(&format!("offset {offset}")), "{said}");
    }
    for (layer, problem) in [
        (TraceLayer { k: 9, ..LAYER }, "9 of 8"),
        (TraceLayer { k: 0, ..LAYER }, "0 of 8"),
        (TraceLayer { experts: 1 << 40, ..LAYER }, "of 1099511627776"),
        (TraceLayer { bytes: 0, ..LAYER }, "0 bytes"),
        (TraceLayer { bytes: u64::MAX, ..LAYER }, "bytes"),
    ] {
        let said = damaged(one_step(layer, 1, &[3, 5]));
        assert!(said.contains("header is damaged") && said.contains(problem), "{said}");
    }
    let good = one_step(LAYER, 1, &[3, 5]);
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        damaged(bytes)
    };
    assert!(with(0, b'M').contains("not a routing trace"));
    assert!(with(16, 2).contains("version 2"));
    assert!(with(23, 0xff).contains("its header cannot have"));
    assert!(with(24, b'[').contains("header is not understood"));
    assert!(damaged(Vec::new()).contains("not a routing trace"));
    assert!(damaged(good[..18].to_vec()).contains("ends within its header"));
    assert!(damaged(good[..40].to_vec()).contains("ends within its header"));
}

#[test]
fn unsupported_models_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.trace");
    let refused = TraceRecorder::create(&path, &header(&[])).err().unwrap().to_string();
    assert!(refused.contains("no layer has routed experts"), "{refused}");
    assert!(!path.exists());
    let nowhere =
        TraceRecorder::create(&folder.path().join("no/a.trace"), &header(&[(8, 2)])).err().unwrap();
    assert!(nowhere.to_string().contains("cannot write the routing trace"), "{nowhere}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn traces_round_trip((header, steps) in routing(20)) {
        let trace = trace(&header, &steps);
        prop_assert_eq!(trace.header(), &header);
        prop_assert_eq!(trace.steps(), steps.len());
        prop_assert_eq!(trace.tokens(), steps.iter().map(|(rows, _)| u64::from(*rows)).sum::<u64>());
        prop_assert!(!trace.is_cut());
        prop_assert_eq!(steps_of(&trace), steps);
    }

    #[test]
    fn a_truncated_file_has_all_finished_steps((header, steps) in routing(5), cut in 1usize..200) {
        let bytes = record(&header, &steps);
        let start = record(&header, &Vec::new()).len();
        let end = bytes.len().saturating_sub(cut).max(start);
        let trace = read(&bytes[..end]).unwrap();
        let whole = (0..=steps.len()).rev().find(|n| record(&header, &steps[..*n].to_vec()).len() <= end).unwrap();
        prop_assert_eq!(trace.is_cut(), record(&header, &steps[..whole].to_vec()).len() < end);
        prop_assert_eq!(steps_of(&trace), &steps[..whole]);
    }

    #[test]
    fn damaged_files_do_not_panic((header, steps) in routing(5), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = record(&header, &steps);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(trace) = read(&bytes) {
            prop_assert!(trace.keys().iter().all(|key| (*key as usize) < trace.header().experts()));
            trace.replay_optimum(3);
        }
    }
}
