//! Commits of fewer rows than a step has computed.

use std::ops::Range;

use moeflux_compute::{Commit, Device, Error, Span, State};

use super::{KINDS, Kind, Mixer, for_each_device};
use crate::harness::{bits, is_full, read};

/// Rows that a step computes.
const DRAFTED: usize = 30;

/// First rows of the tested steps: in a page, before the end of one, before and after a ring wraps.
fn starts(kind: Kind) -> &'static [usize] {
    if kind.wraps() { &[240, 500, 620] } else { &[0, 130, 240] }
}

#[test]
fn a_kv_cache_continues_after_the_accepted_rows() {
    for_each_device(|device| {
        let name = device.describe();
        for kind in KINDS.into_iter().filter(|kind| !kind.is_recurrent()) {
            let mixer = Mixer::new(device, kind);
            let on_gpu = name.starts_with("gpu") && !is_full();
            let starts = if on_gpu { &starts(kind)[1..2] } else { starts(kind) };
            for (start, accepted) in starts
                .iter()
                .flat_map(|start| [0, 1, 16, DRAFTED].map(|accepted| (*start, accepted)))
            {
                let what = format!("{name}: {kind:?}, {accepted} rows from {start}");
                let (end, held) = (start + accepted, device.states_held());
                let next = |device: &mut dyn Device, state, rows: Range<usize>| {
                    mixer.advance(device, 1, state, rows)
                };
                let only = mixer.prefilled(device, start);
                mixer.advance(device, 0, only, start..end);
                let needed = device.states_held() - held;
                let drafted = mixer.prefilled(device, start);
                let span = mixer.compute(device, 0, drafted, start..start + DRAFTED).unwrap();
                device.commit(&[Commit { span, accepted }]).unwrap();
                // Pages of rejected rows are free. A GPU keeps its allocations.
                let freed = device.states_held() - held == 2 * needed;
                assert!(freed || name.starts_with("gpu") || kind.wraps(), "{what}");
                let saved =
                    [only, drafted].map(|state| mixer.save(device, state, mixer.entries(end)));
                assert!(kind.wraps() || saved[0] == saved[1], "{what}");
                let expected = next(device, only, end..end + 40);
                assert!(next(device, drafted, end..end + 40) == expected, "{what}");
                let _ = [only, drafted].map(|state| device.drop_state(state));
            }
        }
    });
}

#[test]
fn rejected_rows_leave_forks_as_they_were() {
    for_each_device(|device| {
        for kind in KINDS.into_iter().filter(|kind| !kind.is_recurrent()) {
            let mixer = Mixer::new(device, kind);
            let parent = mixer.prefilled(device, 250);
            let fork = device.fork_state(parent, 250).unwrap();
            let span = mixer.compute(device, 0, fork, 250..280).unwrap();
            device.commit(&[Commit { span, accepted: 0 }]).unwrap();
            let expected = mixer.unforked_output(device, 1, 250, 250..290);
            for state in [parent, fork] {
                assert!(mixer.advance(device, 1, state, 250..290) == expected, "{kind:?}");
            }
        }
    });
}

/// Ops whose state no position addresses.
const RECURRENT: [Kind; 5] = [
    Kind::Conv(37, 4),
    Kind::Delta(2, 4, 16, 24),
    Kind::Kda(2, 4, 16, 24),
    Kind::Mamba2(2, 4, 24, 16),
    Kind::Compress(20, 4),
];

