//! A model on one device and divided among two cards.

use moeflux_compute::{Activation, Device, ExpertUse, ExpertUses, Op, View, open};

use super::{
    RECURRENT, cpu_group, group, kinds, message,
    model::{LAYERS, Model, Sequence, expert_shape},
    scalar_weight,
};

const SPLITS: [[usize; LAYERS]; 3] = [[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1]];
const PROMPT: [u32; 6] = [3, 14, 15, 9, 26, 5];

/// Logits and states of a conversation with forks, rejected rows, drops and restored states.
fn conversation(device: &mut dyn Device, model: &Model) -> Vec<Vec<u32>> {
    let mut results = Vec::new();
    let mut keep = |logits: Vec<f32>| {
        assert!(logits.iter().all(|x| x.is_finite()) && logits.iter().any(|x| x.abs() > 1e-3));
        results.push(logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    };
    let mut first = Sequence::new(device);
    keep(model.step(device, &mut first, &PROMPT).unwrap());
    keep(model.step(device, &mut first, &[1]).unwrap());
    let mut fork = first.fork(device);
    // Rows that are not committed, as drafted tokens that are wrong.
    keep(model.run(device, &fork, &[8, 9]).unwrap());
    for [kv, convolution] in &fork.states {
        device.truncate_state(*kv, fork.position).unwrap();
        device.drop_state(*convolution);
    }
    for (states, of_first) in fork.states.iter_mut().zip(&first.states) {
        states[1] = device.fork_state(of_first[1], 0).unwrap();
    }
    keep(model.step(device, &mut fork, &[2, 7]).unwrap());
    keep(model.step(device, &mut first, &[30]).unwrap());
    let saved = first.save(device);
    first.drop(device);
    let mut second = Sequence::new(device);
    keep(model.step(device, &mut second, &PROMPT[1..4]).unwrap());
    let ticket = device.submit().unwrap();
    while !device.done(ticket).unwrap() {
        std::thread::yield_now();
    }
    let restored = Sequence { position: 8, ..Sequence::new(device) };
    restored.load(device, &saved);
    let mut restored = restored;
    assert_eq!(restored.save(device), saved);
    keep(model.step(device, &mut restored, &[4]).unwrap());
    keep(model.step(device, &mut fork, &[4]).unwrap());
    second.states.iter().flatten().for_each(|state| device.reset(*state).unwrap());
    second.position = 0;
    keep(model.step(device, &mut second, &PROMPT).unwrap());
    [fork, second, restored].into_iter().for_each(|sequence| sequence.drop(device));
    results
}

#[test]
fn a_divided_model_computes_the_same_bits() {
    for exact in [true, false] {
        for options in kinds(exact) {
            let mut single = open(&options).unwrap();
            let model = Model::load(&mut *single, None);
            let expected = conversation(&mut *single, &model);
            assert_ne!(expected[1], expected[4], "tokens change the logits");
            // Every device of a GPU compiles its kernels: one split for each path.
            let of_gpu = if exact { &SPLITS[..1] } else { &SPLITS[1..2] };
            let is_gpu = options.name.as_deref() != Some("cpu");
            for split in if is_gpu { of_gpu } else { &SPLITS[..] } {
                let mut group = group(&options);
                let model = Model::load(&mut *group, Some(*split));
                let initial = group.states_held();
                let results = conversation(&mut *group, &model);
                assert!(results == expected, "{split:?}, exact: {exact}, {}", group.describe());
                assert_eq!(group.states_held(), initial, "all memory of states is freed");
            }
        }
    }
}

#[test]
fn layers_are_on_the_cards_that_the_split_names() {
    let mut group = cpu_group();
    let error = message(group.split_layers(&[0, 1, 2]));
    assert!(error.contains("layer 2 is assigned to card 2"), "{error}");
    group.split_layers(&[0, 0, 1]).unwrap();
    assert!(group.is_same_card(0, 1) && group.is_same_card(2, 70));
    assert!(!group.is_same_card(1, 2) && !group.is_same_card(70, 0));
    // The card of layer 0 is current.
    for card in [1, 0] {
        group.split_layers(&[card, 0, 1]).unwrap();
        let state = group.state(RECURRENT).unwrap();
        assert_eq!(group.card(card).unwrap().states_held(), group.states_held());
        group.drop_state(state);
    }
    let mut single = open(&kinds(true)[0]).unwrap();
    assert!(single.split_layers(&[0, 0]).is_ok() && single.split_layers(&[1]).is_err());

    // One weight on each card: an op on the other card sees a placeholder of zero.
    group.enter_layer(0, None).unwrap();
    let first = scalar_weight(&mut *group, 2.0);
    group.enter_layer(9, None).unwrap();
    let second = scalar_weight(&mut *group, 3.0);
    let [x, out] = [0; 2].map(|_| View::rows(group.buffer(1).unwrap(), 1, 1));
    group.write(x.buffer, &[1.0]).unwrap();
    let product = |group: &mut dyn Device, layer, weight| {
        group.enter_layer(layer, None).unwrap();
        group
            .run(&Op::MatMul { x, weight, bias: None, exact: true, answers: x.few(), out })
            .unwrap();
        let mut value = [9.0];
        group.read(out, &mut value).unwrap();
        value[0]
    };
    assert_eq!(product(&mut *group, 1, first), 2.0);
    assert_eq!(product(&mut *group, 2, second), 3.0);
    assert_eq!(product(&mut *group, 2, first), 0.0);
    assert_eq!(product(&mut *group, 0, second), 0.0);
}

#[test]
fn a_view_is_carried_when_the_card_changes_only() {
    for options in kinds(true) {
        let mut group = group(&options);
        group.split_layers(&[0, 0, 1]).unwrap();
        // More than is carried at a time.
        let (rows, width) = (1100, 1024);
        let buffer = group.buffer(rows * width + 2).unwrap();
        let view = View { offset: 1, ..View::rows(buffer, rows, width) };
        let ones: Vec<f32> = (0..rows * width).map(|i| i as f32).collect();
        group.write_view(view, &ones).unwrap();
        let end = View { offset: rows * width + 1, ..View::rows(buffer, 1, 1) };
        group.write_view(end, &[5.0]).unwrap();
        let read = |group: &mut dyn Device, layer, carry| {
            group.enter_layer(layer, carry).unwrap();
            let mut values = vec![7.0; rows * width + 2];
            group.read(View::rows(buffer, 1, values.len()), &mut values).unwrap();
            values
        };
        assert!(read(&mut *group, 2, None).iter().all(|x| *x == 0.0), "nothing is carried");
        assert_eq!(read(&mut *group, 0, None)[1..=rows * width], ones);
        let carried = read(&mut *group, 2, Some(view));
        assert!(carried[1..=rows * width] == ones, "all rows are carried");
        assert_eq!([carried[0], carried[rows * width + 1]], [0.0; 2], "others are not");
        // Same card: the values stay.
        group.write_view(end, &[6.0]).unwrap();
        let same = read(&mut *group, 3, Some(view));
        assert!(same[1..=rows * width] == ones && same[rows * width + 1] == 6.0);
        // The other card has kept its contents.
        assert_eq!(read(&mut *group, 1, Some(end))[rows * width + 1], 6.0);
    }
}

#[test]
fn a_view_that_cannot_be_carried_leaves_the_card_current() {
    let mut group = cpu_group();
    let buffer = group.buffer(64).unwrap();
    group.write_view(View::rows(buffer, 1, 1), &[4.0]).unwrap();
    let beyond = View::rows(buffer, 65, 1);
    let gaps = View::rows(buffer, 4, 8).columns(0, 4);
    for view in [beyond, gaps] {
        assert!(group.enter_layer(1, Some(view)).is_err(), "{view:?}");
        let mut value = [0.0];
        group.read(View::rows(buffer, 1, 1), &mut value).unwrap();
        assert_eq!(value, [4.0], "card 0 is current");
    }
    group.enter_layer(1, Some(View::rows(buffer, 0, 8))).unwrap();
}

#[test]
fn ops_on_the_wrong_card_are_refused() {
    for options in kinds(true) {
        let mut group = group(&options);
        let model = Model::load(&mut *group, Some([0, 0, 1, 1]));
        let (weight, slots) = model.objects(3);
        let [x, out, result] =
            [64, 128, 64].map(|width| View::rows(group.buffer(width).unwrap(), 1, width));
        let op = Op::MatMul { x, weight, bias: None, exact: true, answers: x.few(), out };
        group.enter_layer(3, None).unwrap();
        group.run(&op).unwrap();
        group.enter_layer(1, None).unwrap();
        let error = message(group.run(&op));
        assert!(error.starts_with("card 0: MatMul"), "{error}");
        let mut sequence = Sequence::new(&mut *group);
        sequence.states.swap(0, 3);
        assert!(model.run(&mut *group, &sequence, &[1]).is_err(), "a state of another card");
        let uses = &[ExpertUse { slot: slots[0], row: 0, out_row: 0 }];
        let error = message(group.run(&Op::Experts {
            x,
            shape: &expert_shape(),
            activation: Activation::SwiGlu,
            experts: 4,
            answers: x.few(),
            uses: ExpertUses::Listed(uses),
            inner: out.columns(0, 32),
            out: result,
        }));
        assert!(error.starts_with("card 0: Experts"), "{error}");
    }
}
