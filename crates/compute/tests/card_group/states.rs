//! Handles, limits and memory of states in a group.

use moeflux_compute::{Device, Error, Span, SplitMix64, State, StateShape, group_cards, open};

use super::{KV, RECURRENT, cpu_group, group, kinds};

/// A state with contents that identify it.
struct Known {
    state: State,
    /// Layer, to which the card belongs.
    layer: usize,
    shape: StateShape,
    contents: Vec<u8>,
}

fn save(device: &mut dyn Device, known: &Known) -> Vec<u8> {
    let mut bytes = vec![0; known.contents.len()];
    let entries = bytes.len() / device.entry_bytes(known.shape);
    device.save_state(known.state, 0..entries, &mut bytes).unwrap();
    bytes
}

#[test]
fn forks_drops_and_truncations_in_any_order_keep_handles_right() {
    let kinds = kinds(true);
    for [first, second] in [[0, 0], [0, 1], [1, 0], [1, 1]] {
        let (Some(first), Some(second)) = (kinds.get(first), kinds.get(second)) else { continue };
        let first = open(first).unwrap();
        let second = open(&second.clone().id(first.id())).unwrap();
        let mut single = open(&kinds[0].clone().id(first.id())).unwrap();
        let mut group = group_cards(vec![first, second]).unwrap();
        group.split_layers(&[0, 1]).unwrap();
        let mut random = SplitMix64::new(11);
        let mut below = |n: usize| (random.next_u64() % n as u64) as usize;
        let mut all: Vec<Known> = Vec::new();
        for step in 0..300usize {
            let chosen = (!all.is_empty()).then(|| below(all.len()));
            match (below(4), chosen) {
                (0, _) | (_, None) => {
                    let (layer, shape) = (below(2), [KV, RECURRENT][below(2)]);
                    let state = group.layer_state(shape, layer).unwrap();
                    assert_eq!(state, single.layer_state(shape, layer).unwrap());
                    let entries = shape.entries().min(40);
                    let len = entries * group.entry_bytes(shape);
                    let contents: Vec<u8> = (0..len).map(|i| (i * 7 + step) as u8 & 63).collect();
                    group.load_state(state, 0..entries, &contents).unwrap();
                    all.push(Known { state, layer, shape, contents });
                }
                (1, Some(i)) => {
                    let (entry, known) = (group.entry_bytes(all[i].shape), &all[i]);
                    let entries = known.contents.len() / entry;
                    let state = group.fork_state(known.state, entries).unwrap();
                    assert_eq!(state, single.fork_state(known.state, entries).unwrap());
                    let contents = known.contents.clone();
                    all.push(Known { state, contents, ..*known });
                }
                (2, Some(i)) => {
                    let known = all.swap_remove(i);
                    group.drop_state(known.state);
                    single.drop_state(known.state);
                    assert!(group.truncate_state(known.state, 0).is_err());
                    assert!(group.fork_state(known.state, 0).is_err());
                    // Again: does nothing.
                    group.drop_state(known.state);
                }
                (_, Some(i)) => {
                    let entry = group.entry_bytes(all[i].shape);
                    let known = &mut all[i];
                    if known.shape == KV {
                        let len = below(known.contents.len() / entry + 1);
                        group.truncate_state(known.state, len).unwrap();
                        known.contents.truncate(len * entry);
                    } else {
                        group.reset(known.state).unwrap();
                        known.contents.fill(0);
                    }
                }
            }
            if step % 20 == 0 {
                for known in &all {
                    assert!(save(&mut *group, known) == known.contents, "state of {}", known.layer);
                }
            }
        }
        // Every state is on the card of its layer.
        assert!(all.iter().any(|known| known.layer == 0) && all.len() > 5);
        all.iter().filter(|known| known.layer == 1).for_each(|known| group.drop_state(known.state));
        let held = |group: &dyn Device| [0, 1].map(|i| group.card(i).unwrap().states_held());
        assert!(held(&*group)[0] > 0);
        assert_eq!(held(&*group)[1], 0);
        all.iter().for_each(|known| group.drop_state(known.state));
        assert_eq!(held(&*group), [0; 2]);
    }
}

