//! Commits of fewer rows than a step has computed.

use std::ops::Range;

use moeflux_compute::{Commit, Device, Error, Span, State};

use super::{KINDS, Kind, Mixer, for_each_device};
use crate::harness::is_full;

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

#[test]
fn rows_of_a_recurrent_state_are_accepted_together() {
    for_each_device(|device| {
        let cache = Mixer::new(device, KINDS[0]);
        for kind in KINDS.into_iter().filter(|kind| kind.is_recurrent()) {
            let mixer = Mixer::new(device, kind);
            let state = mixer.prefilled(device, 5);
            let keys = cache.prefilled(device, 5);
            let spans: [Span; 2] = [
                cache.compute(device, 0, keys, 5..9).unwrap(),
                mixer.compute(device, 0, state, 5..9).unwrap(),
            ];
            let save = |device: &mut dyn Device, state: State, keys: State| {
                let [cached, recurrent] = [cache.entries(9), mixer.entries(9)];
                [cache.save(device, keys, cached), mixer.save(device, state, recurrent)]
            };
            let before = save(device, state, keys);
            for accepted in [0, 3, 5] {
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
