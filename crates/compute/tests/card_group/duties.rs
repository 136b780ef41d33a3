//! Slots, tickets, planned memory and measurements of a group.

use moeflux_compute::{
    BankPlace, Counters, Device, DeviceMemory, KernelTime, RecordedStep, ScratchShape, Slot,
    Ticket, View, ViewRead,
};

use super::{controlled_card::controlled_group, cpu_group, message};

#[test]
fn slots_of_several_cards_are_neither_copied_nor_in_one_table() {
    let mut group = cpu_group();
    let mut bank = |layer| {
        group.enter_layer(layer, None).unwrap();
        group.bank(2, 8, BankPlace::Host).unwrap()
    };
    let banks = [bank(0), bank(1), bank(0)];
    let [first, second, third] = banks.map(|bank| Slot { bank, index: 1 });
    let mut fill = |slot, value| {
        let mut memory = group.take_slot(slot).unwrap();
        assert_eq!(memory.len(), 8);
        memory.fill(value);
        group.put_slot(slot, memory).unwrap();
    };
    [first, second, third].into_iter().zip(1..).for_each(|(slot, value)| fill(slot, value));
    let error = message(group.copy_slot(first, second));
    assert_eq!(error, "a slot of card 0 was copied to card 1");
    let error = message(group.slot_table(&[first, third, second].map(Some)));
    assert!(error.starts_with("a table has slots of cards 0 and 1"), "{error}");
    assert_eq!(*group.take_slot(second).unwrap(), [2; 8]);
    // The current card is another one than that of the slots.
    group.enter_layer(1, None).unwrap();
    group.copy_slot(first, third).unwrap();
    assert_eq!(*group.take_slot(third).unwrap(), [1; 8]);
    let tables =
        [&[Some(first)][..], &[], &[Some(first)]].map(|slots| group.slot_table(slots).unwrap());
    assert!(tables[0] != tables[1] && tables[1] != tables[2]);
    let stranger = cpu_group().bank(1, 8, BankPlace::Host).unwrap();
    assert!(group.take_slot(Slot { bank: stranger, index: 0 }).is_err());
    assert!(message(group.take_slot(Slot { index: 2, ..first })).starts_with("card 0: a slot"));
}

#[test]
fn a_ticket_is_done_when_all_cards_are() {
    let (mut group, controls) = controlled_group(2);
    let mut submit = |first, second| {
        (controls[0].get().submitted, controls[1].get().submitted) = (first, second);
        group.submit().unwrap()
    };
    let tickets = [submit(1, 0), submit(1, 1), submit(2, 1), submit(2, 1), submit(5, 3)];
    assert_eq!(tickets.map(|ticket| ticket.0), [1, 2, 3, 3, 4], "no card had ops for the fourth");
    let mut done = |first, second| {
        (controls[0].get().completed, controls[1].get().completed) = (first, second);
        [0, 1, 2, 3, 4].map(|ticket| group.done(Ticket(ticket)).unwrap())
    };
    assert_eq!(done(0, 9), [true, false, false, false, false]);
    assert_eq!(done(1, 0), [true, true, false, false, false]);
    assert_eq!(done(2, 1), [true, true, true, true, false]);
    assert_eq!(done(4, 3), [true, true, true, true, false]);
    assert_eq!(done(5, 3), [true; 5]);
    // A later ticket covers the earlier ones.
    let last = group.submit().unwrap();
    assert!(group.done(last).unwrap());
    controls[1].fail("submit");
    assert_eq!(message(group.submit()), "card 1: no submit");
    controls[1].fail("");
    // Of the failed submission nothing is left.
    (controls[0].get().submitted, controls[1].get().submitted) = (7, 4);
    let last = group.submit().unwrap();
    controls[0].get().completed = 7;
    assert!(!group.done(last).unwrap());
    controls[1].get().completed = 4;
    assert!(group.done(last).unwrap());
}

#[test]
fn completed_submissions_are_forgotten() {
    let (mut group, controls) = controlled_group(2);
    let mut last = Ticket(0);
    for i in 1..=1000u64 {
        controls.iter().for_each(|control| {
            control.get().submitted = i;
            control.get().completed = i.saturating_sub(3);
        });
        last = group.submit().unwrap();
    }
    assert_eq!(last, Ticket(1000));
    assert!(!group.done(Ticket(998)).unwrap() && group.done(Ticket(997)).unwrap());
    let polls = controls[0].get().polls;
    assert!((900..1100).contains(&polls), "each submission is looked at about once: {polls}");
}

