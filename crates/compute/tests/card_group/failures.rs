//! Failures of one card: indexes stay in agreement, and other cards keep what was committed.

use moeflux_compute::{BankPlace, Bytes, Commit, Device, Error, Op, Slot, Span, StateShape, View};

use super::{
    KV, RECURRENT,
    controlled_card::controlled_group,
    message,
    model::{Model, Sequence},
    scalar_weight,
};

/// Saves one value of a recurrent state.
fn value(device: &mut dyn Device, state: moeflux_compute::State) -> f32 {
    let mut bytes = [0; 4];
    device.save_state(state, 0..1, &mut bytes).unwrap();
    f32::from_le_bytes(bytes)
}

#[test]
fn a_state_that_one_card_cannot_create_exists_on_none() {
    for failing in [0, 1, 2] {
        let (mut group, controls) = controlled_group(3);
        let first = group.layer_state(RECURRENT, 1).unwrap();
        for owner in 0..3 {
            for method in ["state", "layer_state", "fork_state"] {
                controls[failing].fail(method);
                group.enter_layer(owner, None).unwrap();
                // The owner creates the state, and other cards a placeholder.
                let created = [group.layer_state(RECURRENT, owner), group.state(KV)];
                controls[failing].fail("");
                for created in created.into_iter().flatten() {
                    assert!(owner == failing || method != "state", "{method} failed on {failing}");
                    group.drop_state(created);
                }
            }
            controls[failing].fail("state");
            let error = message(group.state(KV));
            assert!(error.starts_with(&format!("card {failing}: no state")), "{error}");
            controls[failing].fail("fork_state");
            assert_eq!(group.fork_state(first, 0).is_err(), failing == 1);
            controls[failing].fail("");
            let held = group.states_held();
            // Indexes agree: states of all cards can be created, written and told apart.
            let states: Vec<_> =
                (0..3).map(|layer| group.layer_state(RECURRENT, layer).unwrap()).collect();
            for (state, x) in states.iter().zip([1.0f32, 2.0, 3.0]) {
                group.load_state(*state, 0..1, &x.to_le_bytes()).unwrap();
            }
            let values: Vec<f32> = states.iter().map(|state| value(&mut *group, *state)).collect();
            assert_eq!(values, [1.0, 2.0, 3.0]);
            states.iter().for_each(|state| group.drop_state(*state));
            assert_eq!(group.states_held(), held);
        }
        assert_eq!(value(&mut *group, first), 0.0);
    }
}

#[test]
fn objects_that_one_card_cannot_create_leave_indexes_in_agreement() {
    for failing in [0, 1] {
        for owner in [0, 1] {
            let (mut group, controls) = controlled_group(2);
            group.enter_layer(owner, None).unwrap();
            let mut refused = |method, create: &mut dyn FnMut(&mut dyn Device) -> Option<Error>| {
                controls[failing].fail(method);
                let error = create(&mut *group).expect(method).to_string();
                assert_eq!(error, format!("card {failing}: no {method}"));
                controls[failing].fail("");
            };
            refused("buffer", &mut |group| group.buffer(0).err());
            refused("bank", &mut |group| group.bank(3, 8, BankPlace::Host).err());
            refused("slot_table", &mut |group| group.slot_table(&[]).err());
            refused("weight", &mut |group| {
                let shape = moeflux_compute::MatrixShape {
                    rows: 2,
                    cols: 2,
                    format: moeflux_compute::Format::Plain(moeflux_compute::Scalar::F32),
                };
                group.weight(shape, Bytes::zeroed(16).unwrap()).err()
            });
            // Objects of both cards, created in turns.
            let x = View::rows(group.buffer(1).unwrap(), 1, 1);
            let out = View::rows(group.buffer(1).unwrap(), 1, 1);
            group.write(x.buffer, &[1.0]).unwrap();
            let (mut weights, mut tables) = (Vec::new(), Vec::new());
            for layer in [owner, 1 - owner, owner] {
                group.enter_layer(layer, None).unwrap();
                let weight = scalar_weight(&mut *group, 5.0);
                assert!(!weights.contains(&weight), "an index names one object on all cards");
                weights.push(weight);
                group
                    .run(&Op::MatMul { x, weight, bias: None, exact: true, answers: x.few(), out })
                    .unwrap();
                let mut product = [0.0];
                group.read(out, &mut product).unwrap();
                assert_eq!(product, [5.0]);
                let banks = [0; 2].map(|_| group.bank(2, 4, BankPlace::Host).unwrap());
                let [src, dst] = banks.map(|bank| Slot { bank, index: 1 });
                let mut memory = group.take_slot(src).unwrap();
                memory.fill(7);
                group.put_slot(src, memory).unwrap();
                group.copy_slot(src, dst).unwrap();
                assert_eq!(*group.take_slot(dst).unwrap(), [7; 4]);
                let table = group.slot_table(&[Some(src)]).unwrap();
                assert!(!tables.contains(&table));
                tables.push(table);
            }
        }
    }
}