#[test]
fn a_recurrent_state_continues_after_the_accepted_rows() {
    for_each_device(|device| {
        let name = device.describe();
        for kind in RECURRENT {
            let mixer = Mixer::new(device, kind);
            // A row and its drafts, drafts after a run of certain rows, and drafts alone.
            for (rows, drafts) in [(2, 1), (3, 2), (4, 3), (12, 3), (3, 3)] {
                for accepted in [0].into_iter().chain(rows - drafts..=rows) {
                    let (start, end) = (21, 21 + accepted);
                    let what = format!("{name}: {kind:?}, {accepted} of {rows}, {drafts} drafts");
                    let alone = mixer.prefilled(device, start);
                    let mut single = Vec::new();
                    // Certain rows of one step, then each drafted one alone.
                    if rows > drafts && accepted > 0 {
                        let certain = start..start + rows - drafts;
                        single.extend(mixer.run(device, 0, alone, certain));
                    }
                    for row in (start + rows - drafts)..end {
                        single.extend(mixer.run(device, 0, alone, row..row + 1));
                    }
                    let drafted = mixer.prefilled(device, start);
                    let span = Span { drafts, ..Span::new(drafted, start, rows) };
                    mixer.compute_span(device, 0, span).unwrap();
                    let outputs = bits(&read(device, mixer.outputs(&span)));
                    // A fork before the commit has what was committed before.
                    let fork = device.fork_state(drafted, start).unwrap();
                    device.commit(&[Commit { span, accepted }]).unwrap();
                    assert!(outputs.starts_with(&single), "{what}: output");
                    let save = |device: &mut dyn Device, state| {
                        mixer.save(device, state, mixer.entries(end))
                    };
                    assert!(save(device, drafted) == save(device, alone), "{what}: state");
                    let next = |device: &mut dyn Device, state, rows: Range<usize>| {
                        mixer.advance(device, 1, state, rows)
                    };
                    let expected = next(device, alone, end..end + 9);
                    assert!(next(device, drafted, end..end + 9) == expected, "{what}: after it");
                    let expected = mixer.unforked_output(device, 1, start, start..start + 9);
                    assert!(next(device, fork, start..start + 9) == expected, "{what}: fork");
                    let _ = [alone, drafted, fork].map(|state| device.drop_state(state));
                }
            }
        }
    });
}

#[test]
fn drafted_rows_of_two_sequences_are_committed_apart() {
    for_each_device(|device| {
        for kind in RECURRENT {
            let mixer = Mixer::new(device, kind);
            let [one, other, expected] = [9, 6, 9].map(|rows| mixer.prefilled(device, rows));
            let spans = [
                Span { drafts: 2, ..Span::new(one, 9, 3) },
                Span { drafts: 1, ..Span::new(other, 6, 2) },
            ];
            for span in spans {
                mixer.compute_span(device, 0, span).unwrap();
            }
            let commits = [2, 0].into_iter().zip(spans);
            let commits: Vec<_> =
                commits.map(|(accepted, span)| Commit { span, accepted }).collect();
            device.commit(&commits).unwrap();
            mixer.run(device, 0, expected, 9..11);
            let expected = mixer.advance(device, 0, expected, 11..20);
            assert!(mixer.advance(device, 0, one, 11..20) == expected, "{kind:?}");
            let expected = mixer.unforked_output(device, 1, 6, 6..12);
            assert!(mixer.advance(device, 1, other, 6..12) == expected, "{kind:?}");
        }
    });
}

#[test]
fn a_recurrent_state_rejects_drafted_rows_only() {
    for_each_device(|device| {
        let cache = Mixer::new(device, KINDS[0]);
        for kind in RECURRENT {
            let mixer = Mixer::new(device, kind);
            let state = mixer.prefilled(device, 5);
            let keys = cache.prefilled(device, 5);
            let recurrent = Span { drafts: 1, ..Span::new(state, 5, 4) };
            let spans: [Span; 2] = [
                cache.compute(device, 0, keys, 5..9).unwrap(),
                mixer.compute_span(device, 0, recurrent).unwrap(),
            ];
            let save = |device: &mut dyn Device, state: State, keys: State| {
                let [cached, recurrent] = [cache.entries(9), mixer.entries(9)];
                [cache.save(device, keys, cached), mixer.save(device, state, recurrent)]
            };
            let before = save(device, state, keys);
            for accepted in [1, 2, 5] {
                let commits =
                    [Commit { span: spans[0], accepted: 2 }, Commit { span: spans[1], accepted }];
                let error = device.commit(&commits).unwrap_err();
                assert!(matches!(error, Error::Shape(_)), "{error}");
                assert_eq!(error.to_string().contains("recurrent state"), accepted < 4, "{error}");
                assert!(save(device, state, keys) == before, "{kind:?}: {accepted}");
            }
            device.commit(&spans.map(Commit::all)).unwrap();
            let expected = mixer.unforked_output(device, 0, 9, 9..14);
            assert!(mixer.advance(device, 0, state, 9..14) == expected, "{kind:?}");
        }
    });
}