#[test]
fn a_state_without_a_layer_is_on_the_current_card() {
    let mut group = cpu_group();
    group.enter_layer(1, None).unwrap();
    let state = group.state(RECURRENT).unwrap();
    let held = |group: &dyn Device| [0, 1].map(|i| group.card(i).unwrap().states_held());
    assert_eq!(held(&*group)[0], 0);
    assert_eq!(held(&*group)[1], group.states_held());
    assert!(group.states_held() > 0);
    group.enter_layer(0, None).unwrap();
    let fork = group.fork_state(state, 0).unwrap();
    group.load_state(fork, 0..1, &[1; 4]).unwrap();
    assert_eq!(held(&*group)[0], 0, "a fork is on the card of its origin");
}

/// Bytes that a recurrent state holds before it is written.
fn committed_bytes(device: &dyn Device) -> u64 {
    device.state_bytes(RECURRENT) / 2
}

#[test]
fn bytes_held_and_needed_are_those_of_the_fullest_card() {
    for options in kinds(true) {
        let mut group = group(&options);
        group.split_layers(&[0, 1]).unwrap();
        let unit = committed_bytes(&*group);
        assert_eq!(unit, group.card(1).unwrap().state_bytes(RECURRENT) / 2);
        let states = [0, 1, 1].map(|layer| group.layer_state(RECURRENT, layer).unwrap());
        let span = |i: usize| Span::new(states[i], 0, 1);
        let need = |group: &mut dyn Device, spans: &[Span]| {
            group.state_need(&mut spans.iter().copied()).unwrap()
        };
        // Without limits: sums.
        assert_eq!(group.states_held(), 3 * unit);
        assert_eq!(need(&mut *group, &[span(0), span(1)]), 2 * unit);

        // Card 0 has 1 unit of 10, card 1 has 2 of 4.
        group.limit_card_states(&[10 * unit, 4 * unit]);
        assert_eq!(group.states_held(), 2 * unit * 14 / 4);
        // Card 0 may grow without becoming the fullest.
        assert_eq!(need(&mut *group, &[span(0)]), 0);
        assert_eq!(need(&mut *group, &[span(1)]), unit * 14 / 4);
        assert_eq!(need(&mut *group, &[span(0), span(1), span(2)]), 2 * unit * 14 / 4);
        // Card 1 is full afterwards: exactly the sum of the limits.
        assert_eq!(group.states_held() + need(&mut *group, &[span(1), span(2)]), 14 * unit);
        // One byte less on card 1 does not fit.
        group.limit_card_states(&[10 * unit, 4 * unit - 1]);
        let total = 14 * unit - 1;
        assert!(group.states_held() + need(&mut *group, &[span(1), span(2)]) > total);
        assert!(group.states_held() + need(&mut *group, &[span(1)]) <= total);

        // A card without an entry can hold nothing.
        group.limit_card_states(&[10 * unit]);
        assert_eq!(group.states_held(), u64::MAX);
        let full = group.layer_state(RECURRENT, 1);
        assert!(matches!(full, Err(Error::StatesFull { limit: 0, .. })));
        group.layer_state(RECURRENT, 0).unwrap();
    }
}

#[test]
fn a_limit_of_the_group_is_divided_evenly() {
    let mut group = cpu_group();
    let unit = committed_bytes(&*group);
    group.limit_states(4 * unit + 1);
    let fits = |group: &mut dyn Device, layer| {
        (0..).take_while(|_| group.layer_state(RECURRENT, layer).is_ok()).count()
    };
    assert_eq!([fits(&mut *group, 0), fits(&mut *group, 1)], [2, 2]);
    let limit = match group.layer_state(RECURRENT, 1) {
        Err(Error::StatesFull { limit, .. }) => limit,
        other => panic!("{other:?}"),
    };
    assert_eq!(limit, 2 * unit);
    let limit = match group.layer_state(RECURRENT, 0) {
        Err(Error::StatesFull { limit, .. }) => limit,
        other => panic!("{other:?}"),
    };
    assert_eq!(limit, 2 * unit + 1);
    // A single card takes the sum.
    let mut single = open(&kinds(true)[0]).unwrap();
    single.limit_card_states(&[unit, unit]);
    assert_eq!(fits(&mut *single, 0), 2);
    // Huge limits do not overflow.
    group.limit_states(u64::MAX);
    assert!(group.states_held() <= 4 * unit + 4, "{}", group.states_held());
    group.limit_card_states(&[u64::MAX; 2]);
    assert!(group.states_held() <= 4 * unit + 4, "{}", group.states_held());
}

#[test]
fn a_need_of_a_dropped_state_is_an_error() {
    let mut group = cpu_group();
    let state = group.state(KV).unwrap();
    group.drop_state(state);
    let span = Span::new(state, 0, 1);
    assert!(group.state_need(&mut [span].into_iter()).is_err());
}