#[test]
fn cards_that_are_used_outside_of_the_group_are_refused() {
    let options = moeflux_compute::DeviceOptions::default().name("cpu").threads(1);
    let mut cards = super::open_cards(&options);
    cards[1].state(KV).unwrap();
    cards[0].buffer(1).unwrap();
    let mut group = moeflux_compute::group_cards(cards).unwrap();
    for _ in 0..2 {
        let error = message(group.state(KV));
        assert!(error.starts_with("card 1 has created objects in another order"), "{error}");
        let error = message(group.buffer(1));
        assert!(error.starts_with("card 0 has created objects in another order"), "{error}");
    }
}

#[test]
fn states_are_committed_on_all_cards_or_on_none() {
    let (mut group, controls) = controlled_group(4);
    let model = Model::load(&mut *group, Some([0, 1, 2, 3]));
    let mut sequence = Sequence::new(&mut *group);
    model.step(&mut *group, &mut sequence, &[1, 2, 3, 4]).unwrap();
    let committed = sequence.save(&mut *group);
    model.run(&mut *group, &sequence, &[5, 6]).unwrap();
    let valid = sequence.commits(2);

    // The last commit, of the last card, is wrong.
    let wrong = |commit: Commit| -> Vec<Commit> {
        valid[..valid.len() - 1].iter().copied().chain([commit]).collect()
    };
    let last = *valid.last().unwrap();
    let too_many = Commit { accepted: 3, ..last };
    let rejected = Commit { accepted: 1, ..last };
    let dropped = group.state(RECURRENT).unwrap();
    group.drop_state(dropped);
    let stale = Commit { span: Span { state: dropped, ..last.span }, ..last };
    for commit in [too_many, rejected, stale] {
        assert!(group.commit(&wrong(commit)).is_err());
        assert!(sequence.save(&mut *group) == committed, "no state is committed: {commit:?}");
    }
    // A card has failed before.
    for method in ["commit", "done", "all"] {
        controls[3].fail(method);
        let error = message(group.commit(&valid));
        assert!(error.starts_with("card 3: "), "{error}");
        controls[3].fail("");
        assert!(sequence.save(&mut *group) == committed, "no state is committed: {method}");
    }
    group.commit(&valid).unwrap();
    sequence.position += 2;
    assert!(sequence.save(&mut *group) != committed, "the step changes the states");
}

#[test]
fn a_lost_card_is_named_and_leaves_the_states_of_others() {
    let (mut group, controls) = controlled_group(2);
    let model = Model::load(&mut *group, Some([0, 0, 1, 1]));
    let mut sequence = Sequence::new(&mut *group);
    let expected = model.step(&mut *group, &mut sequence, &[1, 2, 3]).unwrap();
    let committed = sequence.save(&mut *group);
    controls[1].fail("all");
    let lost = |error: String| assert_eq!(error, "card 1: the card is lost");
    lost(message(model.run(&mut *group, &sequence, &[4])));
    lost(message(group.submit()));
    lost(message(group.commit(&sequence.commits(1))));
    lost(message(group.buffer(1)));
    lost(message(group.scratch_bytes(Default::default())));
    let span = Span::new(sequence.states[3][0], 3, 1);
    lost(message(group.state_need(&mut [span].into_iter())));
    for [kv, _] in &sequence.states[..2] {
        group.truncate_state(*kv, 3).unwrap();
    }
    controls[1].fail("");
    assert!(sequence.save(&mut *group) == committed);
    // Memory errors keep their kind; the limit of states keeps its fields.
    group.limit_card_states(&[0, 1 << 20]);
    let full = group.layer_state(StateShape::Recurrent { len: 10 }, 0);
    assert!(matches!(full, Err(Error::StatesFull { limit: 0, .. })));
    group.limit_card_states(&[1 << 20, 1 << 20]);
    let mut other = Sequence::new(&mut *group);
    assert_eq!(model.step(&mut *group, &mut other, &[1, 2, 3]).unwrap(), expected);
}
