//! Bytes of states: counted, predicted and limited.

use std::{iter::once, ops::Range};

use moeflux_compute::{Device, Error, Span, State};

use super::{KINDS, Mixer, for_each_device};

#[test]
fn state_bytes_are_counted_once_and_predicted() {
    for_each_device(|device| {
        let name = device.describe();
        for kind in KINDS {
            let mixer = Mixer::new(device, kind);
            let initial = device.states_held();
            let state = mixer.state(device);
            let step = |device: &mut dyn Device, state, rows: Range<usize>| {
                let held = device.states_held();
                let span = Span::new(state, rows.start, rows.len());
                let need = device.state_need(&mut once(span)).unwrap();
                mixer.run(device, 0, state, rows.clone());
                assert_eq!(device.states_held() - held, need, "{name}: {kind:?}, {rows:?}");
                need
            };
            assert!(step(device, state, 0..30) > 0);
            assert_eq!(step(device, state, 30..31), 0);
            step(device, state, 31..300);
            let held = device.states_held();
            let fork = device.fork_state(state, 300).unwrap();
            assert_eq!(device.states_held(), held);
            assert!(step(device, fork, 300..303) > 0);
            step(device, state, 300..301);
            // Pages that are no longer shared are written in place. A recurrent state needs a
            // second buffer until the commit.
            assert!(kind.is_recurrent() || step(device, fork, 303..304) == 0);
            step(device, state, 301..690);
            assert!(
                device.states_held() - initial <= 2 * device.state_bytes(kind.shape()),
                "{name}: {kind:?}"
            );
            device.drop_state(state);
            assert!(device.states_held() > initial);
            device.drop_state(fork);
            assert_eq!(device.states_held(), initial, "{name}: {kind:?}");
        }
    });
}

#[test]
fn a_state_at_the_memory_limit_stays_usable() {
    for_each_device(|device| {
        let name = device.describe();
        for kind in KINDS {
            let mixer = Mixer::new(device, kind);
            let expected = mixer.unforked_output(device, 1, 250, 250..400);
            let state = mixer.prefilled(device, 250);
            let fork = device.fork_state(state, 250).unwrap();
            device.limit_states(device.states_held());
            let full = |result: Result<(), Error>| {
                let error = result.err().unwrap();
                assert!(matches!(error, Error::StatesFull { .. }), "{name}: {kind:?}: {error}");
            };
            full(mixer.try_run(device, 1, fork, 250..400).map(drop));
            let entries = mixer.entries(250);
            let bytes = vec![0; entries.len() * device.entry_bytes(kind.shape())];
            full(device.load_state(fork, entries, &bytes));
            // A recurrent state that was written already has all of its memory.
            match kind.is_recurrent() {
                true => full(device.state(kind.shape()).map(drop)),
                false => full(mixer.try_run(device, 0, state, 250..400).map(drop)),
            }
            device.limit_states(u64::MAX);
            assert!(mixer.advance(device, 1, fork, 250..400) == expected, "{name}: {kind:?}");
            device.drop_state(fork);
            assert!(mixer.advance(device, 1, state, 250..400) == expected, "{name}: {kind:?}");
            device.drop_state(state);
        }
    });
}

/// A KV cache with memory for all positions keeps it when it is written after a fork, which gets a
/// copy of its positions.
#[test]
fn forks_of_whole_caches_keep_their_contents() {
    for_each_device(|device| {
        let name = device.describe();
        device.limit_states(64 << 20);
        device.reserve_whole_states(true);
        let initial = device.states_held();
        for kind in KINDS {
            let mixer = Mixer::new(device, kind);
            let expected = mixer.unforked_output(device, 1, 250, 250..400);
            let state = mixer.state(device);
            let predict = |device: &mut dyn Device, state: State, rows: &Range<usize>| {
                let span = Span::new(state, rows.start, rows.len());
                device.states_held() + device.state_need(&mut [span].into_iter()).unwrap()
            };
            predict(device, state, &(0..250));
            mixer.advance(device, 0, state, 0..250);
            let forks = [0; 2].map(|_| device.fork_state(state, 250).unwrap());
            for state in [state, forks[0], forks[1]] {
                let predicted = predict(device, state, &(250..400));
                let output = mixer.advance(device, 1, state, 250..400);
                assert!(output == expected, "{name}: {kind:?}");
                assert_eq!(device.states_held(), predicted, "{name}: {kind:?}");
            }
            [state, forks[0], forks[1]].into_iter().for_each(|state| device.drop_state(state));
            assert_eq!(device.states_held(), initial, "{name}: {kind:?}");
        }
    });
}

/// Even close to the limit, the first states of a step leave enough memory for the others.
#[test]
fn states_grow_while_the_step_fits_the_limit() {
    for_each_device(|device| {
        let name = device.describe();
        let mixer = Mixer::new(device, KINDS[0]);
        let steps = || (0..500).step_by(100).map(|start| start..start + 100);
        let single = mixer.state(device);
        let expected: Vec<_> = steps().map(|rows| mixer.run(device, 0, single, rows)).collect();
        device.drop_state(single);

        let states: Vec<State> = (0..4).map(|_| mixer.state(device)).collect();
        let need = |device: &mut dyn Device, rows: &Range<usize>| {
            let span = |state: &State| Span::new(*state, rows.start, rows.len());
            device.state_need(&mut states.iter().map(span)).unwrap()
        };
        let held = device.states_held();
        device.limit_states(held);
        let least = need(device, &(0..500));
        device.limit_states(held + least);
        for (rows, expected) in steps().zip(expected) {
            let predicted = device.states_held() + need(device, &rows);
            for state in &states {
                assert!(mixer.run(device, 0, *state, rows.clone()) == expected, "{name}: {rows:?}");
            }
            assert_eq!(device.states_held(), predicted, "{name}: {rows:?}");
        }
        device.limit_states(u64::MAX);
        states.iter().for_each(|state| device.drop_state(*state));
    });
}