#[test]
fn reads_and_writes_of_views_are_those_of_the_current_card() {
    let (mut group, _) = controlled_group(2);
    let buffer = group.buffer(4).unwrap();
    let view = View::rows(buffer, 2, 2);
    group.write(buffer, &[1.0, 2.0, 3.0, 4.0]).unwrap();
    group.enter_layer(1, None).unwrap();
    group.write_view(view.slice(1, 1), &[8.0, 9.0]).unwrap();
    let mut calls = Vec::new();
    let mut read = |group: &mut dyn Device| {
        let mut values = [0.0; 4];
        let meanwhile = &mut |card: &mut dyn Device| {
            let mut of_card = [0.0; 4];
            card.read(view, &mut of_card).unwrap();
            calls.push(of_card);
        };
        group.read_while(&mut [ViewRead { view, out: &mut values }], meanwhile).unwrap();
        let (first, second) = values.split_at_mut(2);
        let mut parts = [[0.0; 2]; 2];
        let [a, b] = &mut parts;
        let mut reads = [
            ViewRead { view: view.slice(0, 1), out: a },
            ViewRead { view: view.slice(1, 1), out: b },
        ];
        group.read_views(&mut reads).unwrap();
        assert_eq!([&*first, &*second], [&parts[0][..], &parts[1][..]]);
        values
    };
    assert_eq!(read(&mut *group), [1.0, 2.0, 8.0, 9.0]);
    group.enter_layer(0, None).unwrap();
    assert_eq!(read(&mut *group), [1.0, 2.0, 3.0, 4.0]);
    // While another card is read, the first one may record its layers.
    assert_eq!(calls, [[1.0, 2.0, 3.0, 4.0]]);
    let mut recorded = 0;
    let step = group.record_ahead(&[], 1, &mut |_| {
        recorded += 1;
        true
    });
    group.compile_ahead(&mut |_| recorded += 1).unwrap();
    assert_eq!(step.unwrap(), None);
    assert!(!group.submit_recorded(RecordedStep(0), &[1]).unwrap());
    assert_eq!(recorded, 0);
}

#[test]
fn planned_memory_is_a_sum_or_a_bound_of_all_cards() {
    let (mut group, controls) = controlled_group(2);
    assert_eq!((group.memory(), group.buffers_limit()), (None, None), "host memory");
    let memory = |total, unified, in_place| Some(DeviceMemory { total, unified, in_place });
    let of_cards = |first, second| {
        (controls[0].get().memory, controls[1].get().memory) = (first, second);
    };
    of_cards(memory(Some(10), false, true), memory(Some(7), false, true));
    assert_eq!(group.memory(), memory(Some(17), false, true));
    of_cards(memory(Some(10), false, true), memory(None, false, false));
    assert_eq!(group.memory(), memory(None, false, false));
    of_cards(memory(Some(10), true, true), memory(Some(7), false, true));
    assert_eq!(group.memory(), memory(Some(17), true, true));
    of_cards(None, memory(Some(7), false, true));
    assert_eq!(group.memory(), memory(None, true, true), "one card uses host memory");

    for (control, i) in controls.iter().zip(1..) {
        let mut requests = control.get();
        requests.driver_bytes = 10 * i;
        requests.scratch_bytes = 100 - i;
        requests.bank_slots = 5 + i as usize;
    }
    controls[1].get().buffers_limit = Some(50);
    assert_eq!(group.buffers_limit(), Some(50));
    controls[0].get().buffers_limit = Some(40);
    let shape = ScratchShape { rows: 3, ..ScratchShape::default() };
    assert_eq!(group.buffers_limit(), Some(40));
    assert_eq!((group.driver_bytes(), group.bank_slots(1)), (30, 6));
    assert_eq!(group.scratch_bytes(shape).unwrap(), 99);
    group.reserve_scratch(shape).unwrap();
    group.reserve_whole_states(true);
    for control in &controls {
        let requests = control.get();
        assert_eq!((requests.reserved, requests.reserves_whole), (shape, true));
    }
}

#[test]
fn measurements_are_sums_and_the_slowest_speed() {
    let (mut group, controls) = controlled_group(2);
    assert_eq!(group.read_speed().unwrap(), None);
    let time = |kernel, dispatches, seconds| KernelTime { kernel, dispatches, seconds };
    for (control, i) in controls.iter().zip(1u64..) {
        let mut requests = control.get();
        requests.counters = Counters {
            dispatches: i,
            submissions: 10 * i,
            waits: 100 * i,
            waited_ns: 1000 * i,
            kernels: 10_000 * i,
            compiling_ns: 100_000 * i,
        };
        requests.times = vec![time("gemv", i, 2.0), time(["topk", "norm"][i as usize - 1], 1, 1.0)];
        requests.times[1].seconds += 3.5 * (i - 1) as f64;
    }
    let sums = Counters {
        dispatches: 3,
        submissions: 30,
        waits: 300,
        waited_ns: 3000,
        kernels: 30_000,
        compiling_ns: 300_000,
    };
    assert_eq!(group.counters(), sums);
    let times = [time("norm", 1, 4.5), time("gemv", 3, 4.0), time("topk", 1, 1.0)];
    assert_eq!(group.profile(true).unwrap(), times);
    assert!(controls.iter().all(|control| control.get().profiles));
    controls[1].get().read_speed = Some(5.0);
    assert_eq!(group.read_speed().unwrap(), Some(5.0));
    controls[0].get().read_speed = Some(4.0);
    assert_eq!(group.read_speed().unwrap(), Some(4.0));
}
